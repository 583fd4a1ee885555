// Package blob stores the values that are too long for a tree leaf.
//
// Terms:
//
//	blob               a value that is stored outside the tree
//	blob id            the name of a blob for its whole life: an index into the indirection table
//	fragment           what a slot of a blob page holds: a whole blob; its head, which lists
//	                   overflow pages and ends with the remainder; or the second fragment of either
//	indirection table  blob id -> location (page, slot, bytes); in memory, and stored as a
//	                   copy-on-write page array. A second fragment has an id of its own
//	blob page          a page of packed fragments with a directory of slots
//	overflow page      a whole page that holds a part of one blob
//	fill               how many bytes of a blob page live fragments take
//
//	leaf: key -> blob 7         indirection table       blob page 90                overflow pages 41, 42
//	  +-------+             +------------------+    +--------------------+      +--------+--------+
//	  | ref 7 | ----------> | 7: page 90 slot 1| -> | frag 3 | frag 7 |  | ---> | value of blob 7 |
//	  +-------+             +------------------+    +--------------------+      +--------+--------+
//
// A value of up to a page is one fragment. A longer value is divided: whole pages of it go to overflow
// pages, in one extent if there is one, and the remainder goes into the head fragment. So the
// remainders of many values share a page. A reader reads the blob page first, and then all overflow
// pages in one submission.
//
// Why a table. Written pages are never changed. To fill a partly filled page, a batch writes a new page
// that also holds the live fragments of the old one. If a leaf named the page, each such move would
// rewrite leaves all over the tree. If fragments could not move at all, sparse pages would stay sparse
// until their last fragment was dropped. With the table a fragment moves without a change to the tree:
// every batch fills its pages to the end, sparse pages are emptied, and pages at the file end move
// down. The price is eight bytes of memory and of disk for each value longer than a quarter page (0.4 %
// at the default page size), and one load for each read.
//
// Invariants:
//
//   - The bytes of a fragment are the same at every location that the table ever gives for it, and a
//     second fragment is in the table before the fragment that names it. So a reader of an old root may
//     follow the newest table.
//   - A blob dropped by checkpoint c keeps its location, and its id stays unused, until
//     ReuseAllFreed(c). A dropped fragment never moves, and its page is not reused before then (the
//     page becomes pending in c or later).
//   - The stored table holds no dropped blobs: after a crash their ids and slots are free.
//   - Fill counts live fragments only. The checkpoint that drops the last fragment of a page frees it.
//
// The changes of a Batch are not visible until its checkpoint is durable: new blobs are in the table
// earlier, when no reader has a reference to them. For older blobs the table changes after that, before
// Commit returns or, for a batch that was prepared, in Publish.
//
// Space. A batch takes each partly filled page once and fills it to the end: it takes the fullest page
// that has room for the next fragment (best fit), and adds each queued fragment that still fits. If a
// quarter of the page is left then, the next fragment is cut in two. A cut blob costs a second page
// read, mostly of the neighbouring page. Without cuts, values of 5000 bytes would fill 61 % of pages of
// 8 KiB instead of 92 %, and values of 3000 bytes 74 %. A fragment is cut once, and both parts move
// independently. Pages that are less than a quarter free are not filled up: to copy three quarters of
// a page in order to add a quarter costs more than it saves. While less than two thirds of all blob
// pages is in use, the emptiest pages are evacuated: their fragments are packed with the batch.
//
// The package knows pages and their checkpoints. It does not know keys, epochs or the tree.
package blob
