package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// commitTimes are the times of the commits of the log, in order.
func commitTimes(t *testing.T, c *Changes) (list []timeSample) {
	t.Helper()
	c.store.engine.ReadCommits(c.OldestInLog()-1, c.Stable(), wal.TailMark{}, logReadMax, nil, func(e keys.Epoch, _ wal.TailMark, h batch.Header) bool {
		list = append(list, timeSample{at: h.Time, epoch: e})
		return true
	})
	return list
}

// checkEpochBefore compares the answers for times around those of the commits of the log with a look at all of them.
func checkEpochBefore(t *testing.T, c *Changes, list []timeSample) {
	t.Helper()
	now := c.store.clock.Now()
	for i := range list {
		for _, at := range []uint64{list[i].at - 1, list[i].at, list[i].at + 1} {
			if at >= now {
				continue
			}
			want := keys.Epoch(0)
			for _, one := range list {
				if one.at > at {
					break
				}
				want = one.epoch
			}
			got, ok, err := c.EpochBefore(context.Background(), at)
			if err != nil || !ok || got != want {
				t.Fatalf("at %d: epoch %d, %v, %v; want %d", at, got, ok, err, want)
			}
		}
	}
}

// TestEpochBeforeIsThatOfTheLastCommitBeforeTheFirstLaterOne: of concurrent writers, whose times are not in order, whatever was
// asked before.
func TestEpochBeforeIsThatOfTheLastCommitBeforeTheFirstLaterOne(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.ChangeLog = storage.ChangeLog{Age: time.Minute, Bytes: 1 << 20}
	s := mustOpen(t, o)
	var writing sync.WaitGroup
	for i := range 4 {
		x := mustSession(t, s)
		writing.Go(func() {
			for j := range 40 {
				w := &Write{Durability: DurabilityAsync}
				w.Set(fmt.Append(nil, i, j), make([]byte, 100))
				_, _ = commitAndWait(x, w)
			}
		})
	}
	writing.Wait()
	awaitTick(s) // the times of all commits are in the past
	c := s.Changes()
	s.markEvery(1000)
	if err := c.Await(context.Background(), s.Visible()-1, 0); err != nil {
		t.Fatal(err)
	}
	list := commitTimes(t, c)
	if len(list) < 160 {
		t.Fatalf("%d commits", len(list))
	}
	checkEpochBefore(t, c, list)
	if n := len(s.timeline.marks.list); n < 10 {
		t.Errorf("%d marks", n)
	}
	checkEpochBefore(t, c, list)
	var future *TimeError
	if _, _, err := c.EpochBefore(context.Background(), s.clock.Now()+1_000_000); !errors.As(err, &future) || !future.Future() {
		t.Errorf("a time that is not in the past: %v", err)
	}
}

// TestMarksHaveABound: those that a search adds are as many as the bound allows, ascending, and a later search reads little.
func TestMarksHaveABound(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.Storage.MemoryBytes = 8<<20, 8<<20, 64<<20
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	for range marksMax + 100 {
		if _, err := put(x, "k", "v", DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	at := awaitTick(s) - 1
	awaitTick(s)
	s.markEvery(1)
	c, marks := s.Changes(), &s.timeline.marks
	want, ok, err := c.EpochBefore(t.Context(), at)
	if err != nil || !ok || want <= marksMax {
		t.Fatal(want, ok, err)
	}
	if n := len(marks.list); n > marksMax || n < marksMax/2 || marks.every != 2 {
		t.Errorf("%d marks, %d bytes from one to the next", n, marks.every)
	}
	for i := 1; i < len(marks.list); i++ {
		if m, before := marks.list[i], marks.list[i-1]; m.Epoch() <= before.Epoch() || m.at < before.at {
			t.Fatalf("mark %d is not after the one before", i)
		}
	}
	before := s.Stats().History.LogBytes
	if got, ok, err := c.EpochBefore(t.Context(), at); err != nil || !ok || got != want {
		t.Fatalf("%d, %t, %v; want %d again", got, ok, err, want)
	}
	if read := s.Stats().History.LogBytes - before; read > 4<<10 {
		t.Errorf("%d bytes of the log were read again", read)
	}
}
