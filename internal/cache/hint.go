package cache

// Hint gives the cap of a page's usage count: how much its reader expects the page to be used
// again.
type Hint uint8

// The hints. Accesses increment the usage count of a page up to the cap of their hint at most. The
// caps of Default and above are in the hot set.
const (
	Default  Hint = iota // blobs and leaves of point reads
	VeryLow              // integrity checks: a page stays among the first victims, however often it is visited
	Low                  // long scans, exports, backups: a page may survive one pass of the hand, and never becomes hot
	High                 // pages that the caller knows to be used again
	VeryHigh             // inner nodes: one serves hundreds of leaves
	hints
)
