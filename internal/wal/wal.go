// Package wal is the log: bodies of bytes in, epochs out, and after a crash the same bodies in the same order.
//
//	segment   a preallocated file, and an off-heap image of it that writers fill; the flusher copies image to file
//	record    header and body of one commit, 8-byte aligned; the i-th record of a segment has epoch first + i
//	claim     a reserved place for one record: epoch and offset, both from one atomic add on the segment's tail
//	sealed    a segment that takes no more claims: one claim crossed its end
//	copied    the largest epoch such that it and all before it are published in their images
//	durable   the largest epoch such that it and all before it are on stable storage
//
//	          written and synced      copied, unwritten     hole    published
//	image   |########################|====================|.......|=========|.............|
//	                                 ^ durable            ^ copied          ^ tail       ^ end
//
// A writer reserves, copies its body, and publishes: checksum and header first, and the record's first word last. No
// counter is shared but the tail; the flusher finds the copied prefix by walking the first words. Whoever waits for
// an epoch first writes and syncs for all who have published by then; nobody waits for a timer. While a sync runs, later
// waiters queue, and a background goroutine goes on for them.
//
// The owner of the log drives rotation, because it rotates the memtable at the same point: the one claim that crosses
// the end tells its caller so, and the caller asks for the next segment. A spare one is kept prepared.
//
// Invariants:
//   - durable <= copied < the epoch of the next claim; durable moves only over a prefix, across segments too;
//   - nothing behind a hole is written, and nothing of a segment (its header included) is written before everything in
//     earlier segments is durable. So a segment with a valid header testifies that its predecessors were complete;
//   - a segment's first epoch is the epoch at which its predecessor was sealed;
//   - every epoch that was given out is less than durable + EpochWindow; a log that was not closed goes on that far behind its last
//     epoch, so that no epoch names two commits;
//   - before a run gives out an epoch, the header of its first segment is durable: a log that was closed ends in a mark, and one
//     that was opened since does not;
//   - a record is decoded only with the identity of the segment that it was written for, so that what a recycled file
//     still holds is never taken for a record;
//   - after a failed write or sync of a file with records durable never moves again, and every waiter gets the error. Anything else that
//     fails, about files that hold no needed record, is counted and tried again, and writers that need a segment wait meanwhile.
//
// The package knows bytes and epochs. It does not know what a body means, nor memtables, nor when to rotate.
package wal

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
)

// Errors by meaning. Damage carries its place: see CorruptionError and VersionError.
var (
	// ErrFailed means that a write or sync of the log failed, or that its owner stopped it (Fail). It is final: nothing becomes durable afterwards.
	ErrFailed = errors.New("wal: log has failed")
	// ErrClosed means that the log was closed before the epoch became durable.
	ErrClosed = errors.New("wal: log is closed")
	// ErrCorrupt is matched by every CorruptionError.
	ErrCorrupt = errors.New("wal: corrupt log")
	// ErrVersion is matched by every VersionError.
	ErrVersion = errors.New("wal: written by a newer version")
)

// CorruptionError is damage to something that had been durable: the log must not be replayed past it, and must not be
// taken to end there either.
type CorruptionError struct {
	File   string
	Offset int64      // of the damaged record or header
	Epoch  keys.Epoch // the first epoch that cannot be read
	Reason string
	Remedy string
}

const remedy = "restore a backup, or repair the log, which drops this epoch and everything after it"

func (e *CorruptionError) Error() string {
	return fmt.Sprintf("%v: %s at offset %d, epoch %d: %s (%s)", ErrCorrupt, e.File, e.Offset, e.Epoch, e.Reason, e.Remedy)
}

// Unwrap makes the error match ErrCorrupt.
func (e *CorruptionError) Unwrap() error { return ErrCorrupt }

// VersionError is an intact header or record that uses what this version does not know.
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
