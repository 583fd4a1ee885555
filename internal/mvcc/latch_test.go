package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/ablation"
)

// TestWaitersThatGiveUpLeaveTheLatchToOthers: with many waiters of which most give up at random
// moments, also just when they are woken or handed the latch, each of the others gets it, one at a
// time, and in the end it is free and its queue empty.
func TestWaitersThatGiveUpLeaveTheLatchToOthers(t *testing.T) {
	var l latch
	var inside, got, gaveUp int // guarded by the latch, and by mu
	var mu sync.Mutex
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			random, w := rand.New(rand.NewPCG(1, uint64(g))), newWaiter()
			for range 400 {
				ctx, cancel := context.Background(), func() {}
				if g%4 != 0 { // the others wait as long as it takes
					ctx, cancel = context.WithTimeout(ctx, time.Duration(random.IntN(300))*time.Microsecond)
				}
				err := l.lock(ctx, w)
				cancel()
				if err != nil {
					mu.Lock()
					gaveUp++
					mu.Unlock()
					continue
				}
				if inside++; inside != 1 {
					t.Error("two goroutines hold the latch")
				}
				got++
				if random.IntN(8) == 0 {
					time.Sleep(time.Duration(random.IntN(2000)) * time.Microsecond) // long enough that it has to be handed over
				}
				inside--
				l.unlock()
			}
		})
	}
	wg.Wait()
	if gaveUp == 0 || got < 4*400 {
		t.Errorf("%d got the latch and %d gave up: the test tests nothing", got, gaveUp)
	}
	if state := l.state.Load(); state != 0 || l.first != nil || l.last != nil {
		t.Errorf("no goroutine uses the latch, and its state is %b, its queue %v to %v", state, l.first, l.last)
	}
}

// TestOvertakenWaitersAreHandedTheLatchInTurn: once they have waited for queuedMax, no goroutine
// that runs comes between them.
func TestOvertakenWaitersAreHandedTheLatchInTurn(t *testing.T) {
	var l latch
	if !l.tryLock() {
		t.Fatal("held")
	}
	const waiters = 8
	got, next := make(chan int), make(chan struct{})
	for i := range waiters {
		go func() {
			if err := l.lock(context.Background(), newWaiter()); err != nil {
				t.Error(err)
			}
			got <- i
			<-next
			l.unlock()
		}()
		for queued := 0; queued <= i; { // in this order
			l.mu.Lock()
			queued = 0
			for w := l.first; w != nil; w = w.next {
				queued++
			}
			l.mu.Unlock()
			time.Sleep(100 * time.Microsecond)
		}
	}
	time.Sleep(2 * queuedMax)
	l.unlock()
	for want := range waiters {
		if l.tryLock() {
			t.Fatalf("waiter %d is overtaken", want)
		}
		if i := <-got; i != want {
			t.Fatalf("waiter %d got the latch before %d", i, want)
		}
		next <- struct{}{}
	}
}

// TestWaiterThatGivesUpPassesTheLatchOn: its context may end in the moment in which it is woken or
// handed the latch.
func TestWaiterThatGivesUpPassesTheLatchOn(t *testing.T) {
	for _, handed := range []bool{false, true} {
		var l latch
		first, second := newWaiter(), newWaiter()
		if !l.tryLock() {
			t.Fatal("held")
		}
		for _, w := range []*waiter{first, second} {
			if w.since = time.Now(); handed {
				w.since = w.since.Add(-2 * queuedMax)
			}
			if !l.enqueue(w, false) {
				t.Fatal("not queued")
			}
		}
		l.unlock()
		if len(first.wake) != 1 || first.granted != handed {
			t.Fatalf("handed=%v: the first waiter was not woken, or granted is %v", handed, first.granted)
		}
		l.cancel(first)
		if len(first.wake) != 0 {
			t.Errorf("handed=%v: a token is left for the waiter's next wait", handed)
		}
		if len(second.wake) != 1 || second.granted != handed {
			t.Errorf("handed=%v: the second waiter did not get the latch", handed)
		}
		if l.cancel(second); l.state.Load() != 0 {
			t.Errorf("handed=%v: all waiters have given up, and the state is %b", handed, l.state.Load())
		}
	}
}

