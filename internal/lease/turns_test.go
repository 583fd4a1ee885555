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
	return h.endsNow(n)
}

// endsNow is ends with the time for a turn that is set.
func (h *harness) endsNow(n int) (ended []ID) {
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
	if n := len(h.lines.all) + len(h.lines.turns) + len(h.tried.leases) + len(h.tried.damaged) + len(h.busy) + len(h.leases); n != 0 {
		h.t.Errorf("%d lines, %d turns, %d tried and %d busy of %d leases", len(h.lines.all), len(h.lines.turns), len(h.tried.leases), len(h.busy), len(h.leases))
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
	const n = 3*turnMax*passedMax + 1
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

// keepOver grants leases to a client, and keeps them alive, so that they are entered for a time an hour from now, and end two hours from now.
func (h *harness) keepOver(clock *atomic.Int64, client string, ids []uint64) {
	h.t.Helper()
	for _, id := range ids {
		h.grantTo(client, time.Hour, ID(id))
	}
	clock.Add(int64(time.Hour - time.Second))
	ttls := make([]time.Duration, len(ids))
	if err := h.KeepAliveAll(asClient(client), ids, ttls); err != nil || slices.Contains(ttls, 0) {
		h.t.Fatal(ttls, err)
	}
}

func idsFrom(from ID, n int) (ids []uint64) {
	for i := range n {
		ids = append(ids, uint64(from)+uint64(i))
	}
	return ids
}

// TestLeasesThatWereKeptAliveTakeNoTurns of their client.
func TestLeasesThatWereKeptAliveTakeNoTurns(t *testing.T) {
	h, clock := openClients(t)
	h.grantTo("a", time.Second, 10, 11, 12, 13, 14, 15)
	h.grantTo("b", time.Hour+time.Second, 20)
	h.keepOver(clock, "b", idsFrom(100, 20))
	h.ends(3)
	clock.Add(int64(time.Minute))
	if got, want := h.ends(2), []ID{13, 20}; !slices.Equal(got, want) {
		t.Errorf("leases %d end, want %d", got, want)
	}
}

// TestTheLagIsThatOfLeasesThatHaveEnded: of those that wait after others that were kept alive, and of those that are tried again.
func TestTheLagIsThatOfLeasesThatHaveEnded(t *testing.T) {
	h, clock := openClients(t)
	h.keepOver(clock, "b", idsFrom(100, 3*passedMax))
	clock.Add(int64(time.Minute))
	if lag := h.Stats().Lag; lag != 0 {
		t.Errorf("%v while all leases are alive", lag)
	}
	h, clock = openClients(t)
	h.grantTo("b", time.Hour+time.Second, 20, 21)
	h.keepOver(clock, "b", idsFrom(100, 3*passedMax))
	clock.Add(int64(time.Minute))
	check := func() {
		t.Helper()
		if lag := h.Stats().Lag.Round(time.Second); lag != 58*time.Second {
			t.Errorf("%v, want 58 s", lag)
		}
	}
	check()
	for range 2 {
		var e *entry
		for due := true; due && e == nil; {
			e, due = h.takeDue()
		}
		h.busy = nil
		h.again(e, errors.New("the disk is full"))
	}
	if len(h.tried.leases) != 2 || h.Damage().Stuck != 0 {
		t.Errorf("%d are tried again, %+v", len(h.tried.leases), h.Damage())
	}
	check()
	clock.Add(int64(time.Second))
	h.ends(2)
	if len(h.tried.leases) != 0 || h.Stats().Lag != 0 {
		t.Errorf("%d are tried again, and the lag is %v", len(h.tried.leases), h.Stats().Lag)
	}
}

// TestATurnIsATime: leases of one key do not wait for one of many keys each time.
func TestATurnIsATime(t *testing.T) {
	var (
		h     *harness
		clock atomic.Int64
	)
	h = openAlone(t, Options{Client: clientIn, Elapsed: func() time.Duration { // each key that is deleted takes a nanosecond
		if h == nil {
			return 0
		}
		return time.Duration(uint64(clock.Load()) + h.counters.deleted.Load())
	}})
	h.grantTo("a", time.Second, 1, 2, 3)
	h.grantTo("b", 2*time.Second, 10, 11, 12, 13, 14, 15, 16)
	for id := range ID(4) {
		for i := range 20 {
			h.mustPut(fmt.Sprint("k", id, i), "", id)
		}
	}
	for id := range ID(7) {
		h.mustPut(fmt.Sprint("b", id), "", 10+id)
	}
	clock.Store(int64(time.Minute))
	h.turnTime = 3 * turnsAtOnce // less than a commit takes, so that each is waited for
	clients := ""
	for _, id := range h.endsNow(10) {
		clients += string("ab"[id/10])
	}
	if want := "abbbabbbab"; clients != want {
		t.Errorf("leases of clients end in the order %s, want %s", clients, want)
	}
	h.checkNothingLeft()
}

// TestARevocationThatIsAskedForHasATurnOfItsClient: neither that of a client that had no lease comes before others that wait, nor that of one whose leases
// live on.
func TestARevocationThatIsAskedForHasATurnOfItsClient(t *testing.T) {
	h, clock := openClients(t)
	h.grantTo("a", time.Second, 10)
	h.grantTo("c", time.Hour, 30, 31)
	clock.Store(int64(time.Minute))
	h.grantTo("b", time.Hour, 20)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for _, id := range []ID{20, 31} {
		if err := h.Revoke(ctx, id); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	if got, want := h.ends(3), []ID{10, 20, 31}; !slices.Equal(got, want) {
		t.Errorf("leases end in the order %d, want %d", got, want)
	}
}
