// Package repairtree lets checkpoints skip pages of the tree that cannot be read any more (ADR 0018).
//
//	skipped page    a page of the tree, leaf or inner node, that a merge needed and could not read
//	skipped range   the keys of that page: from its separator to the next one, trailers included
//	repair tree     a second tree in the same file: a record of each skipped page, and every version that was merged
//	                into a skipped range since
//	mirror          a tree with the same contents in pages of its own, for the case that a page of the repair tree is
//	                damaged too
//
//	tree            [ a ... f | f ... m | m ... ]      a reader of h looks in the repair tree first. What the repair tree
//	                           /////////               does not have at the reader's snapshot is only in the skipped page:
//	repair tree                h@90  k@87 (deleted)    the read fails with DATA_LOSS.
//
// The tree itself stays as it was. The skipped page keeps its location, is not read by merges, and is never freed, so that
// it can still be read if the device recovers, and by salvage. Versions in the repair tree are newer than all versions of
// their keys in the tree, and the repair tree retains tombstones. So it is right to look there first, whether the page can
// be read or not. Walks in key order refuse a skipped page by its id. Otherwise they would return versions of the page as
// the newest ones, although the repair tree has newer ones.
//
// A merge (package storage) calls Outside for the part of its input that goes into the tree, and Merge for the rest. A page
// that the merge cannot read is added by With, and the merge is tried again.
//
// Invariants:
//   - once a range is in the repair tree, no version of a key in it goes into the tree;
//   - a merge neither reads nor replaces a skipped page, nor any page below it;
//   - the repair tree and the ranges that a view names belong to the same durable state.
//
// A Tree is immutable, and safe for concurrent use. A nil Tree is the repair tree of a store without skipped pages.
//
// The package does not decide which errors of a merge are worth another attempt, and does not write superblocks.
package repairtree
