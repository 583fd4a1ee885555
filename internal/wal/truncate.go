package wal

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// completed are the segments of the log, oldest first: those that are sealed and durable, and those that are not.
type completed struct {
	mu       sync.Mutex
	segments []completedSegment
	open     []*Segment // the later ones, to which the flusher has not come, or which it writes
	skipped  keys.Epoch // argument of the last Skip
	needed   keys.Epoch // argument of the last TruncateBefore: the tree has the epochs before it

	superseded atomic.Uint64 // number of calls of supersede; a TailReader reads it without mu

	holders holders // has a lock of its own, which is taken first
}

type completedSegment struct {
	info      SegmentInfo
	end       keys.Epoch // its last epoch
	size      int64
	completed time.Time // when it was complete, or the log was opened
	earlier   bool      // an earlier run has written it
}

// begin adds a segment that takes reservations from now on.
func (r *completed) begin(s *Segment) {
	r.mu.Lock()
	r.open = append(r.open, s)
	r.mu.Unlock()
}

// complete says that a segment, the oldest open one, is sealed and durable.
func (r *completed) complete(s completedSegment) {
	r.mu.Lock()
	r.open = slices.DeleteFunc(r.open, func(o *Segment) bool { return o.number == s.info.number })
	r.segments = append(r.segments, s)
	r.mu.Unlock()
}

// skipTo records that no segment has the epochs up to next, and that the next segment begins there.
func (r *completed) skipTo(next keys.Epoch) {
	r.mu.Lock()
	r.skipped = next
	r.mu.Unlock()
}

// neededFrom is the oldest epoch that only the log has.
func (r *completed) neededFrom() keys.Epoch {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.needed
}

func (r *completed) need(e keys.Epoch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.needed = max(r.needed, e)
}

// supersede records that no segment before s has an epoch at or after its first any more. All of them are complete.
func (r *completed) supersede(s *Segment) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.segments {
		r.segments[i].end = min(r.segments[i].end, s.first-1)
	}
	r.open = append(r.open, s)
	r.skipped = 0
	r.superseded.Add(1)
}

// takeBefore removes and returns the segments without an epoch at or after e.
func (r *completed) takeBefore(e keys.Epoch) []completedSegment {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for n < len(r.segments) && r.segments[n].end < e {
		n++
	}
	return r.takeLocked(n)
}

// takeButLast is takeBefore without the newest of all segments.
func (r *completed) takeButLast(e keys.Epoch) []completedSegment {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for n+1 < len(r.segments) && r.segments[n].end < e {
		n++
	}
	return r.takeLocked(n)
}

func (r *completed) takeLocked(n int) []completedSegment {
	taken := r.segments[:n:n]
	r.segments = r.segments[n:]
	return taken
}

// putBack returns the segments that takeBefore took. Another call may have taken later ones meanwhile, and may have put them back.
func (r *completed) putBack(taken []completedSegment) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.segments = slices.Concat(taken, r.segments)
	slices.SortFunc(r.segments, func(a, b completedSegment) int { return cmp.Compare(a.info.number, b.info.number) })
}

// Truncate recycles or removes the segments that no reader needs any more, and reports whether that was done.
func (l *Log) Truncate() error { return l.TruncateBefore(l.completed.neededFrom()) }

// TruncateBefore says that the tree has every record before e: it recycles or removes the segments that have only
// such records, and that no Holder needs. A segment that is not durable yet stays until the next call, and after an error all stay. The
// removal of a file is tried again later if it fails.
//
// The header of a newer segment is durable first. It proves that there were records before it. Without it, a
// replay that starts too early, because its start is damaged, would find no log at all and take that for
// the end of the log.
func (l *Log) TruncateBefore(e keys.Epoch) error {
	l.completed.need(e)
	if l.head.Load() == nil { // no file for a first segment yet: the newest replayed segment stays as the proof
		return l.recycle(l.takeUnneeded(e, l.completed.takeButLast))
	}
	taken := l.takeUnneeded(e, l.completed.takeBefore)
	if len(taken) == 0 {
		return nil
	}
	if err := l.awaitHeader(taken[len(taken)-1].info.number); err != nil {
		l.completed.putBack(taken)
		return err
	}
	return l.recycle(taken)
}

// LeaveDurable lets the flusher leave the segments that are sealed and durable, so that Truncate can take them. It does so with the next record, which
// may not come: on a full disk, writes are refused until the file of a large deletion is given back. While another goroutine has the flush role,
// nothing is done.
func (l *Log) LeaveDurable() error {
	if !l.tryFlusher() {
		return nil
	}
	defer l.releaseFlusher()
	for left := l.flusher.segment != nil; left; {
		if err := l.Err(); err != nil {
			return err
		}
		var err error
		if left, err = l.leaveSealed(); err != nil {
			return l.fail(err)
		}
	}
	return nil
}

// ReleaseOldFiles removes old files that are kept to become segments, because the device is full, and reports whether there were any.
// A few stay, without which the log could not go on.
func (l *Log) ReleaseOldFiles() (released bool, err error) {
	return l.preallocator.releaseOld(recyclableMin)
}

func (l *Log) recycle(taken []completedSegment) error {
	if err := l.checkUnused(taken); err != nil {
		return l.broken(err)
	}
	l.preallocator.truncated(len(taken))
	for _, s := range taken {
		if l.keepFile(&s) {
			l.counts.recycled.Add(1)
		} else {
			l.recordFailure(l.preallocator.removeScheduled()) // at once: the names go in the order of the segments, so that a crash leaves no hole
		}
		l.counts.segments.Add(-1)
		l.counts.segmentBytes.Add(-s.size)
	}
	l.recordFailure(l.preallocator.removeScheduled())
	return nil
}

// keepFile keeps the file of a segment that no reader needs any more, to be used again. If it reports false, the file is to be removed.
func (l *Log) keepFile(s *completedSegment) (kept bool) {
	p, name := l.preallocator, s.info.File
	if s.earlier && !p.usable(name, s.size) {
		p.scheduleRemoval(name)
		return false
	}
	return p.addToReserve(name, s.size) || p.recycleSegment(name, s.size)
}

// NewestDurableHeader is the number of the newest segment whose header is durable, or zero. From then on the
// log has a segment with this number or a larger one, whatever is truncated.
func (l *Log) NewestDurableHeader() uint64 { return l.durableHeader.Load() }

// awaitHeader returns when a segment after the numbered one, which is complete, has a durable header. It is
// the header of the flusher's current segment, which the flusher writes with records, or awaitHeader without.
func (l *Log) awaitHeader(number uint64) error {
	var idle backoff
	for l.durableHeader.Load() <= number {
		if !l.tryFlusher() {
			idle.wait()
			continue
		}
		err := l.writeHeader()
		l.releaseFlusher()
		if err != nil {
			return err
		}
	}
	return nil
}
