package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

var lock = []byte("lock")

// fenced sets a key if the lock is held with a token.
func (h *harness) fenced(key, value string, token keys.Epoch) error {
	return h.write(func(w *mvcc.Write) {
		w.Conditions = append(w.Conditions, mvcc.Condition{Kind: mvcc.LockHeld, Key: lock, Epoch: token})
		w.Set([]byte(key), []byte(value))
	})
}

func (h *harness) mustAcquire(id ID, value string) keys.Epoch {
	h.t.Helper()
	held, err := h.Acquire(context.Background(), NewAttempt(), lock, id, []byte(value), false)
	if err != nil || held.Lease != id || held.Token == 0 {
		h.t.Fatalf("%+v, %v", held, err)
	}
	return held.Token
}

func TestLockHasOneHolderAndItsTokenFencesWrites(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	h.mustGrant(2, time.Hour)
	first := h.mustAcquire(1, "one")
	if again := h.mustAcquire(1, "other"); again != first {
		t.Errorf("the second acquisition with the same lease has token %d, the first %d", again, first)
	}
	if held, err := h.Acquire(context.Background(), NewAttempt(), lock, 2, nil, false); !errors.Is(err, ErrHeld) || held.Lease != 1 || held.Token != first {
		t.Errorf("%+v, %v", held, err)
	}
	if held, _, err := h.Holder(context.Background(), lock); err != nil || held.Lease != 1 || string(held.Value) != "one" {
		t.Errorf("%+v, %v", held, err)
	}
	if err := h.fenced("k", "1", first); err != nil {
		t.Error(err)
	}
	if released, _, err := h.Release(context.Background(), lock, first+1); err != nil || released {
		t.Errorf("released with a wrong token: %v, %v", released, err)
	}
	if err := h.Revoke(context.Background(), 1); err != nil {
		t.Fatal(err)
	}
	second := h.mustAcquire(2, "two")
	if second <= first {
		t.Errorf("token %d after %d", second, first)
	}
	for _, token := range []keys.Epoch{first, first + 1, second - 1, second + 1, 0} {
		var refused *mvcc.PreconditionError
		if err := h.fenced("k", "late", token); !errors.As(err, &refused) || refused.Condition.Kind != mvcc.LockHeld {
			t.Errorf("a write with token %d, which the holder does not have: %v", token, err)
		}
	}
	if err := h.fenced("k", "2", second); err != nil {
		t.Error(err)
	}
	if released, _, err := h.Release(context.Background(), lock, second); err != nil || !released {
		t.Errorf("%v, %v", released, err)
	}
	if err := h.fenced("k", "late", second); err == nil {
		t.Error("a write with the token of a lock that was released")
	}
	h.checkRecords()
}

func TestFenceIsCheckedInATransaction(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	token := h.mustAcquire(1, "")
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	for _, c := range []struct {
		token keys.Epoch
		holds bool
	}{{token, true}, {token + 1, false}} {
		w := &mvcc.Write{Conditions: []mvcc.Condition{{Kind: mvcc.LockHeld, Key: lock, Epoch: c.token}}}
		out, err := x.Execute(context.Background(), &mvcc.Execution{
			Write: w, Otherwise: true,
			Operate: func(_ context.Context, txn *mvcc.Txn, _ bool) error { return txn.Set([]byte("k"), nil) },
		})
		if err != nil || out.Holds != c.holds {
			t.Errorf("token %d: %+v, %v", c.token, out, err)
		}
	}
	// The lock is lost between the evaluation and the commit.
	w := &mvcc.Write{Conditions: []mvcc.Condition{{Kind: mvcc.LockHeld, Key: lock, Epoch: token}}}
	attempts := 0
	out, err := x.Execute(context.Background(), &mvcc.Execution{
		Write: w, Otherwise: true,
		Operate: func(_ context.Context, txn *mvcc.Txn, holds bool) error {
			if attempts++; attempts == 1 {
				if err := h.Revoke(context.Background(), 1); err != nil {
					return err
				}
			}
			return txn.Set([]byte("held"), strconv.AppendBool(nil, holds))
		},
	})
	if err != nil || out.Holds || attempts < 2 {
		t.Fatalf("%+v after %d attempts, %v", out, attempts, err)
	}
}

