package lease

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// waitingTable is a table with waiters for one lock: two of lease 2, and all others of lease 1.
func waitingTable(t *testing.T, waiters int) (table *lockTable, last *lockWaiter) {
	t.Helper()
	table = &lockTable{queues: map[string]*lockQueue{}, clients: map[string]int{}, max: waiters + 1}
	for i := range waiters {
		a := attempt{1, uint64(i + 1)}
		if i < 2 {
			a.lease = 2
		}
		w, err := table.wait("", lock, a)
		if err != nil {
			t.Fatal(err)
		}
		last = w
	}
	return table, last
}

// TestWhatWaitsForALockCostsOthersNothing: all locks have one mutex, and an undone attempt, a waiter that leaves, and a new holder concern few
// of the waiters.
func TestWhatWaitsForALockCostsOthersNothing(t *testing.T) {
	const few, many, times, more = 20, 20_000, 30, 20
	var unknown [UndoMax]uint64
	for i := range unknown {
		unknown[i] = 1<<63 + uint64(i)
	}
	for name, do := range map[string]func(table *lockTable, last **lockWaiter, n int){
		"undo": func(table *lockTable, _ **lockWaiter, _ int) { table.undo(lock, 1, unknown[:]) },
		"leave": func(table *lockTable, last **lockWaiter, _ int) {
			table.leave(lock, *last)
			*last, _ = table.wait("", lock, attempt{1, 1 << 62})
		},
		"changed": func(table *lockTable, _ **lockWaiter, n int) {
			table.changed(lock, Held{Token: keys.Epoch(n), Lease: 2}, keys.Epoch(n))
		},
	} {
		least := map[int]time.Duration{}
		for _, waiters := range []int{few, many} {
			table, last := waitingTable(t, waiters)
			for n := range times {
				began := time.Now()
				do(table, &last, n+1)
				if took := time.Since(began); n == 0 || took < least[waiters] {
					least[waiters] = took
				}
			}
		}
		if least[many] > more*max(least[few], time.Microsecond) {
			t.Errorf("%s: %v with %d waiters, %v with %d", name, least[many], many, least[few], few)
		}
	}
}

// TestWaitersOfAnUndoneAttemptAreWoken: all that have its number, and no others, even if it is forgotten before they look.
func TestWaitersOfAnUndoneAttemptAreWoken(t *testing.T) {
	table, _ := waitingTable(t, 5)
	var same []*lockWaiter
	for range 2 {
		w, err := table.wait("", lock, attempt{1, 3})
		if err != nil {
			t.Fatal(err)
		}
		same, table.max = append(same, w), table.max+1
	}
	table.undo([]byte("other"), 1, []uint64{4})
	table.undo(lock, 1, []uint64{1, 3, 5})
	for n := range uint64(undoneMax) {
		table.rememberLocked(attempt{9, n})
	}
	for at := table.queues[string(lock)].waiters.Front(); at != nil; at = at.Next() {
		w := waiterAt(at)
		want := w.attempt == attempt{1, 3} || w.attempt == attempt{1, 5}
		if (len(w.look) > 0) != want || table.isUndone(w) != want {
			t.Errorf("%v: woken %v, undone %v", w.attempt, len(w.look) > 0, table.isUndone(w))
		}
	}
	for _, w := range same {
		table.leave(lock, w)
	}
	if n := table.queues[string(lock)].waiters.Len(); n != 5 {
		t.Errorf("%d wait", n)
	}
}

type clientKey struct{}

// clientIn is the client of a context; none if it has none.
func clientIn(ctx context.Context) string {
	name, _ := ctx.Value(clientKey{}).(string)
	return name
}

// TestAClientLeavesPlacesToWaitForLocksToOthers: as many as it has, and one to each client while there are any.
func TestAClientLeavesPlacesToWaitForLocksToOthers(t *testing.T) {
	const places = 8
	h := mustOpen(t, vfs.NewMem(), Options{Waiters: places, Client: clientIn})
	defer h.stop()
	var all []*lockWaiter
	for round, share := range []int{4, 2, 1, 1, 0} { // of each client, one after the other
		client := string(rune('a' + round))
		for has := 0; ; has++ {
			enter := func() (*lockWaiter, error) { return h.locks.wait(client, lock, attempt{1, uint64(has)}) }
			if has%2 == 1 {
				enter = func() (*lockWaiter, error) { return h.locks.observe(client, lock) }
			}
			w, err := enter()
			if err != nil {
				if has != share || !errors.Is(err, ErrWaiters) {
					t.Errorf("client %s has %d places, want %d: %v", client, has, share, err)
				}
				break
			}
			all = append(all, w)
		}
	}
	ctx := context.WithValue(t.Context(), clientKey{}, "e")
	h.mustGrant(1, time.Hour)
	h.mustGrant(2, time.Hour)
	acquire := func(name string, id ID, wait bool, want ID, wantErr error) {
		t.Helper()
		if held, err := h.Acquire(ctx, NewAttempt(), []byte(name), id, nil, wait); held.Lease != want || !errors.Is(err, wantErr) {
			t.Errorf("lease %d acquires %s: held by %d, %v; want %d, %v", id, name, held.Lease, err, want, wantErr)
		}
	}
	acquire("free", 1, true, 1, nil) // needs no place
	acquire("free", 1, true, 1, nil)
	acquire("free", 2, true, 0, ErrWaiters)
	acquire("free", 2, false, 1, ErrHeld)
	acquire(string(lock), 2, false, 0, ErrHeld) // others wait for their turn
	acquire(string(lock), 2, true, 0, ErrWaiters)
	if err := h.Observe(ctx, lock, nil); !errors.Is(err, ErrWaiters) {
		t.Errorf("observed without a place: %v", err)
	}
	for _, w := range all {
		h.locks.leave(lock, w)
	}
	acquire(string(lock), 2, true, 2, nil)
	if h.locks.count+len(h.locks.clients)+len(h.locks.queues) != 0 {
		t.Errorf("%d places are taken, by %v", h.locks.count, h.locks.clients)
	}
}
