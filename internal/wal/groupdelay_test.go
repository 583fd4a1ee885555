package wal

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// slowFS is a file system whose syncs take syncTime of the test's clock.
type slowFS struct{ vfs.FS }

const syncTime = 140 * time.Microsecond

func (f slowFS) Open(name string, mode vfs.Mode) (vfs.File, error) {
	file, err := f.FS.Open(name, mode)
	return slowFile{file}, err
}

type slowFile struct{ vfs.File }

func (f slowFile) SyncData() error {
	time.Sleep(syncTime)
	return f.File.SyncData()
}

// closedLoop runs some writers, each of which commits, works for a while, and commits again. It returns the records per
// sync and the longest wait. The work takes up to a quarter more or less: on a clock without noise, writers that were once in
// one group come back at the same instant for ever, and three such bunches of writers need no group-commit delay.
func closedLoop(t *testing.T, callers, rounds int, work time.Duration) (group float64, longest time.Duration) {
	a := mustStart(t, testOptions(slowFS{vfs.NewMem()}, 1<<20))
	before := a.log.Stats()
	var most atomic.Int64
	done := make(chan error, callers)
	for c := range callers {
		go func() {
			random := rand.New(rand.NewPCG(1, uint64(c)))
			time.Sleep(work * time.Duration(c) / time.Duration(callers))
			var err error
			for r := 0; r < rounds && err == nil; r++ {
				var e keys.Epoch
				e, err = a.append([]byte("body"))
				start := time.Now()
				if err == nil {
					err = a.log.WaitDurable(context.Background(), e)
				}
				most.Store(max(most.Load(), int64(time.Since(start))))
				time.Sleep(work*3/4 + time.Duration(random.Int64N(int64(work/2))))
			}
			done <- err
		}()
	}
	for range callers {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	s := a.log.Stats()
	if err := a.log.Close(); err != nil {
		t.Error(err)
	}
	return float64(s.Records-before.Records) / float64(s.Syncs-before.Syncs), time.Duration(most.Load())
}

func TestFewWritersAreNeverDelayed(t *testing.T) {
	for _, callers := range []int{1, 2, 5} {
		synctest.Test(t, func(t *testing.T) {
			// A commit that comes just after a sync has begun waits for that sync and for its own.
			if _, longest := closedLoop(t, callers, 200, 30*time.Microsecond); longest > 2*syncTime {
				t.Errorf("%d callers: a commit waited %v; two syncs take %v", callers, longest, 2*syncTime)
			}
		})
	}
}

func TestManyWritersShareASync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// 64 writers that work 850 us each: 64/990us*140us = 9 come during a sync, the size of a group without a delay.
		group, longest := closedLoop(t, 64, 200, 850*time.Microsecond)
		if group < 14 {
			t.Errorf("%.1f records in a sync; want at least 14", group)
		}
		// The sync that runs, the group-commit delay, and the own sync.
		if bound := syncTime + 2*syncTime + syncTime + 100*time.Microsecond; longest > bound {
			t.Errorf("a commit waited %v; the bound is %v", longest, bound)
		}
	})
}

func TestWritersThatStopAreWaitedForOnlyBriefly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := mustStart(t, testOptions(slowFS{vfs.NewMem()}, 1<<20))
		g := groupDelay{target: delayTargetMax}
		if !a.log.tryFlusher() {
			t.Fatal("the flush role of an idle log is taken")
		}
		last := a.mustAppend(t, []byte("body"))
		a.log.waits.mu.Lock()
		a.log.waits.groupTarget = last + delayTargetMax
		a.log.waits.mu.Unlock()
		start := time.Now()
		g.wait(a.log, 2*syncTime)
		if waited := time.Since(start); waited != 2*syncTime {
			t.Errorf("waited %v for writers that have stopped; want %v", waited, 2*syncTime)
		}
		if g.target > 1 || a.log.waits.groupTarget != 0 {
			t.Errorf("the target is still %d, to epoch %d", g.target, a.log.waits.groupTarget)
		}
		a.log.releaseFlusher()
		if err := a.log.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestCloseEndsTheGroupCommitDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := mustStart(t, testOptions(vfs.NewMem(), 1<<20))
		var g groupDelay
		a.log.waits.groupTarget = 1 << 40
		returned := make(chan struct{})
		go func() {
			g.wait(a.log, time.Hour)
			close(returned)
		}()
		start := time.Now()
		if err := a.log.Close(); err != nil {
			t.Error(err)
		}
		<-returned
		if waited := time.Since(start); waited > time.Second {
			t.Errorf("the flusher slept %v beyond Close", waited)
		}
	})
}