// TestExpiredWaiterTakesNoLatch: a set whose last latch is held gives up all of them.
func TestExpiredWaiterTakesNoLatch(t *testing.T) {
	l := newLatches(ablation.Switches{})
	var all latchSet
	for i := range 8 {
		all.add(l, []byte{byte(i)})
	}
	var held latchSet
	held.add(l, []byte{7})
	if err := l.lock(context.Background(), &held, newWaiter()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if err := l.lock(ctx, &all, newWaiter()); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%v, although one latch is held", err)
	}
	l.unlock(&held)
	for i := range l.table {
		if l.table[i].state.Load() != 0 {
			t.Errorf("latch %d is still held", i)
		}
	}
	if err := l.lock(context.Background(), &all, newWaiter()); err != nil {
		t.Error(err)
	}
	l.unlock(&all)
}

// TestUrgentWaiterGetsTheLatchFirst: a bulk load, which holds other latches already, waits for a
// latch only until its holder unlocks it, however many commits wait for it, too.
func TestUrgentWaiterGetsTheLatchFirst(t *testing.T) {
	var l latch
	if err := l.lock(context.Background(), newWaiter()); err != nil {
		t.Fatal(err)
	}
	order := make(chan string, 9)
	lock := func(name string, w *waiter) {
		if err := l.lock(context.Background(), w); err != nil {
			t.Error(err)
		}
		order <- name
		l.unlock()
	}
	wait := func(n int) {
		for waiting := -1; waiting != n; time.Sleep(time.Millisecond) {
			l.mu.Lock()
			waiting = 0
			for w := l.first; w != nil; w = w.next {
				waiting++
			}
			l.mu.Unlock()
		}
	}
	for i := range 8 {
		go lock("commit", newWaiter())
		wait(i + 1)
	}
	urgent := newWaiter()
	urgent.urgent = true
	go lock("bulk load", urgent)
	wait(9)
	l.unlock()
	if first := <-order; first != "bulk load" {
		t.Errorf("a %s got the latch first", first)
	}
	for range 8 {
		<-order
	}
}

// TestLatchSetHasTheStripesOfItsKeys: whatever its size, a set is walked over its stripes in their
// order, each once, and after a reset it is empty.
func TestLatchSetHasTheStripesOfItsKeys(t *testing.T) {
	l, rng := newLatches(ablation.Switches{}), rand.New(rand.NewPCG(1, 2))
	var set latchSet
	for _, n := range []int{2, 3, 50, 1, 2000, 2, 40_000, 5} {
		set.reset()
		want := map[int]bool{}
		for range n {
			key := binary.BigEndian.AppendUint64(nil, rng.Uint64())
			set.add(l, key)
			want[l.stripe(key)] = true
		}
		if n == 1 {
			if !want[set.only] {
				t.Errorf("a set of one key has stripe %d", set.only)
			}
			continue
		}
		before := -1
		for stripe := set.next(0); stripe < stripes; stripe = set.next(stripe + 1) {
			if stripe <= before || !want[stripe] {
				t.Fatalf("%d keys: stripe %d comes after %d, and a key has it: %v", n, stripe, before, want[stripe])
			}
			delete(want, stripe)
			before = stripe
		}
		if len(want) != 0 {
			t.Errorf("%d keys: %d stripes are missing", n, len(want))
		}
	}
	set.reset()
	set.addAll()
	for stripe := range stripes {
		if set.next(stripe) != stripe {
			t.Fatalf("a set of all stripes lacks %d", stripe)
		}
	}
	if set.reset(); set.next(0) != stripes || set.summary != [len(set.summary)]uint64{} {
		t.Error("a reset set is not empty")
	}
}
