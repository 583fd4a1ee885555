package wal

import (
	"context"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
)

// Supersede removes every record from the epoch first on, and returns the segment in which the log continues at first, in a
// term that differs from that of the removed records. Durable moves back to first - 1.
//
// The caller has excluded writers and waiters: every reservation is published, and none is made meanwhile. Everything
// removed may be in the log after a crash, and then all of it, until Supersede has returned.
func (l *Log) Supersede(ctx context.Context, first keys.Epoch, term keys.Term) (*Segment, error) {
	l.rotation.mu.Lock()
	defer l.rotation.mu.Unlock()
	if err := l.usable(); err != nil {
		return nil, err
	}
	last := l.rotation.last
	if last == nil {
		return nil, fmt.Errorf("wal: superseded before the first segment")
	}
	last.Seal()
	_, end, _ := last.sealedAt()
	if err := l.checkSupersede(first, end, term); err != nil {
		return nil, err
	}
	b, err := l.preallocatedFor(ctx, 0)
	if err != nil {
		return nil, err
	}
	if err := l.flushThrough(end - 1); err != nil { // everything before first; and the flusher reaches the end of the segment
		return nil, err
	}
	l.rotation.terms.dropBefore(l.completed.neededFrom())
	l.rotation.terms.begin(first, term)
	l.rotation.skipped = 0
	s := l.newSegment(b, first)
	l.follow(last, s)
	l.rotation.last = s
	if err := l.switchTo(s); err != nil {
		return nil, l.fail(fmt.Errorf("supersede the log from epoch %d on: %w", first, err))
	}
	l.counts.rotations.Add(1)
	l.counts.segments.Add(1)
	l.counts.segmentBytes.Add(int64(len(b.buffer)))
	l.requestSegment()
	return s, nil
}

// checkSupersede checks that a log that ends before the epoch end can be superseded from first on.
func (l *Log) checkSupersede(first, end keys.Epoch, term keys.Term) error {
	r := &l.rotation
	if r.lineage == (keys.Lineage{}) {
		return fmt.Errorf("wal: segments of version %d supersede nothing", version1)
	}
	if needed := l.completed.neededFrom(); first < needed || first > end {
		return fmt.Errorf("wal: superseded from epoch %d on, and the log has epochs from %d to %d", first, needed, end-1)
	}
	if before, removed := r.terms.of(first-1), r.terms.of(first); term < before || first < end && term == removed {
		return fmt.Errorf("wal: superseded from epoch %d on in term %d, after an epoch of term %d and instead of one of term %d", first, term, before, removed)
	}
	return nil
}

// switchTo makes the header of the segment durable, which decides, and moves durable back.
func (l *Log) switchTo(s *Segment) error {
	l.acquireFlusher()
	defer l.releaseFlusher()
	if l.flusher.segment == nil {
		l.flusher.start(l.head.Load())
	}
	for l.flusher.segment != s {
		left, err := l.leaveSealed()
		if err != nil {
			return err
		}
		if !left {
			return brokenf("segment %d is superseded before it is written to its end", l.flusher.segment.number)
		}
	}
	l.waits.mu.Lock()
	waiting := len(l.waits.queue)
	l.waits.flushTarget, l.waits.newest = 0, s.first-1
	l.waits.mu.Unlock()
	if waiting > 0 {
		return brokenf("the log is superseded, and %d goroutines wait for it", waiting)
	}
	if err := l.writeHeader(); err != nil {
		return err
	}
	l.completed.supersede(s)
	l.durable.epoch.Store(uint64(s.first - 1))
	return nil
}
