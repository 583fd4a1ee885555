package wal

import (
	"testing"
	"time"
)

// TestPositionIsNeverBehindTheSealedEnd: a claim that crosses the end has added itself to the tail before it writes down where the segment ends,
// and others may have added themselves behind it. None of their epochs is the segment's: to wait for one of them is to wait for a commit that nothing promises.
func TestPositionIsNeverBehindTheSealedEnd(t *testing.T) {
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
