package wal

import (
	"testing"
	"time"
)

// TestPositionIsNeverAfterTheSealedEnd: a reservation that crosses the end is in the tail before the end of the segment is
// stored, and more reservations may follow it. None of their epochs belongs to the segment: a wait for one of them would
// be a wait for a commit that may never come.
func TestPositionIsNeverAfterTheSealedEnd(t *testing.T) {
	s := &Segment{first: 10, limit: 100}
	const sealed = 3*oneRecord | 90
	s.tail.Store(sealed + (oneRecord | 20)) // the one that crosses, preempted here
	s.tail.Add(oneRecord | 20)
	go func() {
		time.Sleep(10 * time.Millisecond)
		s.refused.Store(true)
		s.sealed.Store(sealed + 1)
	}()
	if p := s.Position(); p.Epoch != 13 || p.offset != headerPage+90*recordAlign {
		t.Errorf("the next record is that of epoch %d at %d, where the segment ends with epoch 12", p.Epoch, p.offset)
	}
	s.sealed.Store(0)
	go func() {
		time.Sleep(10 * time.Millisecond)
		s.sealed.Store(sealed + 1)
	}()
	if _, last, bytes := s.Extent(); last != 12 || bytes != headerPage+90*recordAlign {
		t.Errorf("the segment ends with epoch %d at %d", last, bytes)
	}
}
