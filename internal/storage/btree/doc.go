// Package btree is a copy-on-write B+tree of versions over immutable pages.
//
// A Root names a state of the tree that never changes. Readers descend from it without a lock. A
// Merge writes new pages next to the old ones and returns a new Root and the ids of the pages that
// the new tree does not use. Single writes, batches, bulk loads, vacuum and checkpoints are all a
// Merge with different input.
//
//	         root                     Get, NewestEpoch, ChangedSince, FindAll   point and range reads
//	       /  |   \                   Cursor                                    scans at a snapshot, both ways
//	  inner  inner  inner             Changed                                   keys that changed between two epochs
//	 / | \   / | \  / | \             Walk                                      every page, with checks
//	                                  Merge                                     base + sorted input -> new root
//	leaves of versions: key ascending, newest first
//
// A merge is divided into partitions: neighbouring leaves, cut at the tree's own separators. Each
// free worker takes the next partition and builds new leaves from old leaves and input. What
// depends on order (page ids, references to large values, the levels above) is done for one
// partition after the other in key order, under one lock. So one worker or many write the same
// bytes.
//
// Terms:
//
//	epoch      commit sequence number of a version
//	partition  neighbouring leaves and the input for them: what one worker does alone
//	run        consecutive entries on their way into new leaves, from one unchanged leaf to the next
//	bound      the separator at which a leaf, a partition, or a subtree ends
//	dead       a version is dead if no snapshot can see it; see Policy
//	vacuum     rewriting leaves for their dead versions, although there is no input for them
//
// Invariants:
//   - Every entry of a subtree is in [its separator, the next one). The leftmost separator is minus
//     infinity.
//   - The entries of a leaf ascend strictly by (key, newest first), and so do the separators of an
//     inner node.
//   - A separator has a trailer only if the versions of one key continue after it. It is then
//     directly after the version before it, so that the newest version not newer than e is never in
//     the leaf after the one that a search for it finds.
//   - The newest epoch that a parent has for a child is not less than that of any version below it.
//   - A page freed by a merge is reachable from its base and not from its result.
//
// The package does no I/O of its own. Its callers decide which pages are free, which readers still
// use an old root, and where large values are stored.
package btree
