// Package orphans finds the children of inner nodes that cannot be read (ADR 0047).
//
// The pages below a damaged inner node are intact, but only the node knew where they are:
//
//	lost node    an inner node of the tree that cannot be read
//	orphan       a live page that nothing readable refers to: live pages, less those that the intact nodes of the tree,
//	             the repair tree, the blob store, the allocation map and the superblocks reach
//	top          an orphan that no readable orphan refers to: a child of a lost node, or of an unreadable orphan
//	remains      what the bytes of a damaged node still seem to say (page.Remains)
//
//	          root                       live pages             5 6 7 8 9 10 11 12
//	        /   |    \                   reached                5 6     9 10
//	      5    (6)    9                  orphans                    7 8       11 12
//	          ?  ?     \                 tops of level 0, in the range of page 6: they are its children,
//	         7 8 11 12  10               and their keys are the order and the separators
//
// What Find returns is proved, or it is not returned. The proof is by exhaustion, and needs an exact allocation map: every
// live page of a tree is reachable (storage keeps that in the superblock). Then
//
//   - every child of a lost node is an orphan, because a page of the tree has one parent;
//   - every readable orphan is below a lost node, because it is reachable;
//   - if each top is a child of exactly one lost node, and fits there by level and keys, no child is missing and none
//     is foreign. Pages of older states are not live in the newest one, whatever snapshots pin them.
//
// An unreadable top can be anything. It gets its place from the remains of its parent, if these name exactly the tops and
// nothing else, in the order of the keys of all readable ones; or if it is the only one, and leaves without a parent prove
// that it is the node between them and a lost node. The separators next to an unreadable child are as far from it as the
// readable neighbours allow, so that no key that it may have reads as absent. Anything else is refused: the node stays
// lost, and its keys are DATA_LOSS as before.
//
// Find reads pages of one pinned state and changes nothing. It keeps a few bits for each page of the file and a bounded
// number of keys.
package orphans
