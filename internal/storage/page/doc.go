// Package page defines the bytes of pages: the header of every page, and the two kinds of tree page.
//
// A page is a fixed-size block of the data file, immutable once written. Its first 32 bytes have the same
// layout in all pages: checksum, type, version, flags, id, the checkpoint that wrote it, and the newest
// epoch (commit sequence number) below it. Tree pages continue with 32 bytes of their own. So what a search
// reads first (count, prefix length, and the fingerprints at byte 64) is on one aligned pair of cache lines.
//
//	leaf    fingerprints | prefix | offsets | heads | entry entry entry ...
//	inner   prefix | heads | offsets | children | newest epochs | separator separator ...
//
// Terms:
//
//	prefix       what all keys (or separators) of a page share, stored once
//	suffix       a key without the page's prefix
//	head         the first four bytes of a suffix, big-endian, zero padded, so that integers compare as keys do
//	fingerprint  one byte of a hash of the whole key, so that a point read compares eight keys at a time
//	separator    the lower bound of a child: a shortened key, with a trailer only between versions of one key
//
//	dead-version ratio
//	             the part of a page that superseded versions and tombstones take, whether a snapshot needs
//	             them or not; stored in the parent
//
// Invariants of a leaf: entries ascend by (key, trailer descending). The versions of a key are adjacent,
// and all but the first of them have an empty suffix. Invariants of an inner node: separators ascend. Child
// i holds exactly the internal keys in [separator i, separator i+1). Separator 0 is the node's own lower
// bound and is not stored.
//
// Check and Verify decide whether bytes are an intact page. The accessors of Leaf and Inner trust a verified
// page: they stay inside it, and never panic on one. Their results on unverified bytes mean nothing.
//
// The package does no I/O, and does not know how pages refer to each other.
package page
