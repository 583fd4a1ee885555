package wal

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// ErrNoSegment means that the next segment could not be prepared in time. No record is lost, and the
// preparation goes on: try again.
var ErrNoSegment = errors.New("wal: no log segment is prepared")

// Preparation is an attempt to prepare a segment. It begins after Prepare has returned it, so that its
// outcome is never an old one.
type Preparation struct {
	done      chan struct{}
	err       error // written before done is closed
	oversized bool  // the same
}

// Done is closed when the attempt has ended, with or without success.
func (p *Preparation) Done() <-chan struct{} { return p.done }

// Err is why the attempt failed; nil if it did not fail, or has not ended.
func (p *Preparation) Err() error {
	select {
	case <-p.done:
		return p.err
	default:
		return nil
	}
}

// Oversized reports whether the attempt, which has ended, was to make a segment for a record that is larger than a standard segment. Its error
// says nothing of the others.
func (p *Preparation) Oversized() bool { return p.oversized }

const (
	// buffersPause is how long an attempt waits for buffers, because a writer that has waited for it asks again.
	buffersPause = time.Millisecond
	// prepareGap is the least time between a failed attempt to prepare a segment and the next attempt while a
	// writer waits for it.
	prepareGap = 10 * time.Millisecond
	// prepareGapMax is the longest time between failed attempts while no writer waits.
	prepareGapMax = 5 * time.Second
)

// preparer is the state of the goroutine that prepares segments. An operation on a file without records may
// fail and be tried again, because nothing depends on the contents of the file.
type preparer struct {
	failing atomic.Pointer[error] // why the last attempt failed; nil after a success
	count   atomic.Uint64         // failed attempts, and other operations on files without records that failed
	begun   atomic.Bool           // see beginPreparing
	waiting atomic.Int64          // bytes of oversized buffers whose segments are sealed and not written to their ends

	// Guarded by preallocator.mu.
	next        *Preparation // a writer waits for it
	oversized   int          // size of the oversized segment that a writer waits for: of the smallest one, see prepareLocked; zero without
	frees       bool         // the record for it frees space, and may use up the reserve
	largest     int          // size of the largest one, until it has had its turn
	skipZeroing bool         // a writer waits, and must not wait until zeros are written to the file
	flush       keys.Epoch   // must be durable before the segment that a writer waits for begins
	ended       bool         // the goroutine has ended

	// Owned by the goroutine.
	failures int       // in a row
	failed   time.Time // when the last attempt failed
}

// Prepare returns nil if it has assigned a segment with room for a body of bodyLen bytes, which NewSegment
// takes without waiting. Otherwise it requests a segment and returns the attempt to wait for. After the
// attempt the caller calls Prepare again. Only the owner of the log may take segments.
//
// On a full device a segment that is larger than a standard one takes the place of the reserve only for a record that frees
// space: after it, no such record might find a segment.
//
// While an epoch of the next segment could be EpochWindow past durable, the attempt includes a flush. That is not
// known before the last segment is sealed: then the caller calls Prepare again.
func (l *Log) Prepare(bodyLen int, frees bool) *Preparation {
	l.rotation.mu.Lock()
	defer l.rotation.mu.Unlock()
	return l.prepareLocked(bodyLen, frees)
}

// prepareLocked is Prepare. The caller holds rotation.mu.
func (l *Log) prepareLocked(bodyLen int, frees bool) *Preparation {
	size := spaceFor(bodyLen)
	s, p := l.preallocator, &l.preparer
	s.mu.Lock()
	defer s.mu.Unlock()
	flush := l.windowStart(max(size, s.firstBytesLocked())) // which may be larger than is needed
	kept := l.Durable() >= flush
	if p.ended || kept && s.assignFirstLocked(size) {
		return nil // NewSegment says that the log is closed
	}
	if kept && size > s.buffers.size {
		p.largest = max(p.largest, size)
	}
	switch {
	case !kept:
		p.flush = max(p.flush, flush)
	case size > s.buffers.size && (p.oversized == 0 || frees && !p.frees || frees == p.frees && size < p.oversized):
		p.oversized, p.frees = size, frees
	case size > s.buffers.size: // its writer asks again; a device without room for the other one has none for it
	default:
		p.skipZeroing = !s.requestMoreLocked() || p.skipZeroing // the first segment is zeroed like the later ones: the log is being opened
	}
	if p.next == nil {
		l.counts.stalls.Add(1)
		p.next = &Preparation{done: make(chan struct{})}
	}
	l.requestSegment()
	return p.next
}

