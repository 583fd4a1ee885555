// Package pager hands out fixed-size pages of one data file by id, remembers which are free, and makes a new state of
// the file durable.
//
// Terms:
//
//	page        a fixed-size block; its id is its offset divided by the page size; never changed once written
//	extent      a run of neighbouring pages allocated together
//	checkpoint  the step from one durable state to the next, numbered 1, 2, 3, ...; one is built at a time
//	superblock  the root of a state: where the tree, the rows and the allocation map begin, and how many pages there are
//	slot        page 0 or 1, where the superblocks of even and odd checkpoints are
//	copy        a live page that holds a superblock a second time
//	live        reachable from the state that is being built
//	pending     freed by checkpoint c and perhaps still read through a root older than c
//	frozen      a state that somebody looks at for long: a check, for instance
//	free        to be handed out
//	taken       handed out by the checkpoint that is being built, and not yet part of a state
//	vector      a copy-on-write array of pages below one root; the allocation map is one, the row table another
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
//   - Live, pending, taken and free are disjoint and cover [2, page count); pages past the count are free.
//   - Only taken pages are written. So nothing that a durable superblock reaches is overwritten, and neither is anything
//     that a reader of an older root may still want.
//   - A page freed by checkpoint c is handed out again only after the superblock c is durable and ReuseAllFreed(c) said
//     that every reader of an older root is gone, or ReuseFreed(c) did, and no frozen state reaches it. Releases take effect between checkpoints, so that
//     where a checkpoint puts its pages depends on the states before it and not on the moment at which a reader leaves.
//   - The stored map holds the live pages and nothing else: what was pending or taken when the process died is free
//     when the file is opened again. Nothing leaks and nothing needs to be searched for.
//   - Extents come from the lowest free addresses, so that the end of the file falls free and can be cut.
//
// Crash order of Commit: data pages (written as they are built), map pages, SyncData, superblock in the slot that does
// not hold the current one and in its copy, SyncData. Only then does the new state exist: readers may be given its root, the pages it
// replaced become pending, and the file may be cut behind its last page. A process that dies before the second sync
// finished finds the old state untouched; the new superblock may or may not have arrived, and both are states.
//
// One damaged superblock or copy costs nothing: Open takes the other one and writes it anew (SuperblockDamage). If both places of a superblock are
// damaged Open goes back to the state before only if that is whole (superblocks.go); the log after its epoch may have been recycled, which the
// log's own recovery notices, and SuperblockMissing then says why. A damaged allocation map is made anew from what is reachable (RebuildMap).
//
// Errors. A failed write or sync is final: the pager takes no further checkpoint (ErrFailed), because what is on the
// device is unknown. A full device is not: the checkpoint is given up, nothing that was durable is touched, and a later
// one may succeed. Damage found by a read is a CorruptError with file, page and reason.
//
// Readers never wait for a checkpoint: reading takes no lock. Lock order: a Checkpoint's mutex is the only one.
//
// The pager does not know what is inside tree pages, who reads them, or what an epoch means. Values that do not fit
// into a leaf are the business of package rows beneath it.
package pager
