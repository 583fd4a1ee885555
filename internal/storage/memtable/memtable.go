// Package memtable is the ordered, multi-version map that the records of one log segment fill. It is
// stored outside the Go heap. A version has the epoch (commit sequence number) of its commit.
//
// Terms.
//
//	node      represents one user key (an internal key of package keys); it has the head of its version chain
//	chain     the versions of one key, newest first
//	block     a small array of slots; a slot is an atomic word with a node's offset and the key's head
//	head      32 bits that order as the keys do (see Heads); most comparisons read only heads
//	tower     a skiplist node for one block: an anchor (the smallest key that the block may hold), the
//	          block, and links whose words have the head of the tower that they point to
//	guide     a sorted array of the heads of every fourth tower, which makes most of a descent unnecessary
//	retired   an unlinked version at which a reader may still be; its memory is reclaimed later
//
// Picture.
//
//	towers   -inf ─────────────────► "k…" ───────────► "t…" ─► end      skiplist by anchor, head in the link word
//	           │                       │                 │
//	blocks   [ c a b . . ]           [ k m l . ]       [ t z . . ]      slots in order of arrival, filled by CAS
//	           │                         │
//	nodes    key "c"                   key "m" ─► version 9 ─► version 4 ─► version 1
//	           ▲                         ▲
//	index    [ . tag|offset . . . . tag|offset . ]                      hash of key to node: hits and "not here"
//
// Everything is in one arena: a reserved mapping with 32-bit offsets in units of 8 bytes. Nodes and
// towers are never removed; a table is dropped as a whole. The memory of pruned versions goes to free
// lists by size and is used again.
//
// Progress. Readers, iterators and Apply take no lock, make no system call, and allocate nothing:
// Apply runs between a log reservation and its completion, where a preempted writer delays every later
// commit. Secure obtains what Apply needs; it may grow the arena under a mutex and build a new guide.
// If the splits of other writers use up what Apply has secured, Apply takes memory from the arena's
// margin; only then may it need that mutex. Every step of an insert is a single CAS on a word that is
// written once. A goroutine that meets an unfinished split finishes it.
//
// Memory order. Every word that one goroutine writes while another may read it is accessed through
// sync/atomic, which is sequentially consistent in Go's memory model. The contents of a node, version,
// block or tower are written plainly before the CAS that publishes its offset, so a goroutine that
// loads the offset sees the contents. In race builds small arenas are on the Go heap, where the race
// detector can check this.
//
// Invariants
//   - Slots fill strictly in order, and a filled slot never changes. So two inserters of one key meet
//     in a slot, and a full block is immutable: every goroutine that splits it computes the same two
//     halves.
//   - A split links the right tower first and swaps the left tower's block second. So the keys of a
//     tower are below the next tower's anchor if its block was read before its link (see
//     advanceRight).
//   - A chain is ordered by epoch, newest first, and never loses the newest version of its key.
//   - A key is in the index only if it is in a block. It is in the index before Apply returns, unless
//     the index's probe window for it is full; a look-up notices that and searches the blocks.
//
// What it does not do. The package knows nothing of the log, of snapshots as objects, or of latches.
// Several goroutines may install versions of one key without losing one; the latch, not this package,
// makes their order the commit order.
package memtable
