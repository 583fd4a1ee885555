package wal

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// tailBytes is how much of a write goes through the flusher's own buffer. Writes are whole pages,
// padded with zeros after the last copied record. For a part of a page, the kernel would have to read
// the rest from a recycled file; and after the copied prefix, writers are filling the segment buffer.
// One copy of up to 64 KiB is cheaper than a second system call.
const tailBytes = 64 << 10

// flusher is the progress of writing. The holder of the flush role owns it.
type flusher struct {
	segment *Segment
	pos     uint32     // end of the copied prefix in segment
	written uint32     // end of what is written and synced
	next    keys.Epoch // epoch of the record at pos
	closed  bool       // the close record of a sealed segment is before pos
	tail    [tailBytes]byte

	finished bool // the close record of the log is written
}

// flushStep writes and syncs the copied records of one segment, moves durable, and goes to the next
// segment if this one is complete. It reports whether anything moved. The caller holds the flush role.
func (l *Log) flushStep() (moved bool, err error) {
	if err := l.Err(); err != nil {
		return false, err
	}
	f := &l.flusher
	if f.segment == nil && !f.start(l.head.Load()) {
		return false, nil
	}
	records, err := f.walk()
	if err == nil {
		err = f.checkPosition(records, l.Durable())
	}
	if err != nil {
		return false, l.broken(err)
	}
	if f.pos > f.written && records > 0 {
		if err := l.writeAndSync(records); err != nil {
			return false, l.fail(err)
		}
		moved = true
	}
	durable := f.next - 1
	left, err := l.leaveSealed()
	if moved {
		l.durable.epoch.Store(uint64(durable))
	}
	if err != nil {
		return false, l.fail(err)
	}
	return moved || left, nil
}

func (f *flusher) start(s *Segment) bool {
	if s == nil {
		return false
	}
	f.segment, f.pos, f.written, f.next, f.closed = s, s.begin, 0, s.first, false
	return true
}

// walk moves pos over the records that are copied by now, and returns their number.
func (f *flusher) walk() (records int, err error) {
	pos, end := f.pos, uint32(len(f.segment.buffer))
	if offset, _, sealed := f.segment.sealedAt(); sealed {
		end = offset
	}
	buffer := f.segment.buffer
	for pos < end {
		word := littleEndian(atomic.LoadUint64(firstWord(buffer[pos:])))
		if word == 0 {
			break
		}
		if err := f.checkRecord(pos, f.next+keys.Epoch(records)); err != nil {
			return 0, err
		}
		pos += recordSpace(uint32(word >> 32))
		records++
	}
	f.pos = pos
	f.next += keys.Epoch(records)
	return records, nil
}

func (l *Log) writeAndSync(records int) error {
	f := &l.flusher
	start, pos := time.Now(), f.pos
	f.addCloseRecord(l.Durable())
	if err := f.write(); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	written := time.Now()
	if err := f.segment.file.SyncData(); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	l.counts.flushed(records, int(pos-max(f.written, f.segment.begin)), written.Sub(start), time.Since(written))
	f.written = f.pos
	f.segment.synced.Store(f.written)
	l.beginPreparing(int(f.written))
	l.durableHeader.Store(f.segment.number)
	return nil
}

// addCloseRecord adds a close record, with the number of the next segment, after the last record of a
// sealed segment, if all its records are copied and the next segment is known.
func (f *flusher) addCloseRecord(durable keys.Epoch) {
	s := f.segment
	next := s.next.Load()
	if next == nil || f.closed {
		return
	}
	if offset, epoch, _ := s.sealedAt(); f.pos == offset {
		// After a bulk load, epochs past the record are durable, which no intact record states.
		putCloseRecord(s.buffer[f.pos:f.pos+closeRecordSpace], s.seed, epoch, min(durable, epoch-1), next.number)
		f.pos += closeRecordSpace
		f.closed = true
	}
}

