package wal

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestBrokenInvariantStopsTheLog breaks the state of a log in each way that all builds check. The log stops before it
// writes or acknowledges anything more; in a build with the tag invariants it panics.
func TestBrokenInvariantStopsTheLog(t *testing.T) {
	for name, c := range map[string]struct {
		message string
		fire    func(a *appender) error
	}{
		"record with the epoch of another": {"has epoch 3, not 2", func(a *appender) error {
			c, _ := a.cur.Load().Reserve(8)
			c.Epoch++
			a.cur.Load().Publish(c)
			return a.log.flushNow()
		}},
		"record without a reservation": {"is copied to epoch 3, reserved to 2", func(a *appender) error {
			s := a.cur.Load()
			at := s.Position().offset
			sealRecord(s.buffer[at:at+recordHeaderSize], s.seed, recordHeaderSize, 2, 0, 1)
			return a.log.flushNow()
		}},
		"durable past copied": {"durable would go from 7 to 2", func(a *appender) error {
			c, _ := a.cur.Load().Reserve(8)
			a.cur.Load().Publish(c)
			a.log.durable.epoch.Store(7)
			return a.log.flushNow()
		}},
		"written past copied": {"copied to 4128", func(a *appender) error {
			a.log.flusher.written = pageSize * 5
			return a.log.flushNow()
		}},
		"copied past the seal": {"it was sealed at 4128, epoch 2", func(a *appender) error {
			a.cur.Load().Seal()
			a.log.flusher.pos += recordAlign
			return a.log.flushNow()
		}},
		"record after the close record of a segment": {"has a record after its close record", func(a *appender) error {
			reservation, _ := a.cur.Load().Seal()
			a.log.flusher.closed = true
			a.log.flusher.next = reservation.Epoch
			return a.log.flushNow()
		}},
		"flush after the close record of the log": {"a flush after the close record", func(a *appender) error {
			if err := a.log.writeCloseRecord(); err != nil {
				return err
			}
			return a.log.flushNow()
		}},
		"segment that is not durable is recycled": {"it ends at epoch 2, and 1 is durable", func(a *appender) error {
			a.log.completed.complete(completedSegment{end: 2})
			return a.log.TruncateBefore(3)
		}},
		"segment of the flusher is recycled": {"1 is the newest with a durable header", func(a *appender) error {
			return a.log.recycle([]completedSegment{{info: SegmentInfo{number: 1}, end: 1}})
		}},
		"numbers of segments go back": {"segment 1 would follow segment 1", func(a *appender) error {
			reservation, _ := a.cur.Load().Seal()
			a.log.preallocator.mu.Lock()
			a.log.preallocator.ready[0].number = 1
			a.log.preallocator.mu.Unlock()
			_, err := a.log.NewSegment(context.Background(), reservation.Epoch, 0)
			return err
		}},
		"epochs past the window": {"while 1 is durable", func(a *appender) error {
			return a.log.broken(a.log.checkNext(&Segment{first: EpochWindow, buffer: make([]byte, pageSize)}))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			a := mustStart(t, testOptions(vfs.NewMem(), 64<<10))
			if _, err := a.put([]byte("a")); err != nil {
				t.Fatal(err)
			}
			waitForPreallocated(t, a.log)
			message := firing(func() error { return c.fire(a) })
			if !strings.Contains(message, "broken invariant") || !strings.Contains(message, c.message) {
				t.Errorf("got %q, want a broken invariant with %q", message, c.message)
			}
			if err := a.log.Err(); !invariants.Enabled && !errors.Is(err, errBroken) {
				t.Errorf("the log has not stopped: %v", err)
			}
			_ = a.log.Fail(errors.New("the test is over")) // Close would meet the broken state again
		})
	}
}

// flushNow is flushOnce without the flush role, which a panic would not release.
func (l *Log) flushNow() error {
	_, err := l.flushStep()
	return err
}

// firing is what an assertion says, by a panic or by an error.
func firing(fire func() error) (message string) {
	defer func() {
		if p := recover(); p != nil {
			message = fmt.Sprint(p)
		}
	}()
	return fmt.Sprint(fire())
}

// TestAssertionsAcceptTheLimits: the checks of all builds accept a log at its limits: an empty flush, a sealed empty
// segment, a skip, and the largest record.
func TestAssertionsAcceptTheLimits(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	rotate := func() keys.Epoch {
		reservation, _ := a.cur.Load().Seal()
		s, err := a.log.NewSegment(t.Context(), reservation.Epoch, 0)
		if err != nil {
			t.Fatal(err)
		}
		a.cur.Store(s)
		return reservation.Epoch
	}
	for range 3 {
		rotate() // without records
		if _, err := a.log.flushOnce(); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range []int{0, SegmentBytesMin - headerPage - recordHeaderSize - closeRecordSpace, 10 * pageSize} {
		if _, err := a.put(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	reservation, _ := a.cur.Load().Seal()
	if err := a.log.Flush(reservation.Epoch - 1); err != nil {
		t.Fatal(err)
	}
	a.log.Skip(reservation.Epoch + 1000)
	s, err := a.log.NewSegment(t.Context(), reservation.Epoch+1000, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.cur.Store(s)
	if _, err := a.put([]byte("after the skip")); err != nil {
		t.Fatal(err)
	}
	if err := a.log.TruncateBefore(reservation.Epoch); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
}