// spaceFor is the size of a segment for a body.
func spaceFor(bodyLen int) int {
	size := headerPage + skipSpace + int(recordSpace(uint32(bodyLen)+recordHeaderSize)) + closeRecordSpace
	return (size + pageSize - 1) &^ (pageSize - 1)
}

// Oversized reports whether a body needs a segment that is larger than a standard one.
func (l *Log) Oversized(bodyLen int) bool { return spaceFor(bodyLen) > l.buffers.size }

// preallocatedFor waits for a preallocated segment with room for a body. The caller holds rotation.mu.
func (l *Log) preallocatedFor(ctx context.Context, bodyLen int) (*preallocated, error) {
	for {
		attempt := l.prepareLocked(bodyLen, true)
		if attempt == nil {
			b := l.preallocator.takeAssigned()
			if b == nil {
				return nil, ErrClosed
			}
			return b, nil
		}
		select {
		case <-attempt.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if attempt.err != nil {
			return nil, attempt.err
		}
	}
}

// preparedFrom is the part of the first segment, as one over it, that records fill before the next segment
// is prepared.
const preparedFrom = 8

// beginPreparing lets segments be prepared before writers need them, once so many bytes of the first segment
// of a run are written or reserved. Before, the buffer of the next segment would be the largest part of the memory of an
// idle server.
func (l *Log) beginPreparing(filled int) {
	if p := &l.preparer; !p.begun.Load() && filled >= l.buffers.size/preparedFrom {
		p.begun.Store(true)
		l.requestSegment()
	}
}

// PrepareAhead lets the next segment be prepared if enough of s is reserved, whether it is written or not: a
// log whose records no goroutine waits for may be filled before its first flush.
func (l *Log) PrepareAhead(s *Segment) {
	_, _, reserved := s.Extent()
	l.beginPreparing(int(reserved))
}

// requestSegment wakes the goroutine that prepares segments.
func (l *Log) requestSegment() {
	select {
	case l.refill <- struct{}{}:
	default:
	}
}

// runPreallocator prepares segments until Close. It repeats a failed attempt: soon while a writer waits,
// otherwise at growing intervals.
func (l *Log) runPreallocator() {
	defer l.background.Done()
	defer l.endPreparing()
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-l.refill:
		case <-retry.C:
		}
		if wait := l.preparer.pause(l.preallocator); wait > 0 {
			retry.Reset(wait)
			continue
		}
		made, err := l.prepareOne()
		if made || err != nil && !errors.Is(err, ErrFailed) {
			l.requestSegment() // until there are enough; after a failure the next attempt waits
		}
	}
}

// pause is how long the next attempt has to wait.
func (p *preparer) pause(s *preallocator) time.Duration {
	if p.failures == 0 {
		return 0
	}
	gap := prepareGap
	if !p.awaited(s) {
		gap = min(prepareGap<<min(p.failures, 20), prepareGapMax)
	}
	return gap - time.Since(p.failed)
}

// awaited reports whether a writer waits for an attempt that has not begun.
func (p *preparer) awaited(s *preallocator) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return p.next != nil
}