// writeHeader makes the header of the flusher's segment durable before there are records. The caller
// holds the flush role.
func (l *Log) writeHeader() error {
	if err := l.Err(); err != nil {
		return err
	}
	f := &l.flusher
	if f.segment == nil && !f.start(l.head.Load()) {
		return fmt.Errorf("wal: truncated before the first segment: %w", ErrClosed)
	}
	if f.written > 0 {
		return nil
	}
	err := f.write()
	if err == nil {
		err = f.segment.file.SyncData()
	}
	if err != nil {
		return fmt.Errorf("wal: write the header of %s: %w", f.segment.path, err) // the first records write it again
	}
	f.written = f.pos
	f.segment.synced.Store(f.written) // a skip record may follow the header: the epochs that it skips count as durable
	l.durableHeader.Store(f.segment.number)
	return nil
}

// write writes the segment buffer from the page in which the last write ended up to pos. The first
// write of a segment starts with its header.
func (f *flusher) write() error {
	buffer, file := f.segment.buffer, f.segment.file
	from := f.written &^ (pageSize - 1)
	if f.pos-from > tailBytes {
		whole := f.pos &^ (pageSize - 1)
		if _, err := file.WriteAt(buffer[from:whole], int64(from)); err != nil {
			return err
		}
		from = whole
	}
	if f.pos == from {
		return nil
	}
	n := copy(f.tail[:], buffer[from:f.pos])
	padded := (n + pageSize - 1) &^ (pageSize - 1)
	clear(f.tail[n:padded])
	_, err := file.WriteAt(f.tail[:padded], int64(from))
	return err
}

// leaveSealed goes to the next segment when this one is sealed and written to its end, and releases its buffer.
func (l *Log) leaveSealed() (left bool, err error) {
	f := &l.flusher
	s := f.segment
	next := s.next.Load()
	if next == nil {
		return false, nil
	}
	offset, epoch, _ := s.sealedAt()
	if f.pos < offset {
		return false, nil
	}
	if !f.closed { // the last record was durable before the next segment was known: no sync waits for the close record
		if err := l.closeSealed(next.header.first > epoch); err != nil {
			return false, err
		}
	}
	l.recordFailure(s.file.Close()) // all records are durable
	l.completed.complete(completedSegment{info: s.info(), end: epoch - 1, size: int64(len(s.buffer)), completed: time.Now()})
	l.releaseBuffer(s, int(f.pos))
	s.next.Store(nil) // what still refers to s keeps none of the later ones
	return f.start(next), nil
}

// closeSealed writes the close record of a sealed segment. Before a gap, which a bulk load leaves, only this record tells
// after a crash that no record is missing there: it must be durable before the next segment has any, or the log has failed.
// So must the header of a segment without records: the close record before a gap may name it.
func (l *Log) closeSealed(gap bool) error {
	f := &l.flusher
	empty := f.written == 0
	f.addCloseRecord(l.Durable())
	err := f.write()
	if !gap && !empty {
		l.recordFailure(err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("write the close record of %s: %w", f.segment.path, err)
	}
	if err := f.segment.file.SyncData(); err != nil {
		return fmt.Errorf("sync the close record of %s: %w", f.segment.path, err)
	}
	return nil
}

// finish flushes at Close, when the goroutines have ended, writes the close record, and ends every wait.
func (l *Log) finish() error {
	l.acquireFlusher()
	err := l.Err()
	for moved := true; moved && err == nil; {
		moved, err = l.flushStep()
	}
	if err == nil && l.flusher.segment != nil {
		err = l.writeCloseRecord()
	}
	l.waits.mu.Lock()
	l.waits.ended = true
	l.waits.mu.Unlock()
	l.releaseFlusher()
	return err
}

// writeCloseRecord writes a record without an epoch after the last record. It proves that the last group
// of records was durable, for which there may be no other later record. It saves the next replay the
// search for later records. And it says that no epoch was given out that is not in the log.
func (l *Log) writeCloseRecord() error {
	f := &l.flusher
	f.segment.Seal()
	if offset, _, _ := f.segment.sealedAt(); f.pos != offset {
		return nil
	}
	rec := f.segment.buffer[f.pos : f.pos+recordHeaderSize]
	sealRecord(rec, f.segment.seed, recordHeaderSize, f.next, flagClose, f.next-1)
	f.pos += recordHeaderSize
	err := f.write()
	if err == nil {
		err = f.segment.file.SyncData()
	}
	if err != nil {
		return l.fail(fmt.Errorf("write the close record: %w", err))
	}
	f.finished = true
	return nil
}
