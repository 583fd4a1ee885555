package wal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestAppendedRecordsAreReplayedInEpochOrder(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 64<<10))
	var want [][]byte
	for i := range 500 {
		body := bodyOf(uint64(i), i%300)
		if i%17 == 0 {
			body = nil // an empty body is a record too
		}
		if e := a.mustAppend(t, body); e != keys.Epoch(i+1) {
			t.Fatalf("append %d got epoch %d", i, e)
		}
		want = append(want, body)
	}
	if err := a.log.Flush(500); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	for _, after := range []keys.Epoch{0, 1, 250, 499, 500, 700} {
		rec, got := mustReplay(t, fs, after)
		if rec.Last != max(after, 500) || rec.Torn != nil {
			t.Fatalf("after %d: last %d, torn %+v", after, rec.Last, rec.Torn)
		}
		for i, body := range got.bodies {
			if !bytes.Equal(body, want[int(after)+i]) {
				t.Fatalf("after %d: epoch %d has another body", after, int(after)+i+1)
			}
		}
		if len(got.bodies) != max(0, 500-int(after)) {
			t.Fatalf("after %d: %d records", after, len(got.bodies))
		}
	}
}

func TestEpochsContinueOverRotationAndRestart(t *testing.T) {
	fs := vfs.NewMem()
	opts := testOptions(fs, SegmentBytesMin)
	var last keys.Epoch
	for run := range 5 {
		a := mustStart(t, opts)
		for i := range 200 {
			e, err := a.put(bodyOf(uint64(last), i))
			if err != nil {
				t.Fatal(err)
			}
			if e != last+1 {
				t.Fatalf("run %d: epoch %d after %d", run, e, last)
			}
			last = e
		}
		mustClose(t, a.log)
		rec, got := mustReplay(t, fs, 0)
		if rec.Last != last || len(got.bodies) != int(last) {
			t.Fatalf("run %d: replayed %d of %d", run, len(got.bodies), last)
		}
		for i, s := range rec.Segments[1:] {
			if s.First < rec.Segments[i].First {
				t.Fatal("segments out of order")
			}
		}
	}
}

