// Package memtable is the ordered, multi-version map that one log segment's records fill, kept outside the Go heap.
//
// Terms. A node stands for one user key (an internal key, in the words of package keys) and owns the head of its version
// chain, newest first. A block is a small array of slots, each an atomic word that holds a node's offset beside the 32-bit
// head of its key; heads are taken after the table's common prefix, so most comparisons touch neither node nor key. A
// tower is a skiplist node that stands for a block: it has an anchor (the smallest key its block may hold), the block, and
// links whose words carry the head of the tower they point to. The guide is a sorted array of the heads of every fourth
// tower, a hint that spares most of a descent.
//
//	towers   -inf ─────────────────► "k…" ───────────► "t…" ─► end      skiplist by anchor, head in the link word
//	           │                       │                 │
//	blocks   [ c a b . . ]           [ k m l . ]       [ t z . . ]      slots in order of arrival, filled by CAS
//	           │                         │
//	nodes    key "c"                   key "m" ─► version 9 ─► version 4 ─► version 1
//	           ▲                         ▲
//	index    [ . tag|offset . . . . tag|offset . ]                      hash of key to node: hits and "not here"
//
// Everything lives in one arena: a reserved mapping with 32-bit offsets in units of 8 bytes. Nodes and towers are never
// removed; a table is dropped whole. Pruned versions return to free lists by size and are used again.
//
// Progress. Readers, iterators and Apply take no lock, make no system call, and allocate nothing: Apply runs between a
// log reservation and its mark, where whoever is preempted holds up every later commit. What it needs is secured before
// (Secure), which may grow the arena under a mutex and draw a new guide. Should others' splits use up what Apply has
// secured, it takes from the arena's margin, which is the one way in which it may still meet that mutex. All steps of an insert are single CAS on words that are written
// once, and a split that somebody began is finished by whoever meets it.
//
// Memory order. Every word that one goroutine writes while another may read it is accessed through sync/atomic, which is
// sequentially consistent in Go's memory model. What a node, version, block or tower holds is written plainly before the
// CAS that publishes its offset, so whoever loads the offset sees the contents. In race builds small arenas live on
// the Go heap, where the race detector can check this claim.
//
// Invariants
//   - Slots fill strictly in order, and a filled slot never changes, so two inserters of one key meet in a slot and a full
//     block is immutable: every goroutine that splits it computes the same two halves.
//   - A split links the right tower first and swaps the left tower's block second; so a tower's keys are below the
//     next tower's anchor once its block was read before its link (see settle).
//   - A chain is ordered by epoch, newest first, and never loses the newest version of its key.
//   - A key is in the index only if it is in a block; it is in the index before Apply returns, unless the index's probe window
//     for it is full, which a look-up notices and answers through the blocks.
//
// The package knows nothing of the log, of snapshots as objects, or of who latches keys. Installing versions of one
// key from several goroutines is safe and loses nothing; that their order is the commit order is the latch's business.
package memtable
