package wal

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

const testDir = "data"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// appender uses a log as its owner does: it rotates when a reservation crosses the end.
type appender struct {
	log *Log
	cur atomic.Pointer[Segment]
	err atomic.Pointer[error] // why there is no next segment

	patient bool // tries again after an error that may pass
}

func testOptions(fs vfs.FS, segmentBytes int) Options {
	var n atomic.Uint64
	return Options{
		FS: fs, Dir: testDir, SegmentBytes: segmentBytes,
		Identity: func() uint64 { return rand.New(rand.NewPCG(n.Add(1), 7)).Uint64() },
	}
}

// startLog opens what replay found, with a first segment.
func startLog(opts Options, rec Recovery) (*appender, error) {
	if err := opts.FS.MkdirAll(opts.Dir); err != nil {
		return nil, err
	}
	l, err := Open(opts, rec)
	if err != nil {
		return nil, err
	}
	a := &appender{log: l}
	s, err := l.NewSegment(context.Background(), rec.Next(), 0)
	if err != nil {
		_ = l.Close()
		return nil, err
	}
	a.cur.Store(s)
	return a, nil
}

// mustStart replays an empty or existing log and opens it; it is closed at the end of the test at the latest.
func mustStart(t testing.TB, opts Options) *appender {
	t.Helper()
	rec, err := Replay(opts.FS, opts.Dir, 0, Proof{}, func(keys.Epoch, []byte) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	a, err := startLog(opts, rec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.log.Close() })
	return a
}

// append writes one record and returns its epoch.
func (a *appender) append(body []byte) (keys.Epoch, error) {
	for {
		s := a.cur.Load()
		c, outcome := s.Reserve(len(body))
		switch outcome {
		case Reserved:
			copy(s.Body(c), body)
			s.Publish(c)
			return c.Epoch, nil
		case Crossed:
			return a.rotate(c.Epoch, body)
		case TooLarge:
			return 0, fmt.Errorf("body of %d bytes is too large", len(body))
		}
		for a.cur.Load() == s {
			if p := a.err.Load(); p != nil {
				return 0, *p
			}
			runtime.Gosched()
		}
	}
}

func (a *appender) rotate(first keys.Epoch, body []byte) (keys.Epoch, error) {
	s, err := a.log.NewSegment(context.Background(), first, len(body))
	for a.patient && err != nil && !errors.Is(err, ErrFailed) {
		s, err = a.log.NewSegment(context.Background(), first, len(body))
	}
	if err != nil {
		a.err.Store(&err)
		return 0, err
	}
	c, outcome := s.Reserve(len(body))
	if outcome != Reserved {
		return 0, fmt.Errorf("a new segment has no room for the record it was made for: %d", outcome)
	}
	a.cur.Store(s)
	copy(s.Body(c), body)
	s.Publish(c)
	return c.Epoch, nil
}

func (a *appender) mustAppend(t testing.TB, body []byte) keys.Epoch {
	t.Helper()
	e, err := a.append(body)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// put appends and waits until it is durable.
func (a *appender) put(body []byte) (keys.Epoch, error) {
	e, err := a.append(body)
	if err != nil {
		return 0, err
	}
	return e, a.log.WaitDurable(context.Background(), e)
}

// bodyOf is a body that contains its tag and depends on its length, so that tests detect an exchange. At least 8 bytes.
func bodyOf(tag uint64, n int) []byte {
	b := make([]byte, max(n, 8))
	for i := 8; i < len(b); i++ {
		b[i] = byte(tag + uint64(i)*7)
	}
	binary.LittleEndian.PutUint64(b, tag)
	return b
}

func isBody(b []byte) (tag uint64, ok bool) {
	if len(b) < 8 {
		return 0, false
	}
	tag = binary.LittleEndian.Uint64(b)
	return tag, bytes.Equal(b, bodyOf(tag, len(b)))
}

// replayed is what a replay passed on, by epoch.
type replayed struct {
	first  keys.Epoch // the first that may come
	epochs []keys.Epoch
	bodies [][]byte
}

func (r *replayed) last() keys.Epoch {
	if n := len(r.epochs); n > 0 {
		return r.epochs[n-1]
	}
	return r.first - 1
}

func replayAll(fs vfs.FS, after keys.Epoch) (Recovery, *replayed, error) {
	r := &replayed{first: after + 1}
	rec, err := Replay(fs, testDir, after, Proof{}, func(e keys.Epoch, body []byte) error {
		if e != r.last()+1 && e <= r.last()+EpochWindow {
			return fmt.Errorf("epoch %d after %d", e, r.last())
		}
		r.epochs = append(r.epochs, e)
		r.bodies = append(r.bodies, bytes.Clone(body))
		return nil
	})
	return rec, r, err
}

func mustReplay(t testing.TB, fs vfs.FS, after keys.Epoch) (Recovery, *replayed) {
	t.Helper()
	rec, r, err := replayAll(fs, after)
	if err != nil {
		t.Fatal(err)
	}
	if rec.Last != r.last() && rec.Last < r.last()+EpochWindow {
		t.Fatalf("replay says last %d, passed on up to %d", rec.Last, r.last())
	}
	return rec, r
}

// flushOnce flushes the copied records as soon as the flush role is free.
func (l *Log) flushOnce() (moved bool, err error) {
	l.acquireFlusher()
	moved, err = l.flushStep()
	l.releaseFlusher()
	return moved, err
}

func mustClose(t testing.TB, l *Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}