func TestSixteenWritersOnTinySegmentsLoseNothing(t *testing.T) {
	for _, size := range []int{SegmentBytesMin, 64 << 10} {
		t.Run(fmt.Sprintf("segment=%d", size), func(t *testing.T) {
			fs := vfs.NewMem()
			opts := testOptions(fs, size)
			a := mustStart(t, opts)
			const writers, each = 16, 300
			var wg sync.WaitGroup
			var mu sync.Mutex
			byEpoch := map[keys.Epoch]uint64{}
			for w := range writers {
				wg.Go(func() {
					for i := range each {
						tag := uint64(w*each + i)
						e, err := a.append(bodyOf(tag, int(tag*31%700)))
						if err == nil && i%3 == 0 {
							err = a.log.WaitDurable(context.Background(), e)
						}
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						byEpoch[e] = tag
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			mustClose(t, a.log)
			_, got := mustReplay(t, fs, 0)
			if len(got.bodies) != writers*each {
				t.Fatalf("%d records", len(got.bodies))
			}
			for i, body := range got.bodies {
				if tag, ok := isBody(body); !ok || tag != byEpoch[keys.Epoch(i+1)] {
					t.Fatalf("epoch %d has the body of %d", i+1, tag)
				}
			}
		})
	}
}

func TestARecordLargerThanASegmentGetsItsOwn(t *testing.T) {
	fs := vfs.NewMem()
	const size = SegmentBytesMin
	a := mustStart(t, testOptions(fs, size))
	room := size - headerPage - recordHeaderSize
	sizes := []int{100, room, room + 1, 100, 3 << 20, 100, room - 1, room - 8, 8, 100, windowBytes, 2 * windowBytes}
	for i, n := range sizes {
		if _, err := a.put(bodyOf(uint64(i), n)); err != nil {
			t.Fatal(err)
		}
	}
	mustClose(t, a.log)
	_, got := mustReplay(t, fs, 0)
	if len(got.bodies) != len(sizes) {
		t.Fatalf("%d records", len(got.bodies))
	}
	for i, body := range got.bodies {
		if tag, ok := isBody(body); !ok || tag != uint64(i) || len(body) != max(sizes[i], 8) {
			t.Fatalf("record %d: tag %d, %d bytes", i, tag, len(body))
		}
	}
}

func TestBodyLimit(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	s := a.cur.Load()
	if _, outcome := s.Reserve(BodyBytesMax + 1); outcome != TooLarge {
		t.Fatalf("one past the limit: %d", outcome)
	}
	if _, outcome := s.Reserve(-1); outcome != TooLarge {
		t.Fatalf("negative: %d", outcome)
	}
	c, outcome := s.Reserve(BodyBytesMax)
	if outcome != Crossed || c.Epoch != 1 {
		t.Fatalf("at the limit: %d, epoch %d", outcome, c.Epoch)
	}
	if _, err := a.log.NewSegment(context.Background(), c.Epoch, BodyBytesMax+1); err == nil {
		t.Fatal("a segment past the limit")
	}
}

func TestExactlyOneReservationCrossesTheEnd(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	s := a.cur.Load()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var crossed, reserved []keys.Epoch
	for range 8 {
		wg.Go(func() {
			for {
				c, outcome := s.Reserve(40)
				mu.Lock()
				switch outcome {
				case Reserved:
					reserved = append(reserved, c.Epoch)
				case Crossed:
					crossed = append(crossed, c.Epoch)
				}
				mu.Unlock()
				if outcome != Reserved {
					return
				}
				s.Publish(c)
			}
		})
	}
	wg.Wait()
	if len(crossed) != 1 || crossed[0] != keys.Epoch(len(reserved)+1) {
		t.Fatalf("crossed %v after %d", crossed, len(reserved))
	}
	if _, outcome := s.Seal(); outcome != Full {
		t.Fatalf("sealed twice: %d", outcome)
	}
	if _, err := a.log.NewSegment(context.Background(), crossed[0]+1, 0); err == nil {
		t.Fatal("a segment that leaves out an epoch")
	}
	if _, err := a.log.NewSegment(context.Background(), crossed[0], 0); err != nil {
		t.Fatal(err)
	}
}

func TestSealedEmptySegmentIsPassedOver(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	for range 10 { // more often than there are buffers
		c, outcome := a.cur.Load().Seal()
		if outcome != Crossed || c.Epoch != 1 {
			t.Fatalf("%d, epoch %d", outcome, c.Epoch)
		}
		s, err := a.log.NewSegment(context.Background(), c.Epoch, 0)
		if err != nil {
			t.Fatal(err)
		}
		a.cur.Store(s)
	}
	if _, err := a.put(bodyOf(1, 100)); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	if _, got := mustReplay(t, fs, 0); len(got.bodies) != 1 {
		t.Fatalf("%d records", len(got.bodies))
	}
}

func TestNoOpRecordReplaysAsAnEmptyBody(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	a.mustAppend(t, bodyOf(1, 50))
	s := a.cur.Load()
	c, _ := s.Reserve(64)
	copy(s.Body(c), bodyOf(9, 64)) // what a failed validation had already copied
	s.PublishNoOp(c)
	a.mustAppend(t, bodyOf(3, 50))
	mustClose(t, a.log)
	_, got := mustReplay(t, fs, 0)
	if len(got.bodies) != 3 || len(got.bodies[1]) != 0 {
		t.Fatalf("%d records, the no-op record with %d bytes", len(got.bodies), len(got.bodies[1]))
	}
}

func TestNothingAfterAHoleBecomesDurable(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 64<<10))
	a.mustAppend(t, bodyOf(1, 100))
	s := a.cur.Load()
	hole, _ := s.Reserve(100)
	a.mustAppend(t, bodyOf(3, 100))

	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := a.log.WaitDurable(ctx, 3); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("waiting for an epoch after a hole: %v", err)
	}
	if d := a.log.Durable(); d != 1 {
		t.Fatalf("durable %d with a hole at 2", d)
	}
	if _, got := mustReplay(t, fs.Crash(1, vfs.SurviveAll), 0); len(got.bodies) != 1 {
		t.Fatalf("%d records written with a hole at 2", len(got.bodies))
	}
	_ = hole
}

func TestClosingTheHoleWakesAllWaiters(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), 64<<10))
	s := a.cur.Load()
	hole, _ := s.Reserve(100)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := a.put(bodyOf(1, 100)); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(5 * time.Millisecond)
	s.Publish(hole)
	wg.Wait()
	if d := a.log.Durable(); d != 9 {
		t.Fatalf("durable %d", d)
	}
}

