package lease

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestUndoneAttemptNeverKeepsALock: an attempt is undone before it arrives, while it waits, and after it has the lock; and other
// attempts of the same lease keep what they have.
func TestUndoneAttemptNeverKeepsALock(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	ctx, name := context.Background(), []byte("l")
	h.mustGrant(1, time.Hour)
	h.mustGrant(2, time.Hour)
	acquire := func(attempt uint64, id ID) error {
		_, err := h.Acquire(ctx, attempt, name, id, nil, false)
		return err
	}
	undo := func(id ID, want bool, attempts ...uint64) {
		t.Helper()
		if released, _, err := h.Undo(ctx, name, id, attempts); err != nil || released != want {
			t.Fatalf("undo %v: released %v, %v", attempts, released, err)
		}
		h.checkRecords()
	}
	holder := func(want ID) {
		t.Helper()
		if held, _, err := h.Holder(ctx, name); err != nil || held.Lease != want {
			t.Fatalf("held by %d, %v; want %d", held.Lease, err, want)
		}
	}
	undo(1, false, 10)
	if err := acquire(10, 1); !errors.Is(err, ErrUndone) { // it arrives late
		t.Fatal(err)
	}
	holder(0)
	for _, attempt := range []uint64{11, 12, 12} {
		if err := acquire(attempt, 1); err != nil {
			t.Fatal(err)
		}
	}
	undo(2, false, 11) // another lease's
	undo(1, false, 11) // 12 has it, too
	holder(1)
	undo(1, true, 12)
	holder(0)

	if err := acquire(20, 1); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() {
		_, err := h.Acquire(ctx, 21, name, 2, nil, true)
		waited <- err
	}()
	for h.Stats().Waiters == 0 {
		time.Sleep(time.Millisecond)
	}
	undo(2, false, 21)
	if err := <-waited; !errors.Is(err, ErrUndone) {
		t.Fatalf("a waiter that was undone: %v", err)
	}
	undo(1, true, 20)
	if err := acquire(22, 2); err != nil {
		t.Fatal(err)
	}
	for attempt := uint64(23); attempt < 23+attemptsMax; attempt++ { // more than are remembered
		if err := acquire(attempt, 2); err != nil {
			t.Fatal(err)
		}
	}
	undo(2, false, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
	holder(2)
}

// TestWaitersOfTheHoldersLeaseAreTold: requests of one lease wait for a lock. All have it when the lease acquires it, whichever is
// first; the first may be that of a connection that has broken, and the second its repetition.
func TestWaitersOfTheHoldersLeaseAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := mustOpen(t, vfs.NewMem(), Options{})
		defer h.stop()
		h.mustGrant(1, time.Hour)
		h.mustGrant(2, time.Hour)
		token := h.mustAcquire(1, "")
		tokens := make(chan keys.Epoch, 20)
		for range cap(tokens) {
			go func() {
				held, err := h.Acquire(context.Background(), NewAttempt(), lock, 2, nil, true)
				if err != nil {
					t.Error(err)
				}
				tokens <- held.Token
			}()
			synctest.Wait()
		}
		if _, _, err := h.Release(context.Background(), lock, token); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if len(tokens) != cap(tokens) {
			t.Errorf("%d of %d requests of the lease that holds the lock are answered", len(tokens), cap(tokens))
		}
		if held, _, err := h.Holder(context.Background(), lock); err != nil || held.Lease != 2 {
			t.Fatalf("%+v, %v", held, err)
		}
		if err := h.Revoke(context.Background(), 2); err != nil { // ends those that still wait
			t.Fatal(err)
		}
	})
}

