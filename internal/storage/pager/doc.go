// Package pager allocates fixed-size pages of one data file by id, remembers which are free, and makes a
// new state of the file durable.
//
// Terms:
//
//	page        a fixed-size block; its id is its offset divided by the page size; never changed once written
//	extent      a run of neighbouring pages that are allocated together
//	checkpoint  the step from one durable state to the next, numbered 1, 2, 3, ...; one is built at a time
//	superblock  the root of a state: it names the roots of tree, indirection table and allocation map
//	slot        page 0 or 1, where the superblocks of even and odd checkpoints are
//	copy        a live page that holds a superblock a second time
//	live        reachable from the state under construction
//	pending     freed by checkpoint c and perhaps still read through a root older than c
//	pinned      a checkpoint whose pages are not reused while a long reader, for instance a verification, uses it
//	free        allocatable
//	taken       allocated by the running checkpoint, and not yet part of a state
//	page array  a copy-on-write array of pages below one root: the allocation map and the indirection table
//
//	page 0        page 1        page 2 ...
//	+-------------+-------------+-----+-----+-----+-----+-----+-- - -+
//	| superblock  | superblock  | live| free| pend| live| map | grown|
//	| even number | odd number  |     |     |     |     |     |      |
//	+-------------+-------------+-----+-----+-----+-----+-----+-- - -+
//	                                            page count ^     ^ file size
//
// Invariants:
//
//   - Live, pending, taken and free are disjoint and cover [2, page count). Pages past the count are free.
//   - Only taken pages are written. So no page that a durable superblock reaches, or that a reader of an
//     older root may read, is overwritten.
//   - A page freed by checkpoint c is allocated again only after superblock c is durable, and after
//     ReuseAllFreed(c) or ReuseFreed(c). ReuseAllFreed says that no reader holds an older root. After
//     ReuseFreed the page also must not be reachable from a pinned checkpoint. Both take effect between
//     checkpoints, so that the pages of a checkpoint depend on the states before it, and not on the moment
//     at which a reader ends.
//   - The stored map holds the live pages and nothing else. What was pending or taken when the process died
//     is free when the file is opened again. So nothing leaks, and nothing has to be searched.
//   - Extents come from the lowest free addresses, so that the file end becomes free and can be truncated.
//   - The number of the newest checkpoint never falls, and neither does its epoch.
//
// A checkpoint may be prepared while it is built (Prepare), so that its Commit is short however many pages it has. That
// changes only what is in memory.
//
// Crash order of Commit: data pages (written while they are built), map pages, SyncData, superblock in the
// slot that does not hold the current one and in its copy, SyncData. Only then does the new state exist:
// readers may get its root, the pages that it replaced become pending, and the file may be truncated after
// its last page. A process that dies before the end of the second sync leaves the old state untouched. The
// new superblock may or may not be in the file, and both cases are valid states.
//
// One damaged superblock or copy costs nothing: Open takes the other one and writes it again
// (SuperblockDamage). If both pages of a superblock are damaged, Open goes back to the previous state only
// if that is whole (superblocks.go). The log after its epoch may have been recycled; recovery of the log
// notices that, and SuperblockMissing then says why. A damaged allocation map is rebuilt from what is
// reachable (RebuildMap).
//
// Errors. A failed write or sync is final: the pager takes no further checkpoint (ErrFailed), because what
// is on the device is unknown. A full device is not final: the checkpoint is aborted, nothing durable is
// touched, and a later checkpoint may succeed. Damage that a read finds is a CorruptError with file, page
// and reason.
//
// A Reader reads one durable state. A Pager is a Reader whose state changes with each checkpoint. A Snapshot
// is a Reader whose state never changes, and has no method that writes.
//
// Readers never wait for a checkpoint: reading takes no lock. Lock order: a Checkpoint's mutex is the only
// one.
//
// The pager does not know what is inside tree pages, which readers there are, or what an epoch (commit
// sequence number) means. Values that do not fit into a leaf belong to package blob.
package pager
