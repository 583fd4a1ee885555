package wal

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWaitersThatGiveUpHarmNoOther: the deadlines of some writers pass, or their contexts are cancelled, about when their
// epochs become durable. Every other writer returns when its epoch is durable and not before, and the log can be closed.
func TestWaitersThatGiveUpHarmNoOther(t *testing.T) {
	const impatient, healthy, rounds = 192, 16, 100
	faulty := vfs.NewFaulty(vfs.NewMem())
	a, err := startLog(testOptions(faulty, 1<<20), Recovery{}) // the test ends without Close if a waiter hangs
	if err != nil {
		t.Fatal(err)
	}
	faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Fault: vfs.Slow, Delay: 2 * time.Millisecond})
	var wg sync.WaitGroup
	for g := range impatient + healthy {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 11))
			for range rounds {
				e, err := a.append(bodyOf(uint64(g), 40))
				if err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := impatience(random, g < impatient)
				err = a.log.WaitDurable(ctx, e)
				if gaveUp := ctx.Err(); err == nil && a.log.Durable() < e || err != nil && (gaveUp == nil || !errors.Is(err, gaveUp)) {
					t.Errorf("epoch %d, durable %d: %v", e, a.log.Durable(), err)
				}
				cancel()
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	within(t, done, "the writers")
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := a.log.WaitDurable(ctx, a.mustAppend(t, bodyOf(1, 40))); err != nil {
		t.Errorf("a single writer afterwards: %v", err)
	}
	closed := make(chan struct{})
	go func() { _ = a.log.Close(); close(closed) }() // another test checks the error of Close
	within(t, closed, "Close")
}

// impatience is a context that ends in 0 to 8 ms, by deadline or cancellation, or one that does not end.
func impatience(random *rand.Rand, impatient bool) (context.Context, context.CancelFunc) {
	after := time.Duration(random.IntN(8000)) * time.Microsecond
	if !impatient {
		return context.Background(), func() {}
	}
	if random.IntN(2) == 0 {
		return context.WithTimeout(context.Background(), after)
	}
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(after, cancel)
	return ctx, cancel
}

// within fails the test if done is not closed in time.
func within(t *testing.T, done <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("%s did not end in a minute", what)
	}
}

// awaitQueued returns when n waiters are in the queue.
func (a *appender) awaitQueued(n int) {
	for a.queued() < n {
		runtime.Gosched()
	}
}

func (a *appender) queued() int {
	a.log.waits.mu.Lock()
	defer a.log.waits.mu.Unlock()
	return len(a.log.waits.queue)
}

// TestLeaderThatGivesUpHandsTheRoleOver: the context of the waiter that flushes ends while an earlier record is not
// complete. It returns, and the waiters that queued after it return once the record is complete.
func TestLeaderThatGivesUpHandsTheRoleOver(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), 64<<10))
	hole, _ := a.cur.Load().Reserve(8)
	e := a.mustAppend(t, bodyOf(1, 40))
	ctx, cancel := context.WithCancel(context.Background())
	led := make(chan error, 1)
	go func() { led <- a.log.WaitDurable(ctx, e) }()
	for {
		a.log.waits.mu.Lock()
		flushing := a.log.waits.flushing
		a.log.waits.mu.Unlock()
		if flushing {
			break
		}
		runtime.Gosched()
	}
	followed := make(chan error, 1)
	go func() { followed <- a.log.WaitDurable(context.Background(), e) }()
	a.awaitQueued(1)
	cancel()
	if err := <-led; !errors.Is(err, context.Canceled) {
		t.Fatalf("the leader whose context ended got %v", err)
	}
	a.cur.Load().Publish(hole)
	if err := <-followed; err != nil {
		t.Fatal(err)
	}
}

// TestExpiredContextStartsNoSync: a wait with an expired context does not flush.
func TestExpiredContextStartsNoSync(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), 64<<10))
	e := a.mustAppend(t, bodyOf(1, 40))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := a.log.WaitDurable(ctx, e); !errors.Is(err, context.Canceled) || a.log.Durable() >= e {
		t.Fatalf("durable %d of %d: %v", a.log.Durable(), e, err)
	}
	if err := a.log.Flush(e); err != nil {
		t.Fatal(err)
	}
}

// TestWaiterLeavesFromAnyIndex: the remaining waiters of the queue have the right indices whichever waiter leaves.
func TestWaiterLeavesFromAnyIndex(t *testing.T) {
	var w waits
	random := rand.New(rand.NewPCG(1, 2))
	var queued []*waiter
	for i := range 5000 {
		if len(queued) == 0 || random.IntN(2) == 0 {
			queued = append(queued, w.push(keys.Epoch(i+1)))
			continue
		}
		j := random.IntN(len(queued))
		if one := queued[j]; !w.leave(one) || w.leave(one) {
			t.Fatal("a queued waiter could not leave exactly once")
		}
		queued = append(queued[:j], queued[j+1:]...)
		if len(w.queue) != len(queued) {
			t.Fatalf("%d are queued, want %d", len(w.queue), len(queued))
		}
		for i, one := range w.queue {
			if one.index != i {
				t.Fatalf("the waiter at index %d has index %d", i, one.index)
			}
		}
	}
}