// prepareOne makes one segment if one is missing, and wakes the writers that wait for the attempt.
func (l *Log) prepareOne() (made bool, err error) {
	s, p := l.preallocator, &l.preparer
	s.mu.Lock()
	attempt, oversized, frees, skipZeroing, flush := p.next, p.oversized, p.frees, p.skipZeroing, p.flush
	p.next, p.oversized, p.frees, p.skipZeroing, p.flush = nil, 0, false, false, 0
	// A writer that waits for a flush may have a segment, and asks again.
	enough := flush > 0 || len(s.ready) >= s.target || attempt == nil && !p.begun.Load()
	if oversized > 0 || attempt != nil && len(s.ready) > 0 { // one that was made before may wait for its writer
		enough = s.firstFitsLocked(oversized)
	}
	awaited := attempt != nil && s.turns.awaited(s.firstBytesLocked())
	enough = enough || awaited
	largest := 0
	if oversized > 0 && !enough {
		largest, p.largest = max(p.largest, s.turns.due()), 0
	}
	s.mu.Unlock()
	if awaited {
		time.Sleep(buffersPause)
	}
	err = l.flushThrough(flush)
	if err == nil && oversized > 0 && !enough && !l.admitOversized(max(oversized, largest)) {
		enough = true // the writer of the large record asks again
		made, err = l.waitForBuffers()
	}
	if err == nil && !enough {
		// Beside smaller records, for which its segment will do, the largest one has its turn if there is room for it.
		if made = largest > oversized && l.preallocator.oversized(largest) == nil; !made {
			made, err = l.preallocate(oversized, frees, skipZeroing, attempt != nil)
		}
	}
	if errors.Is(err, vfs.ErrCrashed) {
		err = l.fail(err) // a test has crashed the machine: no attempt can succeed
	}
	all := errors.Join(err, s.removeScheduled())
	l.recordAttempt(all)
	if attempt != nil {
		attempt.err, attempt.oversized = err, oversized > 0
		close(attempt.done)
	}
	return made, all
}

// flushThrough flushes until e is durable, or the log is being closed.
func (l *Log) flushThrough(e keys.Epoch) error {
	return l.flushUntil(func() (bool, error) { return l.Durable() >= e, l.Err() })
}

// flushUntil flushes until done reports true or an error, or the log is being closed. It asks again while another goroutine has the flush
// role, which keeps it for as long as writers wait for syncs.
func (l *Log) flushUntil(done func() (bool, error)) error {
	var idle backoff
	for {
		if ok, err := done(); ok || err != nil || l.closed.Load() {
			return err
		}
		moved, err := l.tryFlush()
		if err != nil {
			return err
		}
		if !moved {
			idle.wait()
		}
	}
}

// hasBuffers reports whether an oversized buffer may be made. Those that wait for the flusher have, with it, at most the size of all standard
// ones; or none waits. So they stay bounded on a slow device, also if smaller records get the segments that are made for a large one.
func (l *Log) hasBuffers(size int) bool {
	waiting := l.preparer.waiting.Load()
	return waiting == 0 || waiting+int64(size) <= int64(l.buffers.max)*int64(l.buffers.size)
}

// admitOversized is hasBuffers for the segment that would be made now, and notes for the turns what becomes of it.
func (l *Log) admitOversized(size int) bool {
	ok := l.hasBuffers(size)
	l.preallocator.mu.Lock()
	defer l.preallocator.mu.Unlock()
	if ok {
		l.preallocator.turns.made(size)
	} else {
		l.preallocator.turns.wait(size)
	}
	return ok
}

// waitForBuffers makes a standard segment, which others may need meanwhile, or lets a moment pass.
func (l *Log) waitForBuffers() (made bool, err error) {
	if !l.preallocator.anyReady() {
		if made, _ = l.preallocate(0, false, true, false); made {
			return true, nil
		}
	}
	moved, err := l.tryFlush()
	if !moved {
		time.Sleep(buffersPause)
	}
	return false, err
}

// follow makes a segment the one after another, which is sealed.
func (l *Log) follow(last, next *Segment) {
	if !last.pooled {
		l.preparer.waiting.Add(int64(len(last.buffer)))
	}
	last.next.Store(next)
}

