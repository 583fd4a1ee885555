package cache

// Hint says how warm a page may become: how much its reader expects it to be wanted again.
type Hint uint8

// The hints. A page's warmth climbs to its hint's cap at most; the caps of Default and above lie in the HOT band.
const (
	Default  Hint = iota // rows and leaves of point reads
	VeryLow              // integrity checks: a page stays first in line for eviction, however often it is seen
	Low                  // long scans, exports, backups: a page may survive one lap of the hand, never become HOT
	High                 // pages that the caller knows to be wanted again
	VeryHigh             // inner nodes: one serves hundreds of leaves
	hints
)

// Policy chooses who is evicted. All but TwoBand are there to be compared with.
type Policy uint8

// The policies.
const (
	TwoBand Policy = iota // CLOCK with a COOL and a HOT band and a memory of who was evicted
	Clock                 // one reference bit
	LRU                   // least recently used; every hit takes a lock
)
