package mvcc

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// EpochBefore is an epoch such that every commit that is later than a time of the past, in microseconds since 1970, has a later
// epoch. It is that of the newest commit before the first one that is later than the time, as far as the log goes: bulk loads
// between the two have later epochs, because the log does not know their times. It reports false if the log cannot tell, because
// it begins after the time, or has commits without one.
//
// Errors: *TimeError of a time that is not in the past, *FeatureLevelError, and why the context ended.
func (c *Changes) EpochBefore(ctx context.Context, at uint64) (e keys.Epoch, ok bool, err error) {
	s := c.store
	if err := s.RequireFeatureLevel(keys.FeatureLevelHistory, "watches that begin at a time"); err != nil {
		return 0, false, err
	}
	now := s.clock.Now()
	if at >= now {
		return 0, false, &TimeError{Time: at, Now: now}
	}
	reserved := s.engine.Reserved() // later ones get later times
	if reserved > 0 {
		if err := c.Await(ctx, reserved-1, 0); err != nil {
			return 0, false, err
		}
	}
	select {
	case c.times.turn <- struct{}{}:
		defer func() { <-c.times.turn }()
	case <-ctx.Done():
		return 0, false, context.Cause(ctx)
	}
	if e, ok, err = c.times.search(ctx, c, at, reserved); ok || err != nil {
		return e, ok, err
	}
	e, _, ok = s.timeline.around(at, reserved)
	return e, ok, nil
}

// logTimes are places in the log at which a reader that looks for a time can begin, because an earlier one has been there.
type logTimes struct {
	turn  chan struct{} // holds a token of the one goroutine that reads
	every int64         // bytes between marks
	marks []timeMark    // ascending; of that goroutine
}

// timeMark is a place in the log. Everything that was read before it, from the beginning of the log of that moment on, says that
// no commit up to newest is later than time.
type timeMark struct {
	mark   wal.TailMark
	next   keys.Epoch // of the record at the place
	newest keys.Epoch // of the newest commit with a time; zero if there is none
	time   uint64     // the latest time
	whole  bool       // the log began with the first epoch, and every commit has a time
}

// timeMarkEvery is the distance between marks: what is read more than once at most.
const timeMarkEvery = 4 << 20

// timeMarksMax bounds the marks, at 56 bytes each. That is 16 GiB of log; after it, every second one is dropped.
const timeMarksMax = 4096

func newLogTimes() *logTimes { return &logTimes{turn: make(chan struct{}, 1), every: timeMarkEvery} }

// begin is the last mark before which no commit is later than a time, or the beginning of the log.
func (t *logTimes) begin(at uint64, oldest keys.Epoch) timeMark {
	for len(t.marks) > 0 && t.marks[0].next < oldest { // the log is not kept there any more
		t.marks = t.marks[1:]
	}
	from := timeMark{next: oldest, whole: oldest <= 1}
	for _, m := range t.marks {
		if m.time > at {
			break
		}
		from = m
	}
	return from
}

// add remembers a mark.
func (t *logTimes) add(m timeMark) {
	if n := len(t.marks); n > 0 && t.marks[n-1].next >= m.next {
		return
	}
	if t.marks = append(t.marks, m); len(t.marks) > timeMarksMax {
		kept := t.marks[:0]
		for i, m := range t.marks {
			if i%2 == 1 {
				kept = append(kept, m)
			}
		}
		t.marks = kept
	}
}

// pass adds a commit to what was read. Times are not in the order of epochs; zero is none.
func (m *timeMark) pass(e keys.Epoch, at uint64) {
	if m.time = max(m.time, at); at != 0 {
		m.newest = e
	} else {
		m.whole = false
	}
}

// search reads the log, from the last mark on, up to the first commit that is later than a time.
func (t *logTimes) search(ctx context.Context, c *Changes, at uint64, through keys.Epoch) (e keys.Epoch, ok bool, err error) {
	m := t.begin(at, c.OldestInLog())
	r := c.ReadLog(m.next, m.mark)
	defer func() { _ = r.Close() }() // it was only read
	for unmarked := int64(0); r.Position() <= through; {
		if ctx.Err() != nil {
			return 0, false, context.Cause(ctx)
		}
		rec, more, err := r.Next(through)
		if err != nil || !more {
			return 0, false, nil // the log is damaged or was truncated there: it cannot tell
		}
		if len(rec.Body) > 0 {
			h, err := batch.HeaderOf(rec.Body)
			if err != nil {
				return 0, false, nil
			}
			if h.Time > at {
				break
			}
			m.pass(rec.Epoch, h.Time)
		}
		m.next, m.mark = r.Position(), r.Mark()
		if unmarked += int64(len(rec.Body)); unmarked >= t.every {
			unmarked = 0
			t.add(m)
		}
	}
	return m.newest, m.newest != 0 || m.whole, nil
}
