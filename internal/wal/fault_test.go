package wal

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestFailedWriteOrSyncIsFinal lets one write or sync fail once and checks that nothing is tried again and no waiter learns
// that a later epoch is durable.
func TestFailedWriteOrSyncIsFinal(t *testing.T) {
	for name, rule := range map[string]vfs.Rule{
		"write":       {Op: vfs.OpWrite},
		"short write": {Op: vfs.OpWrite, Fault: vfs.Short, Bytes: 100},
		"torn write":  {Op: vfs.OpWrite, Fault: vfs.Torn},
		"sync":        {Op: vfs.OpSyncData},
		"full":        {Op: vfs.OpWrite, Err: vfs.ErrNoSpace},
	} {
		t.Run(name, func(t *testing.T) {
			mem := vfs.NewMem()
			faulty := vfs.NewFaulty(mem)
			a := mustStart(t, testOptions(faulty, 64<<10))
			waitForPreallocated(t, a.log)
			if _, err := a.put(bodyOf(1, 100)); err != nil {
				t.Fatal(err)
			}
			rule.Nth = 1
			injected := faulty.Inject(rule)
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					if _, err := a.put(bodyOf(2, 100)); !errors.Is(err, ErrFailed) {
						t.Errorf("waiter got %v", err)
					}
				})
			}
			wg.Wait()
			if injected.Fired() != 1 {
				t.Fatal("the fault was not met")
			}
			mutations := mem.Mutations()
			e, err := a.put(bodyOf(3, 100))
			if !errors.Is(err, ErrFailed) {
				t.Fatalf("put after the failure: %d, %v", e, err)
			}
			if rule.Err != nil && !errors.Is(err, vfs.ErrNoSpace) {
				t.Fatalf("the cause is lost: %v", err)
			}
			if err := a.log.Result(9); !errors.Is(err, ErrFailed) || !errors.Is(a.log.Err(), ErrFailed) {
				t.Fatal(err)
			}
			c, _ := a.cur.Load().Seal()
			if _, err := a.log.NewSegment(context.Background(), c.Epoch, 0); !errors.Is(err, ErrFailed) {
				t.Fatal(err)
			}
			if a.log.Durable() != 1 || mem.Mutations() != mutations {
				t.Fatalf("durable %d; %d operations after the failure", a.log.Durable(), mem.Mutations()-mutations)
			}
			if err := a.log.Close(); !errors.Is(err, ErrFailed) {
				t.Fatalf("close: %v", err)
			}
			if mem.Mutations() != mutations {
				t.Fatal("close wrote to a failed log")
			}
			if rec, _ := mustReplay(t, mem.Crash(1, vfs.SurviveSome), 0); rec.Last < 1 {
				t.Fatal("what was durable before the failure is gone")
			}
		})
	}
}

// waitForPreallocated waits until a segment is ready, also if the first one has few records.
func waitForPreallocated(t *testing.T, l *Log) {
	l.preparer.begun.Store(true)
	l.requestSegment()
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		l.preallocator.mu.Lock()
		ready := len(l.preallocator.ready) > 0
		l.preallocator.mu.Unlock()
		if ready {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no preallocated segment")
		}
	}
}

func TestFullDeviceAtRotationMayPass(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 64<<10))
	waitForPreallocated(t, a.log)
	fs.SetCapacity(2 * 64 << 10)
	var e keys.Epoch
	var err error
	for i := 0; err == nil; i++ {
		var put keys.Epoch
		if put, err = a.put(bodyOf(uint64(i), 1000)); err == nil {
			e = put
		}
	}
	if !errors.Is(err, vfs.ErrNoSpace) || errors.Is(err, ErrFailed) || a.log.Err() != nil {
		t.Fatal(err)
	}
	if d := a.log.Durable(); d != e || e < 100 {
		t.Fatalf("durable %d of %d", d, e)
	}
	if _, err := a.log.NewSegment(context.Background(), e+1, 0); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatalf("still full: %v", err)
	}
	fs.SetCapacity(0)
	s, err := a.log.NewSegment(context.Background(), e+1, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.cur.Store(s)
	a.err.Store(nil)
	if got, err := a.put(bodyOf(9, 1000)); err != nil || got != e+1 {
		t.Fatalf("with space again: %d, %v", got, err)
	}
	mustClose(t, a.log)
	if rec, _ := mustReplay(t, fs, 0); rec.Last != e+1 {
		t.Fatalf("last %d", rec.Last)
	}
}

func TestCancelledWaitLeavesTheLogRunning(t *testing.T) {
	faulty := vfs.NewFaulty(vfs.NewMem())
	a := mustStart(t, testOptions(faulty, 64<<10))
	slow := faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Fault: vfs.Slow, Delay: 20 * time.Millisecond})
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			e, err := a.append(bodyOf(uint64(i), 100))
			if err != nil {
				t.Error(err)
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*time.Millisecond)
			defer cancel()
			if err := a.log.WaitDurable(ctx, e); err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	slow.Remove()
	if err := a.log.Flush(20); err != nil {
		t.Fatal(err)
	}
	if a.log.Durable() != 20 {
		t.Fatalf("durable %d", a.log.Durable())
	}
}

// TestOpenMakesDurableWhatReplayFound: after a kill, replay reads from the page cache what was never synced.
func TestOpenMakesDurableWhatReplayFound(t *testing.T) {
	mem := vfs.NewMem()
	faulty := vfs.NewFaulty(mem)
	a := mustStart(t, testOptions(faulty, 64<<10))
	if _, err := a.put(bodyOf(1, 100)); err != nil {
		t.Fatal(err)
	}
	waitForPreallocated(t, a.log)
	faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Nth: 1})
	if _, err := a.put(bodyOf(2, 100)); !errors.Is(err, ErrFailed) {
		t.Fatal(err)
	}
	_ = a.log.Close()
	rec, _ := mustReplay(t, mem, 0)
	if rec.Last != 2 {
		t.Fatalf("the written record is not there: last %d", rec.Last)
	}
	b, err := startLog(testOptions2(mem), rec)
	if err != nil {
		t.Fatal(err)
	}
	e, err := b.put(bodyOf(3, 100))
	if err != nil || e != rec.Next() {
		t.Fatalf("epoch %d, %v", e, err)
	}
	survivor := mem.Crash(1, vfs.SurviveNone)
	_ = b.log.Close()
	if rec, _ := mustReplay(t, survivor, 0); rec.Last != e {
		t.Fatalf("last %d", rec.Last)
	}
}

func TestFailureWakesQueuedWaiters(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), 64<<10))
	a.log.waits.mu.Lock() // queued between two checks of the queue by the flusher
	w := a.log.waits.push(1)
	a.log.waits.mu.Unlock()
	if err := a.log.fail(errors.New("a preallocated file failed")); !errors.Is(err, ErrFailed) {
		t.Fatal(err)
	}
	select {
	case <-w.signal:
	case <-time.After(30 * time.Second):
		t.Fatal("not woken")
	}
	if err := a.log.WaitDurable(context.Background(), 1); !errors.Is(err, ErrFailed) {
		t.Fatalf("a wait on a failed log: %v", err)
	}
}
