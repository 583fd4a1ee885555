// Package page defines the bytes of pages: the header every page carries, and the two kinds of tree page.
//
// A page is a fixed-size block of the data file, immutable once written. Its first 32 bytes are the same whatever it holds:
// checksum, type, version, flags, id, the checkpoint that wrote it, and the newest epoch below it. Tree pages go on with
// 32 bytes of their own, so that what a search touches first (count, prefix length, and the fingerprints at byte 64)
// lies on one aligned pair of cache lines.
//
//	leaf    fingerprints | heads | offsets | prefix | entry entry entry ...
//	inner   heads | offsets | children | newest epochs | prefix | separator separator ...
//
// Terms:
//
//	prefix       what all keys (or separators) of a page share, stored once
//	suffix       a key without the page's prefix
//	head         the first four bytes of a suffix, big-endian, zero padded, so that integers compare as keys do
//	fingerprint  one byte of a hash of the whole key, so that a point read compares eight keys at a time
//	stale        said of a version that another of its key has superseded, and of a tombstone: it stays until nobody can see it
//	separator    the lower bound of a child: a shortened key, with a trailer only between versions of one key
//
// Invariants of a leaf: entries ascend by (key, trailer descending); a key's versions stand side by side, and all but
// the first of them have an empty suffix. Invariants of an inner node: separators ascend, child i holds exactly the internal keys in
// [separator i, separator i+1), and separator 0 is the node's own lower bound and not stored.
//
// Check and Verify decide whether bytes are a sound page. The accessors of Leaf and Inner trust a verified page: they stay inside
// it, and never panic on one, but what they answer about unverified bytes means nothing.
//
// The package does no I/O and does not know how pages hang together.
package page
