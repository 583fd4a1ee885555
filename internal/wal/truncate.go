package wal

import (
	"sync"

	"epochkv/internal/storage/keys"
)

// retired are the segments that are complete and durable, oldest first.
type retired struct {
	mu       sync.Mutex
	segments []retiredSegment
}

type retiredSegment struct {
	path string
	end  keys.Epoch // its last epoch
	size int64
}

func (r *retired) add(s retiredSegment) {
	r.mu.Lock()
	r.segments = append(r.segments, s)
	r.mu.Unlock()
}

// takeBefore removes and returns the segments that hold nothing at or past e.
func (r *retired) takeBefore(e keys.Epoch) []retiredSegment {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for n < len(r.segments) && r.segments[n].end < e {
		n++
	}
	taken := r.segments[:n:n]
	r.segments = r.segments[n:]
	return taken
}

// TruncateBefore gives up every record before e: segments wholly below it are recycled or removed. A segment that is
// not durable yet stays until the next call.
func (l *Log) TruncateBefore(e keys.Epoch) error {
	for _, s := range l.retired.takeBefore(e) {
		kept, err := l.spares.recycle(s.path, s.size)
		if err != nil {
			return err
		}
		if kept {
			l.counts.recycled.Add(1)
		}
		l.counts.segments.Add(-1)
	}
	return nil
}
