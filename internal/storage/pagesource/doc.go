// Package pagesource reads the pages of the data file: for each kind of reader a source of pages, with the place at
// which it reads and the place at which pages are verified.
//
//	source         reader                        reads                          page valid until
//	Cached         merges' advice, error paths   through the cache              the slot's guard is left
//	Reader         point reads, batches          through the cache, and counts  the slot's guard is left
//	Scanner        scans                         through the cache; leaves do   the slot's guard is left
//	                                             not become hot
//	Merge          merges of checkpoints         past the cache, several        the next call
//	                                             leaves in one submission
//	Direct         verification, salvage         past the cache, one page       the next call
//	WholeTree      walks that need a path        past the cache                 the caller drops it
//	Skipping       one of the others             not what is quarantined        as that source says
//
//	   Reader, Scanner ──► cache ──miss──► read, verify ──► pager ──► vfs
//	   Merge, Direct, WholeTree ─────────► read, verify ──►
//	   merge ──► pager, and by AdmitWritten a copy to the cache
//
// Every tree page is verified (page.Verify) once, where it enters memory: readers trust what the cache gives them. Blob
// and overflow pages have a checksum that the pager verifies; package blob checks what is inside them when it decodes.
//
// Cached, Prefetcher and the counts of readers are safe for concurrent use. The other sources belong to one goroutine.
//
// Invariants:
//   - a page enters the cache only verified, or from a merge that has just written it;
//   - the cache holds no page whose id was freed: the pager calls Invalidate before the id can be allocated again;
//   - a merge holds no frame of the cache, so that it can neither block readers nor evict their pages.
//
// The package does not know the engine, views or memtables. Which root a reader uses, and when the guard of its slot is
// entered and left, is decided by package storage.
package pagesource