func TestWaitersAcquireInTheirOrderAndLeaveTheirPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := mustOpen(t, vfs.NewMem(), Options{Waiters: 5})
		defer h.stop()
		for id := ID(1); id <= 6; id++ {
			h.mustGrant(id, time.Hour)
		}
		token := h.mustAcquire(1, "")
		type outcome struct {
			id   ID
			held Held
			err  error
		}
		done := make(chan outcome, 10)
		gone, leave := context.WithCancel(context.Background())
		for id := ID(2); id <= 6; id++ {
			ctx := context.Background()
			if id == 3 {
				ctx = gone
			}
			go func() {
				held, err := h.Acquire(ctx, NewAttempt(), lock, id, nil, true)
				done <- outcome{id, held, err}
			}()
			synctest.Wait()
		}
		if _, err := h.Acquire(context.Background(), NewAttempt(), lock, 2, nil, true); !errors.Is(err, ErrWaiters) {
			t.Errorf("one waiter more than the limit: %v", err)
		}
		leave()
		if o := <-done; o.id != 3 || !errors.Is(o.err, context.Canceled) {
			t.Fatalf("%+v", o)
		}
		if again := h.mustAcquire(1, ""); again != token { // while others wait
			t.Errorf("token %d, before %d", again, token)
		}
		if err := h.Revoke(context.Background(), 4); err != nil {
			t.Fatal(err)
		}
		if o := <-done; o.id != 4 || !errors.Is(o.err, ErrNotFound) {
			t.Fatalf("a waiter whose lease has ended: %+v", o)
		}
		for _, want := range []ID{2, 5, 6} {
			if released, _, err := h.Release(context.Background(), lock, token); !released || err != nil {
				t.Fatal(err)
			}
			o := <-done
			if o.id != want || o.err != nil || o.held.Token <= token {
				t.Fatalf("%+v after token %d, want lease %d", o, token, want)
			}
			token = o.held.Token
		}
		if s := h.Stats(); s.Waiters != 0 || len(h.locks.queues) != 0 {
			t.Errorf("%d waiters and %d queues are left", s.Waiters, len(h.locks.queues))
		}
	})
}

func TestObserversSeeTheNewestHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := mustOpen(t, vfs.NewMem(), Options{})
		defer h.stop()
		h.mustGrant(1, time.Hour)
		h.mustGrant(2, 10*time.Second)
		ctx, stop := context.WithCancel(context.Background())
		seen := make(chan Held, 10)
		go func() {
			_ = h.Observe(ctx, lock, func(held Held, _ keys.Epoch) error { seen <- held; return nil })
			close(seen)
		}()
		if held := <-seen; held.Token != 0 {
			t.Fatalf("%+v", held)
		}
		token := h.mustAcquire(1, "one")
		if held := <-seen; held.Token != token || string(held.Value) != "one" {
			t.Fatalf("%+v", held)
		}
		if _, _, err := h.Release(context.Background(), lock, token); err != nil {
			t.Fatal(err)
		}
		if held := <-seen; held.Token != 0 {
			t.Fatalf("%+v", held)
		}
		h.mustAcquire(2, "two")
		if held := <-seen; held.Lease != 2 {
			t.Fatalf("%+v", held)
		}
		if held := <-seen; held.Token != 0 { // after 10 s
			t.Fatalf("%+v", held)
		}
		stop()
		for held := range seen {
			t.Errorf("%+v", held)
		}
	})
}

// TestFencedIncrementsOfManyHoldersAreExact has holders that lose their leases at any time and go on as if they had not:
// no fenced write of theirs may come between those of the next holder.
func TestFencedIncrementsOfManyHoldersAreExact(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	seed := uint64(time.Now().UnixNano())
	ctx, stop := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer stop()
	var holders sync.WaitGroup
	for i := range 4 {
		holders.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for round := 1; ctx.Err() == nil; round++ {
				id := ID(round*10 + i)
				h.mustGrant(id, time.Hour)
				held, err := h.Acquire(ctx, NewAttempt(), lock, id, nil, true)
				if err != nil {
					continue
				}
				stolen := rng.IntN(2) == 0
				var thief sync.WaitGroup
				if stolen {
					thief.Go(func() {
						time.Sleep(time.Duration(rng.IntN(int(time.Millisecond))))
						_ = h.Revoke(context.Background(), id)
					})
				}
				for n := 1; n <= 5; n++ {
					err := h.fenced("k", fmt.Sprintf("%d %d", held.Token, n), held.Token)
					if err != nil && !stolen {
						t.Errorf("seed %d: the holder's write is refused: %v", seed, err)
					}
				}
				thief.Wait()
				if _, _, err := h.Release(context.Background(), lock, held.Token); err != nil {
					t.Error(err)
				}
			}
		})
	}
	h.checkTokens(ctx, "k")
	holders.Wait()
	h.checkRecords()
}

