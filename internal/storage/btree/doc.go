// Package btree is a copy-on-write B+tree of versions over immutable pages.
//
// A Root is a state of the tree that never changes. Readers descend from it without any lock; a Merge writes new pages beside
// the old ones and answers with a new Root and the ids of the pages that it does without. Single writes, batches, bulk loads and
// checkpoints are all one Merge, of which the input differs.
//
//	         root                     Get, NewestEpoch, ChangedSince, FindAll   point and range reads
//	       /  |   \                   Cursor                                    scans at a snapshot, both ways
//	  inner  inner  inner             Walk                                      every page, with checks
//	 / | \   / | \  / | \             Merge                                     base + sorted input -> new root
//	leaves of versions: key ascending, newest first
//
// A merge is divided into parts: runs of neighbouring leaves, cut at the tree's own separators. Workers take parts and
// build new leaves from old leaves and input, whoever is free. What depends on order (page ids, places of large
// values, the levels above) is done part by part in key order, under one lock, so that one worker or many give the same bytes.
//
// Terms:
//
//	part    neighbouring leaves and the input that falls on them: what one worker does alone
//	run     consecutive entries on their way into new leaves, from one untouched leaf to the next
//	bound   the separator at which a leaf, a part, or a subtree ends
//	live    an epoch is live if a snapshot of it exists; see Policy
//
// Invariants:
//   - every entry of a subtree lies in [its separator, the next one); the leftmost separator is minus infinity;
//   - a separator has a trailer only if the versions of one key continue behind it, and then stands directly behind the version
//     in front, so that the newest version not newer than e is never in the leaf after the one that a search for it finds;
//   - the newest epoch that a parent notes of a child is not less than that of any version below it;
//   - a page freed by a merge is reachable from its base and not from its result.
//
// The package does no I/O of its own, and leaves to its callers which pages are free, who still reads an old root, and
// where large values are.
package btree
