// Package blob keeps the values that are too long for a tree leaf.
//
// Terms:
//
//	row         one value, or the last part of one with a list of where the rest lies; or one of two parts of such
//	tail        the second part of a row that was cut
//	row id      the row's name for life: an index into the row table; what a leaf's reference holds
//	row table   row id -> (page, slot, bytes): where the row lies now; in memory, and stored as a vector of pages
//	data page   a page of packed rows with a directory of slots
//	bulk page   a whole page of one value
//	fill        how much of a data page live rows take
//
//	leaf: key -> row 7            row table             data page 90                bulk pages 41, 42
//	  +-----------+           +------------------+     +---------------------+     +--------+--------+
//	  | ref 7     | ------->  | 7: page 90 slot 1| --> | row 3 | row 7 |     | --> | value of row 7  |
//	  +-----------+           +------------------+     +---------------------+     +--------+--------+
//
// A value of up to a page is one row. Of a longer one whole pages go to bulk pages, in one extent where there is one, and the
// remainder becomes a row, so that remainders of many values share a page. A reader reads the data page, then all bulk pages
// in one submission.
//
// Why a table. Written pages are never changed, so filling a partly filled page means writing a new one, with the old one's live rows. If a
// leaf named the page, each such move would rewrite leaves all over the tree, or rows could not move at all and sparse pages
// would stay sparse until their last row went. With the table a row moves without the tree knowing: pages are filled to the end with any
// batch, sparse ones are emptied, and pages at the end of the file move down. The price is eight bytes of memory and of disk for a value
// longer than a quarter page (0.4 % at the default page size), and one load for a read.
//
// Invariants:
//
//   - A row's bytes are the same wherever the table says it is, and a tail is in the table before the part that names it. So a reader of an
//     old root may follow the newest table.
//   - A row dropped by checkpoint c stays where it is, and its id unused, until ReuseAllFreed(c): a dropped row never moves, and the page
//     that it lies on is not reused before (it becomes pending in c or later).
//   - The stored table holds no dropped rows: after a crash their ids and places are free.
//   - Fill counts live rows only; a data page without any is freed by the checkpoint that dropped its last.
//
// What a Batch does is seen by nobody until its checkpoint is durable; then the table changes before Commit returns.
//
// Space. A batch takes each partly filled page once and fills it to the end: the fullest that has room for the next row (best fit), and
// of the rows that wait, each that still fits. If a quarter of the page is left then, the next row is cut in two. Reading it costs a second
// page, mostly the neighbour; without it values of 5000 bytes would fill 61 % of pages of 8 KiB instead of 92 %, and those of 3000 bytes
// 74 %. A row is cut once, and each part moves by itself. Pages less than a quarter free are left alone, since copying three quarters of a page to
// add a quarter costs more than it saves. When less than two thirds of all data pages is in use, the emptiest pages give up
// their rows, which then are packed with the batch.
//
// The package knows pages and their checkpoints; it does not know keys, epochs or the tree.
package blob
