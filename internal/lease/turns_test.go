package lease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// openAlone opens leases without the goroutine that ends them.
func openAlone(t *testing.T, o Options) *harness {
	t.Helper()
	store, err := mvcc.Open(storeOptions(vfs.NewMem()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	m, err := Open(context.Background(), store, o)
	if err != nil {
		t.Fatal(err)
	}
	return &harness{Manager: m, t: t, store: store}
}

// TestRecordsOfLongLeasesHoldFewLatches: puts wait for the latches of each commit.
func TestRecordsOfLongLeasesHoldFewLatches(t *testing.T) {
	const count = 2*longStepKeys + 1
	clock, o := fakeClock()
	h := openAlone(t, o)
	for id := range ID(count) {
		h.mustGrant(1+id, 2*recordFrom)
	}
	clock.Store(int64(recordEvery + time.Second))
	before := h.store.Visible()
	h.record(context.Background())
	if commits := h.store.Visible() - before; commits != 3 {
		t.Errorf("%d leases were recorded in %d commits", count, commits)
	}
}

// TestALeaseWithManyKeysDoesNotKeepOthers: both are due at once, and the one with many keys is first. A few of them are deleted, and then the other
// lease ends.
func TestALeaseWithManyKeysDoesNotKeepOthers(t *testing.T) {
	const count, step = 30, 3
	clock, o := fakeClock()
	o.StepKeys = step
	h, ctx := openAlone(t, o), context.Background()
	h.turnTime = 0 // each has one commit
	h.mustGrant(1, time.Second)
	h.mustGrant(2, 2*time.Second)
	key := func(i int) string { return fmt.Sprintf("k%02d", i) }
	for i := range count {
		h.mustPut(key(i), "", 1)
	}
	h.mustPut("other", "", 2)
	left := func() (n int) {
		for i := range count {
			if h.found(key(i)) {
				n++
			}
		}
		return n
	}
	clock.Store(int64(time.Minute))
	h.revokeDue(ctx)
	h.revokeDue(ctx)
	if _, err := h.Lease(t.Context(), 2); !errors.Is(err, ErrNotFound) || h.found("other") {
		t.Errorf("the other lease lives on: %v", err)
	}
	if n := left(); n != count-step {
		t.Errorf("%d of %d keys are left after its turn, want %d", n, count, count-step)
	}
	turns := 1 // of the long one
	for _, err := h.Lease(t.Context(), 1); err == nil && turns <= count; _, err = h.Lease(t.Context(), 1) {
		h.revokeDue(ctx)
		turns++
	}
	if n := left(); n != 0 || turns != count/step {
		t.Errorf("%d keys are left after %d turns", n, turns)
	}
	h.checkRecords()
}

// openClients opens leases of clients, without the goroutine that ends them, and with a clock that never stands still.
func openClients(t *testing.T) (h *harness, clock *atomic.Int64) {
	t.Helper()
	clock = new(atomic.Int64)
	return openAlone(t, Options{Client: clientIn, Elapsed: func() time.Duration { return time.Duration(clock.Add(1)) }}), clock
}

func (h *harness) grantTo(client string, ttl time.Duration, ids ...ID) {
	h.t.Helper()
	for _, id := range ids {
		if _, _, err := h.Grant(asClient(client), id, ttl, client); err != nil {
			h.t.Fatal(err)
		}
	}
}

func asClient(client string) context.Context {
	return context.WithValue(context.Background(), clientKey{}, client)
}

// ends are the leases that n more turns with one commit each end, in order.
func (h *harness) ends(n int) (ended []ID) {
	h.turnTime = 0
	before := h.ids()
	for range n {
		h.revokeDue(context.Background())
		left := h.ids()
		for _, id := range before {
			if !slices.Contains(left, id) {
				ended = append(ended, id)
			}
		}
		before = left
	}
	return ended
}

// checkNothingLeft checks that nothing of a lease is in memory.
func (h *harness) checkNothingLeft() {
	h.t.Helper()
	if n := len(h.lines.all) + len(h.lines.turns) + len(h.tried) + len(h.busy) + len(h.leases); n != 0 {
		h.t.Errorf("%d lines, %d turns, %d tried and %d busy of %d leases", len(h.lines.all), len(h.lines.turns), len(h.tried), len(h.busy), len(h.leases))
	}
}

// TestLeasesOfClientsEndInTurn: those of one client are due before all others.
func TestLeasesOfClientsEndInTurn(t *testing.T) {
	h, clock := openClients(t)
	h.grantTo("a", 2*time.Second, 12, 13, 14, 15)
	h.grantTo("a", time.Second, 10, 11)
	h.grantTo("b", 3*time.Second, 20, 21)
	h.grantTo("c", 4*time.Second, 30)
	clock.Store(int64(time.Minute))
	if got, want := h.ends(9), []ID{10, 20, 30, 11, 21, 12, 13, 14, 15}; !slices.Equal(got, want) {
		t.Errorf("leases end in the order %d, want %d", got, want)
	}
	h.checkNothingLeft()
}

// TestALeaseThatBecomesDueHasATurnAtOnce, while another client has had many.
func TestALeaseThatBecomesDueHasATurnAtOnce(t *testing.T) {
	h, clock := openClients(t)
	h.grantTo("a", time.Second, 10, 11, 12, 13, 14, 15)
	h.grantTo("b", time.Hour, 20)
	clock.Store(int64(time.Minute))
	h.ends(3)
	clock.Store(int64(2 * time.Hour))
	if got := h.ends(2); len(got) != 2 || got[1] != 20 {
		t.Errorf("leases %d end, want that of the other client", got)
	}
}

// TestALeaseIsOfTheClientThatKeepsItAlive, of the one that granted it before, and of none after a restart.
func TestALeaseIsOfTheClientThatKeepsItAlive(t *testing.T) {
	h, clock := openClients(t)
	h.grantTo("a", 10*time.Second, 10, 11, 12, 13, 14, 15)
	h.mu.Lock()
	for id := ID(20); id <= 23; id++ {
		h.enter(id, &record{ttl: 10 * time.Second}) // as after a restart
	}
	h.mu.Unlock()
	all := []uint64{12, 20, 21}
	ttls := make([]time.Duration, len(all))
	clock.Store(int64(time.Second))
	if err := h.KeepAliveAll(asClient("b"), all, ttls); err != nil || slices.Contains(ttls, 0) {
		t.Fatal(ttls, err)
	}
	if _, err := h.KeepAlive(asClient("c"), 13); err != nil {
		t.Fatal(err)
	}
	for id, client := range map[ID]string{11: "a", 12: "b", 13: "c", 20: "b", 21: "b", 22: ""} {
		if l := h.lines.all[h.clientNumber(asClient(client))]; l == nil || !slices.Contains(l.leases, h.leases[id]) {
			t.Errorf("lease %d is not that of client %q", id, client)
		}
	}
	clock.Store(int64(time.Minute))
	order := h.ends(13) // some find that the lease was kept alive
	if len(order) != 10 {
		t.Fatalf("leases %d end", order)
	}
	if last := slices.Index(order, 21); slices.Index(order, 15) < last || slices.Index(order, 13) > 6 {
		t.Errorf("leases end in the order %d", order)
	}
}

// TestARevocationThatIsAskedForComesFirstOfItsClient: a request waits for it.
func TestARevocationThatIsAskedForComesFirstOfItsClient(t *testing.T) {
	h, clock := openClients(t)
	h.grantTo("a", time.Second, 10, 11, 12, 13)
	h.grantTo("a", time.Hour, 14)
	clock.Store(int64(time.Minute))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := h.Revoke(ctx, 14); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if got, want := h.ends(5), []ID{14, 10, 11, 12, 13}; !slices.Equal(got, want) {
		t.Errorf("leases end in the order %d, want %d", got, want)
	}
}

// TestLeasesWithManyKeysEndBesideThoseOfOthers: each commit of one is a turn of its client.
func TestLeasesWithManyKeysEndBesideThoseOfOthers(t *testing.T) {
	h, clock := openClients(t)
	h.options.StepKeys = 2
	h.grantTo("a", time.Second, 10, 11)
	h.grantTo("b", 2*time.Second, 20, 21, 22)
	for i := range 8 {
		h.mustPut(fmt.Sprint("k", i), "", 10+ID(i/4))
	}
	clock.Store(int64(time.Minute))
	if got, want := h.ends(7), []ID{20, 21, 10, 22, 11}; !slices.Equal(got, want) {
		t.Errorf("leases end in the order %d, want %d", got, want)
	}
	h.checkNothingLeft()
	h.checkRecords()
}

// TestATurnLooksAtABoundedNumberOfLeases: all were kept alive since the time for which they are entered.
func TestATurnLooksAtABoundedNumberOfLeases(t *testing.T) {
	h, clock := openClients(t)
	const n = 3*turnMax + 1
	h.mu.Lock()
	for id := range ID(n) {
		h.enter(1+id, &record{ttl: time.Second})
		h.leases[1+id].deadline = time.Hour
	}
	h.mu.Unlock()
	h.turnTime = time.Hour
	clock.Store(int64(time.Minute))
	turns := 0
	for left, _ := h.untilDue(); left == 0 && turns <= n; left, _ = h.untilDue() {
		h.revokeDue(context.Background())
		turns++
	}
	if turns != 4 || h.Count() != n {
		t.Errorf("%d turns, %d leases are left", turns, h.Count())
	}
}