// preallocate makes an oversized segment or a standard one. While every buffer is in use and a writer waits,
// it flushes until a buffer comes back.
func (l *Log) preallocate(oversized int, frees, skipZeroing, awaited bool) (made bool, err error) {
	if oversized > 0 {
		if err = l.preallocator.oversized(oversized); frees && errors.Is(err, vfs.ErrNoSpace) {
			err = l.preallocator.oversizedFromReserve(oversized, err)
		}
		if err != nil && !l.preallocator.anyReady() { // others may wait for this attempt, and need a standard one
			_, _ = l.preallocate(0, false, skipZeroing, awaited)
		}
		return err == nil, err
	}
	allocate := func(f vfs.File, size int64) error {
		return vfs.PreallocateZeroed(f, size, func() bool { return l.closed.Load() || l.preparer.awaited(l.preallocator) })
	}
	if skipZeroing {
		allocate = vfs.Preallocate
	}
	err = l.flushUntil(func() (bool, error) {
		made, err = l.preallocator.prepare(allocate)
		if awaited && errors.Is(err, vfs.ErrNoSpace) {
			made, err = l.preallocator.prepareFromReserve(err)
		}
		return made || !awaited, err
	})
	return made, err
}

// recordAttempt records the outcome of an attempt.
func (l *Log) recordAttempt(err error) {
	p := &l.preparer
	if err == nil || errors.Is(err, ErrFailed) {
		p.failures = 0
		p.failing.Store(nil)
		return
	}
	p.failures++
	p.failed = time.Now()
	p.failing.Store(&err)
	p.count.Add(1)
}

// recordFailure counts an error about a file whose records are durable, or that has no records. Such an error
// endangers no data.
func (l *Log) recordFailure(err error) {
	if err != nil {
		l.preparer.count.Add(1)
	}
}

// endPreparing ends the waits for an attempt that will not come.
func (l *Log) endPreparing() {
	l.preallocator.mu.Lock()
	defer l.preallocator.mu.Unlock()
	l.preparer.ended = true
	if attempt := l.preparer.next; attempt != nil {
		attempt.err = ErrClosed
		close(attempt.done)
		l.preparer.next = nil
	}
}

// NewSegment makes the next segment, with room for a body of bodyLen bytes at least. first must be the
// epoch of the reservation that crossed the end of the last segment. The caller should reserve the record
// that did not fit before other writers see the segment, so that they cannot fill it first. NewSegment waits
// if Prepare would return an attempt, and then returns the error of the attempt or of ctx.
//
// The header of the first segment of a run is durable when NewSegment returns, with its skip record. So a
// replay knows that there was a run that may have given out epochs, and which epochs it skipped.
//
// After an error about preparing the segment the caller may try again, unless the error matches ErrFailed or
// ErrClosed; nothing was lost.
func (l *Log) NewSegment(ctx context.Context, first keys.Epoch, bodyLen int) (*Segment, error) {
	if uint(bodyLen) > BodyBytesMax {
		return nil, fmt.Errorf("wal: a body of %d bytes exceeds %d", bodyLen, BodyBytesMax)
	}
	l.rotation.mu.Lock()
	defer l.rotation.mu.Unlock()
	if err := l.usable(); err != nil {
		return nil, err
	}
	if expected, ok := l.nextFirst(); !ok || first != expected {
		return nil, fmt.Errorf("wal: segment at epoch %d, but the log continues at %d", first, expected)
	}
	b, err := l.preallocatedFor(ctx, bodyLen)
	if err != nil {
		return nil, err
	}
	s := l.newSegment(b, first)
	if err := l.checkNext(s); err != nil {
		return nil, l.broken(err)
	}
	if l.rotation.last == nil {
		if err := l.link(s); err != nil { // before the old tail can be truncated
			err = l.fail(err)
			l.head.Store(s) // Close frees it. Its file stays: the old tail may name it
			return nil, err
		}
		l.head.Store(s)
		if err := l.awaitHeader(s.number - 1); err != nil {
			return nil, l.fail(err) // at Open: there is no earlier segment that could be used
		}
	} else {
		l.follow(l.rotation.last, s)
		l.preparer.begun.Store(true)
		l.counts.rotations.Add(1)
		l.RequestFlush(first - 1) // its buffer is needed again, even if no goroutine waits for its epochs
	}
	l.rotation.last = s
	l.completed.begin(s)
	l.counts.segments.Add(1)
	l.counts.segmentBytes.Add(int64(len(b.buffer)))
	l.requestSegment()
	return s, nil
}