func TestRequestFlushMakesDurableWithoutWaiting(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), 64<<10))
	e := a.mustAppend(t, bodyOf(1, 40))
	a.log.RequestFlush(e)
	for deadline := time.Now().Add(30 * time.Second); a.log.Durable() < e; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not durable")
		}
	}
}

func TestSealedSegmentIsFlushedWithoutAWaiter(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	for i := range 1000 { // many times more than the buffers hold
		a.mustAppend(t, bodyOf(uint64(i), 200))
	}
	if s := a.log.Stats(); s.BufferBytes > BuffersMin*SegmentBytesMin {
		t.Fatalf("%d bytes of buffers", s.BufferBytes)
	}
}

func TestCloseFlushesAndEndsEveryWait(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 64<<10))
	a.mustAppend(t, bodyOf(1, 10))
	waited := make(chan error)
	go func() { waited <- a.log.WaitDurable(context.Background(), 7) }() // never reserved
	time.Sleep(2 * time.Millisecond)
	mustClose(t, a.log)
	if err := <-waited; !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if err := a.log.Result(1); err != nil {
		t.Fatal(err)
	}
	if err := a.log.Close(); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, got := mustReplay(t, fs, 0); len(got.bodies) != 1 {
		t.Fatal("what was published before Close is not there")
	}
}

func TestOpenRefusesBadSegmentSizes(t *testing.T) {
	for _, size := range []int{0, SegmentBytesMin - 1, SegmentBytesMin + 1, SegmentBytesMax + pageSize} {
		if _, err := Open(Options{FS: vfs.NewMem(), Dir: testDir, SegmentBytes: size}, Recovery{}); err == nil {
			t.Errorf("%d accepted", size)
		}
	}
}

func TestPageAfterTheLastRecordIsZero(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 64<<10))
	var end int64 = headerPage
	for i := range 100 {
		if _, err := a.put(bodyOf(^uint64(0), 40+i*8)); err != nil {
			t.Fatal(err)
		}
		end += recordHeaderSize + 40 + int64(i)*8
		b := make([]byte, -end&(pageSize-1))
		if len(b) == 0 || end > 60<<10 {
			continue
		}
		readAt(t, fs, Dir(testDir)+"/"+FileName(1), end, b)
		if !allZero(b) {
			t.Fatalf("record %d: bytes after it", i)
		}
	}
}

// TestAHoleHoldsBackLaterSegments: the flusher does not leave a sealed segment before all its records are published, and a
// log that is closed with a hole has no close record.
func TestAHoleHoldsBackLaterSegments(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 64<<10))
	before, err := a.put(bodyOf(1, 40))
	if err != nil {
		t.Fatal(err)
	}
	_, outcome := a.cur.Load().Reserve(8) // and never published
	if outcome != Reserved {
		t.Fatal(outcome)
	}
	reservation, _ := a.cur.Load().Seal()
	s, err := a.log.NewSegment(t.Context(), reservation.Epoch, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.cur.Store(s)
	behind := a.mustAppend(t, bodyOf(2, 40))
	for range 3 { // by the flusher, if it has been asked to, or by this goroutine
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		err := a.log.WaitDurable(ctx, behind)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("after a hole: %v", err)
		}
	}
	if d := a.log.Durable(); d != before {
		t.Fatalf("durable is %d; epoch %d was never published", d, before+1)
	}
	mustClose(t, a.log)
	if rec, _ := mustReplay(t, fs, 0); rec.Last != before || !rec.Unclean {
		t.Fatalf("the log ends at %d, want %d; unclean: %v", rec.Last, before, rec.Unclean)
	}
}
