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

// ErrNoSegment means that the next segment could not be prepared in time. No record is lost, and preparing goes on: try again.
var ErrNoSegment = errors.New("wal: no log segment is prepared")

// Preparation is an attempt to prepare a segment. It has not begun when Prepare returns it, so its outcome is news.
type Preparation struct {
	done chan struct{}
	err  error // written before done is closed
}

// Done is closed when the attempt has ended, well or badly.
func (p *Preparation) Done() <-chan struct{} { return p.done }

// Err is why the attempt failed, or nil while it has not.
func (p *Preparation) Err() error {
	select {
	case <-p.done:
		return p.err
	default:
		return nil
	}
}

const (
	// prepareGap is the least time between a failed attempt to prepare a segment and the next one while a writer waits for it.
	prepareGap = 10 * time.Millisecond
	// prepareGapMax is how long the wait between failed attempts grows while no writer waits.
	prepareGapMax = 5 * time.Second
)

// preparer is the state of the goroutine that prepares segments. Files without records may fail and be tried again, as nothing depends on
// what they hold.
type preparer struct {
	failing atomic.Pointer[error] // why the last attempt failed; nil after a success
	count   atomic.Uint64         // failed attempts, and other operations on files without records that failed

	// Guarded by spares.mu.
	next        *Preparation // a writer waits for it
	oversized   int          // size of the oversized segment that a writer waits for; zero without
	skipZeroing bool         // a writer waits that should not wait for a file to be zeroed
	flush       keys.Epoch   // must be durable before the segment that a writer waits for begins
	ended       bool         // the goroutine is gone

	// Owned by the goroutine.
	failures int       // in a row
	failed   time.Time // when the last attempt failed
}

// Prepare returns nil if it has set a segment aside for a body of bodyLen bytes, which NewSegment takes without waiting. Else it asks for one and returns the attempt to wait
// for, after which the caller asks again. Only the owner of the log may take segments.
//
// The segment before must be sealed. While an epoch of the next one could be EpochWindow past durable the attempt includes a flush.
func (l *Log) Prepare(bodyLen int) *Preparation {
	l.rotate.Lock()
	defer l.rotate.Unlock()
	return l.prepareLocked(bodyLen)
}

// prepareLocked is Prepare. The caller holds rotate.
func (l *Log) prepareLocked(bodyLen int) *Preparation {
	size := spaceFor(bodyLen)
	flush := l.windowStart(size)
	kept := l.Durable() >= flush
	s, p := l.preallocator, &l.preparer
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.ended || kept && s.assignFirstLocked(size) {
		return nil // NewSegment says that the log is closed
	}
	switch {
	case !kept:
		p.flush = max(p.flush, flush)
	case size > s.buffers.size:
		p.oversized = max(p.oversized, size)
	default:
		p.skipZeroing = !s.requestMoreLocked() || p.skipZeroing // the first is as good as those to come: the log is being opened
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

// blankFor waits for a file and an image for a body. The caller holds rotate.
func (l *Log) preallocatedFor(ctx context.Context, bodyLen int) (*preallocated, error) {
	for {
		attempt := l.prepareLocked(bodyLen)
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

// wantSpare wakes the goroutine that prepares spares.
func (l *Log) requestSegment() {
	select {
	case l.refill <- struct{}{}:
	default:
	}
}

// runSpares prepares segments until Close. What fails is tried again: soon while a writer waits, ever more seldom else.
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
			l.requestSegment() // until there are enough, and after a pause if it failed
		}
	}
}

// pause is how long the next attempt has to wait.
func (p *preparer) pause(s *preallocator) time.Duration {
	if p.failures == 0 {
		return 0
	}
	s.mu.Lock()
	awaited := p.next != nil
	s.mu.Unlock()
	gap := prepareGap
	if !awaited {
		gap = min(prepareGap<<min(p.failures, 20), prepareGapMax)
	}
	return gap - time.Since(p.failed)
}

// prepareOne makes one segment if one is missing, and tells the writers that wait for it.
func (l *Log) prepareOne() (made bool, err error) {
	s, p := l.preallocator, &l.preparer
	s.mu.Lock()
	attempt, oversized, skipZeroing, flush := p.next, p.oversized, p.skipZeroing, p.flush
	p.next, p.oversized, p.skipZeroing, p.flush = nil, 0, false, 0
	enough := len(s.ready) >= s.target && oversized == 0
	s.mu.Unlock()
	if err = l.flushThrough(flush); err == nil && !enough {
		made, err = l.preallocate(oversized, skipZeroing, attempt != nil)
	}
	if errors.Is(err, vfs.ErrCrashed) {
		err = l.fail(err) // a test's machine is off: nothing passes
	}
	all := errors.Join(err, s.removeScheduled())
	l.recordAttempt(all)
	if attempt != nil {
		attempt.err = err
		close(attempt.done)
	}
	return made, all
}

// flushThrough flushes until e is durable, or the log is being closed.
func (l *Log) flushThrough(e keys.Epoch) error {
	return l.flushUntil(func() (bool, error) { return l.Durable() >= e, l.Err() })
}

// flushUntil flushes until done reports true or an error, or the log is being closed.
func (l *Log) flushUntil(done func() (bool, error)) error {
	var idle backoff
	for {
		if ok, err := done(); ok || err != nil || l.closed.Load() {
			return err
		}
		moved, err := l.flushOnce()
		if err != nil {
			return err
		}
		if !moved {
			idle.wait()
		}
	}
}

// makeBlank makes an oversized segment or a standard one. While every image is in use and a writer waits, it flushes until one comes back.
func (l *Log) preallocate(oversized int, skipZeroing, awaited bool) (made bool, err error) {
	if oversized > 0 {
		err = l.preallocator.oversized(oversized)
		return err == nil, err
	}
	allocate := vfs.PreallocateZeroed
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

// noted keeps the outcome of an attempt.
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

// tolerate counts an error about a file whose records are durable, or that has none. It endangers no data.
func (l *Log) recordFailure(err error) {
	if err != nil {
		l.preparer.count.Add(1)
	}
}

// endPreparing lets no writer wait for an attempt that will not come.
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

// NewSegment makes the next segment, with room for a body of bodyLen bytes at least. first must be the epoch of the claim
// that crossed the end of the last one. The record that did not fit should be reserved before others see the
// segment, lest they fill it first. It waits if Prepare would return an attempt, and returns what that attempt or ctx say.
//
// The first segment of a run is durable when NewSegment returns: that there is a run, which may give out epochs, and
// which epochs it skips.
//
// Unless it matches ErrFailed or ErrClosed, an error about preparing the segment may be tried again; nothing was lost.
func (l *Log) NewSegment(ctx context.Context, first keys.Epoch, bodyLen int) (*Segment, error) {
	if uint(bodyLen) > BodyBytesMax {
		return nil, fmt.Errorf("wal: a body of %d bytes exceeds %d", bodyLen, BodyBytesMax)
	}
	l.rotate.Lock()
	defer l.rotate.Unlock()
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
	if l.last == nil {
		l.link(s) // before the old tail can be truncated
		l.head.Store(s)
		if err := l.awaitHeader(s.number - 1); err != nil {
			return nil, l.fail(err) // at Open; there is no earlier segment to go on with
		}
	} else {
		l.last.next.Store(s)
		l.counts.rotations.Add(1)
		l.RequestFlush(first - 1) // its image is needed again, whoever waits for its epochs or not
	}
	l.last = s
	l.counts.segments.Add(1)
	l.counts.segmentBytes.Add(int64(len(b.buffer)))
	l.requestSegment()
	return s, nil
}
