// Package wal is the write-ahead log. It takes bodies of bytes and gives each of them an epoch, the
// commit sequence number. After a crash it returns the same bodies in the same order.
//
//	segment         a preallocated log file and its segment buffer
//	segment buffer  the off-heap copy of a segment that writers fill and the flusher writes to the file
//	record          header and body of one commit, 8-byte aligned; record i of a segment has epoch first + i
//	reservation     the epoch and the offset of one record, from one atomic add on the segment's tail
//	sealed          a segment that takes no more reservations, because one has crossed its end
//	close record    the last record of a segment, or of a log that was closed; it has no epoch of its own
//	superseded      not part of the history any more, because a later segment begins at the epoch or before it
//	copied          the largest epoch E such that every epoch <= E is published in its segment buffer
//	durable         the largest epoch E such that every epoch <= E is on stable storage
//
//	          written and synced      copied, unwritten     hole    published
//	buffer  |########################|====================|.......|=========|.............|
//	                                 ^ durable            ^ copied          ^ tail       ^ end
//
// A writer reserves, copies its body and publishes. To publish is to store the checksum and the
// header, and then the first word of the record. The tail is the only shared counter; the flusher
// finds the copied prefix from the first words. The first goroutine that waits for an epoch becomes
// the flusher: without a delay, it writes and syncs everything that is published by then, for all
// waiters. While a sync runs, later waiters queue, and a background goroutine flushes for them. Only
// that goroutine delays a sync, while commits keep coming (the group-commit delay).
//
// The owner of the log drives rotation, because it rotates the memtable at the same point. Exactly
// one reservation crosses the end of a segment. Its caller learns that, and asks for the next
// segment, of which at least one is preallocated in the background.
//
// Invariants:
//   - a segment that begins at epoch e ends every earlier segment at e - 1; durable moves back only then (Supersede), and
//     no goroutine waits;
//   - durable <= copied < the epoch of the next reservation, and durable <= written <= reserved;
//     durable moves over a prefix only, also from one segment to the next;
//   - a record is published once, and no record after a hole is written;
//   - nothing of a segment, not even its header, is written before all earlier segments are durable,
//     so a segment with a valid header proves that the segments before it were complete;
//   - the first epoch of a segment that supersedes nothing is the epoch at which the segment before it was sealed;
//   - every epoch that was given out is less than durable + EpochWindow; a log that was not closed
//     continues at that distance from its last epoch, so that no epoch names two commits;
//   - the header of the first segment of a run is durable before the run gives out an epoch. So a log
//     that ends in a close record was closed, and has not been opened since;
//   - a record is decoded only with the identity of the segment for which it was written, so that old
//     contents of a recycled file are never taken for a record;
//   - after a failed write or sync of a file with records, durable never moves again, and every waiter
//     gets the error. Other failures concern files without needed records: they are counted and tried
//     again, and a writer that needs a segment waits meanwhile.
//
// Builds with the tag invariants check these and some more; see assert.go. The checks that cost a
// commit nothing are in all builds, and stop the log.
//
// The package knows bytes and epochs. It does not know what a body means, it does not know memtables,
// and it does not decide when to rotate.
package wal

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
)

// Errors by meaning. Errors about damage name file and offset: see CorruptionError and VersionError.
var (
	// ErrFailed means that a write or sync of the log failed, or that its owner stopped it (Fail). It is
	// final: nothing becomes durable afterwards.
	ErrFailed = errors.New("wal: log has failed")
	// ErrClosed means that the log was closed before the epoch became durable.
	ErrClosed = errors.New("wal: log is closed")
	// ErrCorrupt is matched by every CorruptionError.
	ErrCorrupt = errors.New("wal: corrupt log")
	// ErrVersion is matched by every VersionError.
	ErrVersion = errors.New("wal: written by a newer version")
)

// CorruptionError is damage to something that was durable. The log must not be replayed past it, and
// the damage must not be taken for the end of the log.
type CorruptionError struct {
	File   string
	Offset int64      // of the damaged record or header
	Epoch  keys.Epoch // the first epoch that cannot be read
	Reason string
	Remedy string
}

const remedy = "restore a backup, or repair the log, which drops this epoch and everything after it, as far as the data file does not have it"

func (e *CorruptionError) Error() string {
	return fmt.Sprintf("%v: %s at offset %d, epoch %d: %s (%s)", ErrCorrupt, e.File, e.Offset, e.Epoch, e.Reason, e.Remedy)
}

// Unwrap makes the error match ErrCorrupt.
func (e *CorruptionError) Unwrap() error { return ErrCorrupt }

// LineageError is a log file of another store, or of another history of this one. It is refused, and neither replayed nor
// removed.
type LineageError struct {
	File        string
	Found, Want string // lineages; of Found the beginning
}

func (e *LineageError) Error() string {
	return fmt.Sprintf("wal: %s: %s (%s)", e.File, e.Reason(), e.Remedy())
}

// Reason is what is wrong with the file.
func (e *LineageError) Reason() string {
	return fmt.Sprintf("the file belongs to another store: it has the lineage %s, and the data file has %s", e.Found, e.Want)
}

// Remedy is what to do about it.
func (e *LineageError) Remedy() string { return "move the file to the directory where it belongs" }

// VersionError is an intact header or record with features that this version does not know.
type VersionError struct {
	File   string
	Offset int64
	What   string
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("%v: %s at offset %d: %s", ErrVersion, e.File, e.Offset, e.What)
}

// Unwrap makes the error match ErrVersion.
func (e *VersionError) Unwrap() error { return ErrVersion }
