package lease

import (
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// waitingTable is a table with waiters for one lock: two of lease 2, and all others of lease 1.
func waitingTable(t *testing.T, waiters int) (table *lockTable, last *lockWaiter) {
	t.Helper()
	table = &lockTable{queues: map[string]*lockQueue{}, max: waiters + 1}
	for i := range waiters {
		a := attempt{1, uint64(i + 1)}
		if i < 2 {
			a.lease = 2
		}
		w, err := table.wait(lock, a)
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
			*last, _ = table.wait(lock, attempt{1, 1 << 62})
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
		w, err := table.wait(lock, attempt{1, 3})
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