// TestAttemptThatWasToldTheTokenIsNotForgottenByACrash: the second attempt of a lease is told the token of the lock that the first one
// has acquired. After a crash at that moment, to undo the first one does not release what the second one has.
func TestAttemptThatWasToldTheTokenIsNotForgottenByACrash(t *testing.T) {
	fs := vfs.NewMem()
	h := mustOpen(t, fs, Options{})
	h.mustGrant(1, time.Hour)
	for attempt := uint64(1); attempt <= 2; attempt++ {
		held, err := h.Acquire(context.Background(), attempt, lock, 1, nil, false)
		if err == nil {
			err = h.store.Wait(context.Background(), held.Await, mvcc.DurabilitySync)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	crashed := fs.Crash(1, vfs.SurviveNone)
	h.stop()
	h = mustOpen(t, crashed, Options{})
	defer h.stop()
	if released, _, err := h.Undo(context.Background(), lock, 1, []uint64{1}); err != nil || released {
		t.Errorf("the lock of attempt 2 is released with attempt 1: %v, %v", released, err)
	}
	h.checkRecords()
}

// TestAttemptsOfOtherLeasesAreNotUndone: numbers of attempts are those of a lease.
func TestAttemptsOfOtherLeasesAreNotUndone(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	if _, _, err := h.Undo(context.Background(), []byte("other"), 2, []uint64{1}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Acquire(context.Background(), 1, lock, 1, nil, false); err != nil {
		t.Errorf("attempt 1 of lease 1, after attempt 1 of lease 2 was undone: %v", err)
	}
}

// TestUndoBesideAcquireLeavesNoLock runs both at once, tens of thousands of times.
func TestUndoBesideAcquireLeavesNoLock(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	const callers = 8
	rounds := 25_000 / callers
	if testseed.RaceDetector == 1 {
		rounds /= 10
	}
	var all sync.WaitGroup
	for n := range callers {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(n)))
			id, name := ID(n+1), fmt.Appendf(nil, "lock %d", n%3)
			if err := h.grant(id, time.Hour); err != nil {
				t.Error(err)
				return
			}
			for range rounds {
				attempt := NewAttempt()
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan error, 1)
				go func() {
					_, err := h.Acquire(ctx, attempt, name, id, nil, true)
					done <- err
				}()
				if pause := rng.IntN(4); pause > 0 {
					time.Sleep(time.Duration(rng.IntN(50)) * time.Microsecond)
				}
				cancel()
				if _, _, err := h.Undo(context.Background(), name, id, []uint64{attempt}); err != nil {
					t.Error(err)
				}
				if err := <-done; err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, ErrUndone) {
					t.Error(err)
				}
				if held, _, err := h.Holder(context.Background(), name); err != nil || held.Lease == id {
					t.Errorf("the lock is held with token %d after the attempt was undone: %v", held.Token, err)
					return
				}
			}
		})
	}
	all.Wait()
	h.checkRecords()
}

// TestChangeOfALockWakesOnlyWhatItConcerns: a change of holder costs no read for each observer, and no look for each waiter.
func TestChangeOfALockWakesOnlyWhatItConcerns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := storeOptions(vfs.NewMem())
		o.Limits.Sessions = 8
		h, err := tryOpenStore(t, o, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer h.stop()
		ctx, leave := context.WithCancel(context.Background())
		name := []byte("l")
		const waiters, observers = 100, 200
		for id := ID(1); id <= waiters; id++ {
			h.mustGrant(id, time.Hour)
		}
		first, err := h.Acquire(ctx, 1, name, 1, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		seen := make([]keys.Epoch, observers)
		for i := range observers {
			all.Go(func() {
				err := h.Observe(ctx, name, func(held Held, _ keys.Epoch) error {
					seen[i] = held.Token
					return nil
				})
				if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		tokens := make(chan keys.Epoch, waiters)
		for id := ID(2); id <= waiters; id++ {
			all.Go(func() {
				held, err := h.Acquire(ctx, NewAttempt(), name, id, nil, true)
				if err != nil {
					t.Error(err)
				}
				tokens <- held.Token
			})
			synctest.Wait()
		}
		looks, token := h.counters.looks.Load(), first.Token
		for range waiters - 1 {
			if _, _, err := h.Release(ctx, name, token); err != nil {
				t.Fatal(err)
			}
			token = <-tokens
			synctest.Wait()
			for i := range seen {
				if seen[i] != token {
					t.Fatalf("observer %d has seen the token %d, the holder has %d", i, seen[i], token)
				}
			}
		}
		if n := h.counters.looks.Load() - looks; n > waiters {
			t.Errorf("%d looks for %d changes", n, waiters-1)
		}
		if err := h.store.Wait(context.Background(), token, mvcc.DurabilitySync); err != nil {
			t.Fatal(err)
		}
		leave()
		all.Wait()
	})
}
