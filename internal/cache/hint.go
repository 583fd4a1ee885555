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