// checkTokens reads a key until ctx ends: its token must never go back.
func (h *harness) checkTokens(ctx context.Context, key string) {
	x, err := h.store.Session()
	if err != nil {
		h.t.Fatal(err)
	}
	defer x.Close()
	for last := 0; ctx.Err() == nil; {
		v, err := x.Get(nil, []byte(key), 0)
		if err != nil {
			h.t.Fatal(err)
		}
		if !v.Found {
			continue
		}
		var token, n int
		if _, err := fmt.Sscan(string(v.Data), &token, &n); err != nil {
			h.t.Fatal(err)
		}
		if token < last {
			h.t.Fatalf("a write with token %d after one with %d", token, last)
		}
		last = token
	}
}

// TestAListOfLocksHasABoundInBytes: of the values as well as of the names, and the next list goes on after it.
func TestAListOfLocksHasABoundInBytes(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	value := make([]byte, 1024)
	const count, long = 700, 1200
	name := func(i int) []byte { return fmt.Appendf(nil, "%0*d", long, i) }
	for i := range count {
		if _, err := h.Acquire(t.Context(), NewAttempt(), name(i), 1, value, false); err != nil {
			t.Fatal(err)
		}
	}
	var after []byte
	seen, lists := 0, 0
	for more := true; more; lists++ {
		found, left, _, err := h.ListLocks(t.Context(), after, nil, 1000)
		if err != nil || len(found) == 0 || (len(found)-1)*(long+len(value)) >= keysBytesMax {
			t.Fatalf("%d locks in a list: %v", len(found), err)
		}
		for _, l := range found {
			if !bytes.Equal(l.Name, name(seen)) || len(l.Held.Value) != len(value) {
				t.Errorf("lock %d is %s, with %d bytes", seen, l.Name, len(l.Held.Value))
			}
			seen++
		}
		more, after = left, append(found[len(found)-1].Name, 0)
	}
	if seen != count || lists != 2 {
		t.Errorf("%d locks in %d lists", seen, lists)
	}
}

// TestAListOfLocksCopiesNoNamesThatItDoesNotHave: requests may wait for very many locks with long names.
func TestAListOfLocksCopiesNoNamesThatItDoesNotHave(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	const waiting, nameBytes = 1000, 2000
	for i := range waiting {
		name := append(make([]byte, nameBytes), fmt.Sprintf("%04d", i)...)
		w, err := h.locks.wait("", name, attempt{lease: 1, number: 1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.locks.leave(name, w) })
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	found, more, _, err := h.ListLocks(t.Context(), nil, nil, 2)
	runtime.ReadMemStats(&after)
	if err != nil || len(found) != 2 || !more || found[0].Waiters != 1 {
		t.Fatal(found, more, err)
	}
	if took := after.TotalAlloc - before.TotalAlloc; took > waiting*nameBytes/4 {
		t.Errorf("a list of 2 locks took %d bytes, where requests wait for %d with %d bytes of names", took, waiting, waiting*nameBytes)
	}
}

// TestAListOfLocksLetsOthersRun, however many locks it has: what is in memory is read without a wait.
func TestAListOfLocksLetsOthersRun(t *testing.T) {
	const count = 3 * keysPerTurn
	yields := 0
	h := openAlone(t, Options{yield: func() { yields++ }})
	h.mustGrant(1, time.Hour)
	for i := range count {
		if _, err := h.Acquire(t.Context(), NewAttempt(), fmt.Append(nil, i), 1, nil, false); err != nil {
			t.Fatal(err)
		}
	}
	yields = 0
	if found, _, _, err := h.ListLocks(t.Context(), nil, nil, count); err != nil || len(found) != count || yields != count/keysPerTurn {
		t.Errorf("%d locks, of %d, and others ran %d times: %v", len(found), count, yields, err)
	}
}

// TestThatALockIsFreeIsToldOnceItsReleaseIsDurable: another request is before this one in the queue, so it gets no lock, and learns that nothing holds it.
func TestThatALockIsFreeIsToldOnceItsReleaseIsDurable(t *testing.T) {
	h, ctx, name := openAlone(t, Options{}), context.Background(), []byte("lock")
	h.mustGrant(1, time.Hour)
	h.mustGrant(2, time.Hour)
	held, err := h.Acquire(ctx, NewAttempt(), name, 1, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	first, err := h.locks.wait("", name, attempt{1, NewAttempt()})
	if err != nil {
		t.Fatal(err)
	}
	defer h.locks.leave(name, first)
	released, epoch, err := h.Release(ctx, name, held.Token)
	if err != nil || !released {
		t.Fatal(released, err)
	}
	held, err = h.Acquire(ctx, NewAttempt(), name, 2, nil, false)
	if !errors.Is(err, ErrHeld) || held.Token != 0 || held.Await < epoch {
		t.Errorf("%+v, %v; the lock was released in epoch %d", held, err, epoch)
	}
}
