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
	c.store.engine.ReadCommits(c.OldestInLog()-1, c.Stable(), wal.TailMark{}, logReadMax, func(e keys.Epoch, h batch.Header) bool {
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
	c.times.every = 1000
	if err := c.Await(context.Background(), s.Visible()-1, 0); err != nil {
		t.Fatal(err)
	}
	list := commitTimes(t, c)
	if len(list) < 160 {
		t.Fatalf("%d commits", len(list))
	}
	checkEpochBefore(t, c, list)
	if len(c.times.marks) < 10 {
		t.Errorf("%d marks", len(c.times.marks))
	}
	checkEpochBefore(t, c, list)
	var future *TimeError
	if _, _, err := c.EpochBefore(context.Background(), s.clock.Now()+1_000_000); !errors.As(err, &future) || !future.Future() {
		t.Errorf("a time that is not in the past: %v", err)
	}
}

// TestTimeMarksHaveABound, and stay ascending.
func TestTimeMarksHaveABound(t *testing.T) {
	times := newLogTimes()
	for i := range keys.Epoch(3 * timeMarksMax) {
		times.add(timeMark{next: i + 1, newest: i, time: uint64(i)})
	}
	if len(times.marks) > timeMarksMax {
		t.Errorf("%d marks", len(times.marks))
	}
	for i := 1; i < len(times.marks); i++ {
		if times.marks[i].next <= times.marks[i-1].next {
			t.Fatalf("mark %d is not after the one before", i)
		}
	}
	m := timeMark{whole: true}
	m.pass(1, 7)
	if m.pass(2, 5); m.time != 7 || m.newest != 2 || !m.whole {
		t.Errorf("after times out of order: %+v", m)
	}
	if m.pass(3, 0); m.time != 7 || m.newest != 2 || m.whole {
		t.Errorf("after a commit without a time: %+v", m)
	}
	if m := times.begin(1000, 500); m.time > 1000 || m.next < 500 {
		t.Errorf("%+v", m)
	}
}
