package wal

import (
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/keys"
)

// retired are the segments that are complete and durable, oldest first.
type completed struct {
	mu       sync.Mutex
	segments []completedSegment
}

type completedSegment struct {
	path   string
	number uint64
	end    keys.Epoch // its last epoch
	size   int64
}

func (r *completed) add(s completedSegment) {
	r.mu.Lock()
	r.segments = append(r.segments, s)
	r.mu.Unlock()
}

// takeBefore removes and returns the segments that hold nothing at or past e.
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

// putBack returns the segments that takeBefore took.
func (r *completed) putBack(taken []completedSegment) {
	r.mu.Lock()
	r.segments = slices.Concat(taken, r.segments)
	r.mu.Unlock()
}

// TruncateBefore gives up every record before e: segments wholly below it are recycled or removed. A segment that is
// not durable yet stays until the next call, and so do all of them after an error. A file that cannot be removed is tried again later.
//
// A newer segment's header is durable first. It testifies that there were records before it: without it, a replay that starts
// too early, because what it starts from is damaged, would find no log at all and take that for its end.
func (l *Log) TruncateBefore(e keys.Epoch) error {
	if l.head.Load() == nil { // no file for a first segment yet: the newest that was replayed stays, and testifies
		return l.recycle(l.completed.takeButLast(e))
	}
	taken := l.completed.takeBefore(e)
	if len(taken) == 0 {
		return nil
	}
	if err := l.awaitHeader(taken[len(taken)-1].number); err != nil {
		l.completed.putBack(taken)
		return err
	}
	return l.recycle(taken)
}

func (l *Log) recycle(taken []completedSegment) error {
	for _, s := range taken {
		if l.preallocator.addToReserve(s.path, s.size) || l.preallocator.recycle(s.path, s.size) {
			l.counts.recycled.Add(1)
		}
		l.counts.segments.Add(-1)
		l.counts.segmentBytes.Add(-s.size)
	}
	l.recordFailure(l.preallocator.removeScheduled())
	return nil
}

// NewestDurableHeader is the number of the newest segment whose header is durable, or zero. From then on the log has a segment with this number or a larger
// one, whatever is truncated.
func (l *Log) NewestDurableHeader() uint64 { return l.durableHeader.Load() }

// awaitHeader returns when a segment behind the numbered one, which is complete, has a durable header: the flusher's present one, written
// by the flusher together with records, or here.
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
