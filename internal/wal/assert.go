package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// The assertions of the package. Those of type error run in all builds: they cost something per flush, rotation or
// truncation, and nothing per commit. In a build with the tag invariants a broken one panics; in other builds it stops
// the log (see Log.broken), before anything is written or acknowledged that it would make wrong. The assertions
// without a result are expensive, or on the path of every commit, and run only with the tag.

// errBroken means that the log found its own state to be impossible.
var errBroken = errors.New("broken invariant")

// broken stops the log for a broken invariant, and returns the final error; nil if err is nil.
func (l *Log) broken(err error) error {
	if err == nil {
		return nil
	}
	if invariants.Enabled {
		invariants.Fail("wal: %v", err)
	}
	return l.fail(err)
}

func brokenf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errBroken}, args...)...)
}

// checkPosition checks, before a write of some records: durable and written <= copied <= reserved, and that nothing
// follows a close record.
func (f *flusher) checkPosition(records int, durable keys.Epoch) error {
	s := f.segment
	reserved := s.first + keys.Epoch(s.tail.Load()>>offsetBits)
	switch {
	case f.finished:
		return brokenf("a flush after the close record of the log")
	case f.written > f.pos || int(f.pos) > len(s.buffer):
		return brokenf("segment %d of %d bytes is written to %d and copied to %d", s.number, len(s.buffer), f.written, f.pos)
	case records > 0 && f.next-1 <= durable:
		return brokenf("durable would go from %d to %d", durable, f.next-1)
	case f.next > reserved:
		return brokenf("segment %d is copied to epoch %d, reserved to %d", s.number, f.next, reserved)
	}
	offset, next, sealed := s.sealedAt()
	if sealed && (f.next > next || !f.closed && f.pos > offset) {
		return brokenf("segment %d is copied to %d, epoch %d; it was sealed at %d, epoch %d", s.number, f.pos, f.next, offset, next)
	}
	if f.closed && (!sealed || f.next != next || f.pos != offset+closeRecordSpace) {
		return brokenf("segment %d has a record after its close record", s.number)
	}
	return nil
}

// checkRecord checks that the record at pos has the epoch that follows the one before it. Each byte of a segment belongs
// to one record, so this also finds records that overlap.
func (f *flusher) checkRecord(pos uint32, epoch keys.Epoch) error {
	word := binary.LittleEndian.Uint64(f.segment.buffer[pos+epochOffset:])
	if got := keys.Epoch(word & uint64(keys.MaxEpoch)); got != epoch {
		return brokenf("the record at offset %d of segment %d has epoch %d, not %d", pos, f.segment.number, got, epoch)
	}
	return nil
}

// checkNext checks that a new segment follows the last one, and that all its epochs are inside the window.
func (l *Log) checkNext(s *Segment) error {
	if l.rotation.last != nil && s.path != "" && s.number <= l.rotation.last.number {
		return brokenf("segment %d would follow segment %d", s.number, l.rotation.last.number)
	}
	most := keys.Epoch(len(s.buffer) / recordHeaderSize)
	if durable := l.Durable(); s.first+most > durable+l.window {
		return brokenf("segment %d could give out epoch %d while %d is durable", s.number, s.first+most, durable)
	}
	return nil
}

// checkUnused checks that neither the flusher nor a replay can need the segments that are about to be recycled. Without a
// first segment of this run, the log has no newer header.
func (l *Log) checkUnused(segments []completedSegment) error {
	durable, header := l.Durable(), l.durableHeader.Load()
	for _, s := range segments {
		if s.end > durable {
			return brokenf("segment %d would be recycled: it ends at epoch %d, and %d is durable", s.info.number, s.end, durable)
		}
		if header != 0 && s.info.number >= header {
			return brokenf("segment %d would be recycled: %d is the newest with a durable header", s.info.number, header)
		}
	}
	return nil
}

// assertUnpublished checks that a reservation is inside its segment, is not durable, and is published once.
func (s *Segment) assertUnpublished(c Reservation) {
	end := uint64(c.offset) + uint64(recordSpace(c.length))
	if c.offset < s.begin || end > headerPage+s.limit*recordAlign {
		invariants.Fail("the record of epoch %d, [%d, %d), is outside segment %d", c.Epoch, c.offset, end, s.number)
	}
	if durable := keys.Epoch(s.durable.epoch.Load()); durable >= c.Epoch {
		invariants.Fail("epoch %d is not published, and %d is durable", c.Epoch, durable)
	}
	if atomic.LoadUint64(firstWord(s.buffer[c.offset:])) != 0 {
		invariants.Fail("epoch %d is published twice, or its space in segment %d holds another record", c.Epoch, s.number)
	}
}

// assertLent checks that a buffer is handed out once, and is zero: the flusher would take an old record in it for a
// published one.
func (p *bufferPool) assertLent(buf []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lent == nil {
		p.lent = map[*byte]bool{}
	}
	if p.lent[&buf[0]] {
		invariants.Fail("a segment buffer is handed out twice")
	}
	if !allZero(buf) {
		invariants.Fail("a segment buffer that is handed out is not zero")
	}
	p.lent[&buf[0]] = true
	if len(p.lent)+len(p.idle) > p.mapped || p.mapped > p.max {
		invariants.Fail("%d buffers are in use, %d idle, %d mapped of at most %d", len(p.lent), len(p.idle), p.mapped, p.max)
	}
}

// assertRetained checks that a reader that returns a buffer has retained it.
func (s *Segment) assertRetained() {
	if s.readers.Load()&^bufferReleased == 0 {
		invariants.Fail("the buffer of segment %d is returned more often than retained", s.number)
	}
}

// assertReturned checks that a buffer that comes back was handed out.
func (p *bufferPool) assertReturned(buf []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.lent[&buf[0]] {
		invariants.Fail("a segment buffer comes back that was not handed out")
	}
	delete(p.lent, &buf[0])
}

// assertOneUseLocked checks that a file that is about to be recycled has no other use.
func (p *preallocator) assertOneUseLocked(name string) {
	used := slices.Contains(p.recyclable, name) || slices.Contains(p.toRemove, name) || slices.Contains(p.reserve.files, name)
	for _, b := range append(slices.Clone(p.ready), p.assigned) {
		used = used || b != nil && b.path == name
	}
	if used {
		invariants.Fail("%s is recycled while it has another use", name)
	}
}

// assertQueueLocked checks the queue after a wake-up: each waiter has its index and no signal, and waits for an epoch
// that is requested and not durable.
func (w *waits) assertQueueLocked(durable keys.Epoch) {
	for i, one := range w.queue {
		if one.index != i || len(one.signal) != 0 {
			invariants.Fail("waiter %d has index %d and %d signals", i, one.index, len(one.signal))
		}
		if one.epoch <= durable || one.epoch > w.newest {
			invariants.Fail("a waiter waits for epoch %d; durable is %d, requested %d", one.epoch, durable, w.newest)
		}
	}
}
