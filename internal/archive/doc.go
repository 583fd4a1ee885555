// Package archive keeps the log of a store outside of the store, so that a state of any past epoch or time can be restored.
//
//	            stable records                    files of up to 16 MiB, each created once
//	log ──► wal.TailReader ──► Archiver ──► Writer ─────────────────► <lineage>/log/<first>-<last>.elog
//	 ▲                            │                                        │
//	 └── holder "archive" ◄───────┘ after the upload                       ▼
//	                                             NewPlan: base ── link ── file ── link ── file ──► target ──► Replay
//
// Terms. A *record* is what the log has of one epoch: a commit, a no-op, or the last one of some epochs that a restart skipped.
// An *archive file* has the records of consecutive epochs. Its *link* names the record before its first one by epoch, term and
// checksum; two files *follow* each other if the link of the second one is the last record of the first. A file without a link
// *begins* a chain: nothing is known of what is before it, so only a base backup at its first epoch or later can be before it.
// A *chain* is files of which each follows the one before. The *plan* of a restore is a base and the chain from it to the target.
//
// Invariants:
//   - No record is archived before its commit is visible and durable: no crash takes back what the archive has.
//   - A file is never changed. It is created whole under its final name, or not at all; an existing file with this name must have
//     the same records.
//   - The log is held from the last archived record on. The holder moves only after the file with the records before is there.
//   - What follows a gap or a bulk load is not linked to what is before it: a plan never leads across epochs that are missing.
//   - Each byte of a file is covered by a checksum, and a plan that is not carried out to its target is an error: damage or a lost
//     file never yields a shorter history.
//
// The archive has records and not segment files: segments differ between nodes, are recycled, and have torn ends. Records are the
// same on every node, so their links can be compared whatever the boundaries of files are.
//
// The package knows the log, batches and places for files. It knows no pages, no transactions and no network protocol.
package archive
