package lease

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestKeptAliveLeaseLivesAndAbandonedLeaseEnds also lets the wall clock jump: it decides nothing.
func TestKeptAliveLeaseLivesAndAbandonedLeaseEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wall := time.Now()
		h := mustOpen(t, vfs.NewMem(), Options{Now: func() time.Time { return wall }})
		defer h.stop()
		const ttl = 10 * time.Second
		h.mustGrant(1, ttl)
		h.mustGrant(2, ttl)
		h.mustPut("kept", "", 1)
		h.mustPut("abandoned", "", 2)
		for i := range 20 {
			wall = wall.Add([]time.Duration{time.Hour, -25 * time.Hour, 24 * time.Hour}[i%3])
			time.Sleep(9 * time.Second)
			if left, err := h.KeepAlive(context.Background(), 1); err != nil || left != ttl {
				t.Fatalf("keep-alive %d: %v, %v", i, left, err)
			}
			if !h.found("kept") {
				t.Fatalf("the key of a lease that is kept alive is gone after %d keep-alives", i)
			}
			if got := h.found("abandoned"); got != (i == 0) { // 9 s, 18 s, ...
				t.Fatalf("after %d s the key of the abandoned lease: found %v", 9*(i+1), got)
			}
		}
		if _, err := h.KeepAlive(context.Background(), 2); !errors.Is(err, ErrNotFound) {
			t.Fatal(err)
		}
		time.Sleep(ttl + time.Second)
		if h.found("kept") || len(h.ids()) != 0 {
			t.Fatalf("leases %v are left", h.ids())
		}
		h.checkRecords()
	})
}

func TestLeaseEndsAtItsDeadlineAndNotBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := mustOpen(t, vfs.NewMem(), Options{})
		defer h.stop()
		for i := range 50 {
			h.mustGrant(ID(i+1), time.Duration(50-i)*time.Second)
			h.mustPut(fmt.Sprint("k", i), "", ID(i+1))
		}
		start := time.Now()
		for range 99 {
			time.Sleep(500 * time.Millisecond)
			synctest.Wait()
			for i := range 50 {
				due, now := time.Duration(50-i)*time.Second, time.Since(start)
				if found := h.found(fmt.Sprint("k", i)); !found && now < due-time.Second || found && now > due+time.Second {
					t.Fatalf("lease of %v after %v: key found %v", due, now, found)
				}
			}
		}
	})
}

// pass lets time pass for the leases of a harness, of which clock is the elapsed time: what is left is recorded in time, and
// what is due is revoked.
func (h *harness) pass(clock *atomic.Int64, d time.Duration) {
	for d > 0 {
		step := min(d, recordEvery)
		clock.Add(int64(step))
		h.turn(context.Background())
		h.record(context.Background())
		d -= step
	}
}

func fakeClock() (*atomic.Int64, Options) {
	clock := new(atomic.Int64)
	return clock, Options{Elapsed: func() time.Duration { return time.Duration(clock.Load()) }}
}

// TestLongLeaseEndsInTimeAfterRestarts keeps one lease alive and not the other one.
func TestLongLeaseEndsInTimeAfterRestarts(t *testing.T) {
	fs := vfs.NewMem()
	clock, o := fakeClock()
	h := mustOpen(t, fs, o)
	const ttl = time.Hour
	h.mustGrant(1, ttl)
	h.mustGrant(2, ttl)
	ended := time.Duration(0)
	for i := 0; ended == 0 && i < 20; i++ {
		h.pass(clock, 11*time.Minute)
		if _, err := h.KeepAlive(context.Background(), 1); err != nil {
			t.Fatal(err)
		}
		h.stop()
		h = mustOpen(t, fs, o)
		if _, err := h.Lease(t.Context(), 2); err != nil {
			ended = time.Duration(clock.Load())
		}
	}
	h.stop()
	if ended < ttl || ended > 2*ttl {
		t.Fatalf("a lease of %v ended after %v; restarts every 11 minutes must neither shorten it nor prolong it for ever", ttl, ended)
	}
}

// TestRecordedRemainderIsRemovedBeforeAKeepAliveIsAnswered crashes right after the answer.
func TestRecordedRemainderIsRemovedBeforeAKeepAliveIsAnswered(t *testing.T) {
	fs := vfs.NewMem()
	clock, o := fakeClock()
	h := mustOpen(t, fs, o)
	const ttl = time.Hour
	h.mustGrant(1, ttl)
	h.pass(clock, 58*time.Minute)
	if e, err := h.find(1); err != nil || !e.recorded {
		t.Fatalf("nothing is recorded, or %v", err)
	}
	if _, err := h.KeepAlive(context.Background(), 1); err != nil {
		t.Fatal(err)
	}
	crashed := fs.Crash(1, vfs.SurviveNone)
	h.stop()
	h = mustOpen(t, crashed, o)
	defer h.stop()
	if i, err := h.Lease(t.Context(), 1); err != nil || i.Remaining < ttl {
		t.Fatalf("%v left, %v; a keep-alive was answered just before", i.Remaining, err)
	}
}

// TestKeepAliveBesideARecordIsNotLost runs both at once.
func TestKeepAliveBesideARecordIsNotLost(t *testing.T) {
	fs := vfs.NewMem()
	clock, o := fakeClock()
	h := mustOpen(t, fs, o)
	defer func() { h.stop() }()
	const leases = 50
	for id := ID(1); id <= leases; id++ {
		h.mustGrant(id, time.Hour)
	}
	clock.Store(int64(50 * time.Minute))
	recorded := make(chan struct{})
	go func() {
		defer close(recorded)
		for range 20 {
			h.record(context.Background())
		}
	}()
	for id := ID(1); id <= leases; id++ {
		if _, err := h.KeepAlive(context.Background(), id); err != nil {
			t.Error(err)
		}
	}
	<-recorded
	h.stop()
	h = mustOpen(t, fs, Options{})
	all, _ := h.List(0, leases)
	for _, i := range all {
		if i.Remaining < time.Hour {
			t.Errorf("lease %d has %v after a restart, and was kept alive", i.ID, i.Remaining)
		}
	}
}

// TestAListOfLeasesHasThoseAfterAnID, in order, and says whether there are others.
func TestAListOfLeasesHasThoseAfterAnID(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	const leases = 50
	for id := ID(1); id <= leases; id++ {
		h.mustGrant(id, time.Hour)
	}
	for after := ID(0); after <= leases; after += 7 {
		for _, limit := range []int{1, 2, 7, leases - 1, leases, leases + 1} {
			list, more := h.List(after, limit)
			if want := min(limit, leases-int(after)); len(list) != want || more != (int(after)+want < leases) {
				t.Fatalf("%d leases after %d, of at most %d; more: %v", len(list), after, limit, more)
			}
			for i := range list {
				if list[i].ID != after+ID(i)+1 {
					t.Fatalf("after %d, of at most %d: number %d is %d", after, limit, i, list[i].ID)
				}
			}
		}
	}
}

// TestListsOfLeasesAreMadeOneAfterTheOther, because many at once keep a keep-alive waiting. One that waits ends with its request.
func TestListsOfLeasesAreMadeOneAfterTheOther(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	h.listing <- struct{}{} // of another list
	time.AfterFunc(time.Millisecond, cancel)
	if list, _, err := h.Manager.List(ctx, 0, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v beside another list", list, err)
	}
	<-h.listing
	if list, _, err := h.Manager.List(context.Background(), 0, 1); err != nil || len(list) != 1 {
		t.Errorf("%v, %v", list, err)
	}
	if list, _ := h.List(0, 1); len(list) != 1 {
		t.Error("the list before keeps others waiting")
	}
}

// TestAShortListOfLeasesTakesLittleMemory, however many leases there are.
func TestAShortListOfLeasesTakesLittleMemory(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	const leases, limit, most = 2000, 10, 8 << 10
	for id := ID(1); id <= leases; id++ {
		h.mustGrant(id, time.Hour)
	}
	least := uint64(math.MaxUint64) // other goroutines of the store allocate, too
	for range 10 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		h.List(0, limit)
		runtime.ReadMemStats(&after)
		least = min(least, after.TotalAlloc-before.TotalAlloc)
	}
	if least > most {
		t.Errorf("a list of %d of %d leases takes %d bytes, want at most %d", limit, leases, least, most)
	}
}

// TestAListOfLeasesLetsOthersChangeThem: between its parts. It has each lease that exists all the time, once, and none twice, in the order of ids.
func TestAListOfLeasesLetsOthersChangeThem(t *testing.T) {
	const leases, begun = 8 * leasesPerTurn, ID(1 << 32)
	o := Options{}
	var h *harness
	parts := 0
	o.yield = func() {
		if h == nil || len(h.listing) == 0 {
			return
		}
		if !h.mu.TryLock() {
			t.Error("nothing can change the leases between two parts of a list")
			return
		}
		defer h.mu.Unlock()
		for id := range ID(leases) { // each even lease ends and is granted anew, and others begin
			if id%2 == 0 && h.leases[id+1] != nil {
				delete(h.leases, id+1)
				h.leases[id+1] = &entry{id: id + 1, since: keys.Epoch(parts + 2)}
			}
		}
		for id := range ID(leases / 4) {
			h.leases[begun+ID(parts*leases)+id] = &entry{id: begun + ID(parts*leases) + id, since: 1}
		}
		parts++
	}
	h = openAlone(t, o)
	for id := range ID(leases) {
		h.leases[id+1] = &entry{id: id + 1, since: 1}
	}
	for _, limit := range []int{100, 2 * leases} {
		parts = 0
		list, _ := h.List(0, limit)
		if parts < leases/leasesPerTurn-1 {
			t.Errorf("a list of %d leases was made in %d parts", leases, parts)
		}
		if len(list) < min(limit, leases/2) || !slices.IsSortedFunc(list, func(x, y Info) int { return cmp.Compare(x.ID, y.ID) }) {
			t.Errorf("%d leases, or not in their order", len(list))
		}
		seen := map[ID]bool{}
		for _, i := range list {
			if seen[i.ID] {
				t.Fatalf("lease %d is there twice", i.ID)
			}
			seen[i.ID] = true
		}
		for id := ID(2); id <= ID(min(limit, leases)) && (limit > leases); id += 2 { // odd indexes stay all the time
			if !seen[id] {
				t.Fatalf("lease %d, which exists all the time, is not there", id)
			}
		}
	}
}

// TestListsOfLeasesRest for as long as they took, while the next one waits.
func TestListsOfLeasesRest(t *testing.T) {
	clock, o := fakeClock()
	o.yield = func() { clock.Add(int64(time.Hour)) }
	h := openAlone(t, o)
	for id := range ID(leasesPerTurn) {
		h.leases[id+1] = &entry{id: id + 1}
	}
	late, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if list, _ := h.List(0, 1); len(list) != 1 {
		t.Error(list)
	}
	if list, _, err := h.Manager.List(late, 0, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, %v right after a list that took an hour", list, err)
	}
}

// TestALeaseThatWasGrantedAnewIsListedOnce: the end of the older one, and the grant, were between two parts of the list.
func TestALeaseThatWasGrantedAnewIsListedOnce(t *testing.T) {
	for n, want := range []string{"", "1:8", "1:8 2:3", "1:8 2:3 5:9", "1:8 2:3 5:9"} {
		found := []*entry{{id: 5, since: 4}, {id: 1, since: 7}, {id: 2, since: 3}, {id: 5, since: 9}, {id: 1, since: 8}, {id: 1, since: 2}}
		var got []string
		for _, e := range ordered(found, n) {
			got = append(got, fmt.Sprintf("%d:%d", e.id, e.since))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("the first %d are %v, want %s", n, got, want)
		}
	}
}

func TestRevocationDeletesOnlyWhatBelongsToTheLease(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	h.mustGrant(2, time.Hour)
	for _, key := range []string{"own", "moved", "detached", "deleted", "back"} {
		h.mustPut(key, "first", 1)
	}
	h.mustPut("moved", "second", 2)
	h.mustPut("detached", "second", 0)
	h.mustPut("back", "second", 2)
	h.mustPut("back", "third", 1)
	if err := h.write(func(w *mvcc.Write) { w.Delete([]byte("deleted")) }); err != nil {
		t.Fatal(err)
	}
	h.checkRecords()
	if found, _, _, err := h.Keys(context.Background(), 1, nil, 10); err != nil || fmt.Sprintf("%s", found) != "[back own]" {
		t.Fatalf("keys %s of lease 1, %v", found, err)
	}
	if err := h.Revoke(context.Background(), 1); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]bool{"own": false, "moved": true, "detached": true, "deleted": false, "back": false} {
		if h.found(key) != want {
			t.Errorf("%q: found %v", key, !want)
		}
	}
	h.checkRecords()
	if err := h.put("late", "", 1); !errors.Is(err, ErrNotFound) {
		t.Fatalf("a put with a lease that has ended: %v", err)
	}
	if err := h.Revoke(context.Background(), 1); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
}

// TestLongRevocationHoldsFewLatches: a lease of up to StepKeysMax keys ends in one commit. One with more ends in commits of few
// keys, because puts of other keys wait for the latches of each.
func TestLongRevocationHoldsFewLatches(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	for id, count := range map[ID]int{1: StepKeysMax, 2: StepKeysMax + 1} {
		h.mustGrant(id, time.Hour)
		for i := range count {
			h.mustPut(fmt.Sprintf("%d/%d", id, i), "", id)
		}
		before := h.store.Visible()
		if err := h.Revoke(context.Background(), id); err != nil {
			t.Fatal(err)
		}
		want := 1
		if count > StepKeysMax {
			want = (count + longStepKeys - 1) / longStepKeys
		}
		if commits := int(h.store.Visible() - before); commits != want {
			t.Errorf("a lease with %d keys ended in %d commits, want %d", count, commits, want)
		}
	}
	h.checkRecords()
}

// TestLongRevocationContinuesAfterACrash revokes in steps of 10 keys, and crashes at changes of the file system until the
// revocation is done.
func TestLongRevocationContinuesAfterACrash(t *testing.T) {
	crashed, at, stride := true, 1+time.Now().UnixNano()%7, int64(7)
	if *everyStep {
		at, stride = 1, 1
	}
	for ; crashed; at += stride {
		fs := vfs.NewMem()
		o := Options{StepKeys: 10}
		h := mustOpen(t, fs, o)
		h.mustGrant(1, time.Hour)
		for i := range 95 {
			h.mustPut(fmt.Sprintf("k%02d", i), "", 1)
		}
		fs.CrashAt(fs.Mutations() + at)
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		var syncs sync.WaitGroup
		syncs.Go(func() { // so that a crash finds some of the steps durable
			for ctx.Err() == nil && h.store.Wait(ctx, h.store.Visible(), mvcc.DurabilitySync) == nil {
				runtime.Gosched()
			}
		})
		err := h.Revoke(ctx, 1)
		cancel()
		syncs.Wait()
		h.stop()
		crashed = fs.Crashed()
		survival := vfs.SurviveNone
		if at%2 == 0 {
			survival = vfs.SurviveSome
		}
		h = mustOpen(t, fs.Crash(uint64(at), survival), o)
		h.checkRecords()
		left := 0
		for i := range 95 {
			if h.found(fmt.Sprintf("k%02d", i)) {
				left++
			}
		}
		switch info, gone := h.Lease(t.Context(), 1); {
		case err == nil && (gone == nil || left > 0):
			t.Errorf("crash at %d: the revocation was answered, and %d keys are left, lease %+v", at, left, info)
		case gone == nil && left != 95 && !info.Revoking:
			t.Errorf("crash at %d: %d keys are left, and the lease is not being revoked", at, left)
		case gone == nil && info.Revoking:
			if err := h.Revoke(context.Background(), 1); err != nil && !errors.Is(err, ErrNotFound) {
				t.Error(err)
			}
		}
		h.checkRecords()
		h.stop()
	}
}

// TestAttachmentsBesideARevocationAreRefusedOrDeleted attaches keys while the lease is revoked.
func TestAttachmentsBesideARevocationAreRefusedOrDeleted(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{StepKeys: 3})
	defer h.stop()
	for id := ID(1); id <= 60; id++ {
		h.mustGrant(id, time.Hour)
		done := make(chan error, 4)
		for writer := range cap(done) {
			go func() {
				for i := 0; ; i++ {
					err := h.put(fmt.Sprintf("%d-%d-%d", id, writer, i), "", id)
					if err != nil {
						done <- err
						return
					}
				}
			}()
		}
		time.Sleep(time.Duration(id%4) * 200 * time.Microsecond)
		if err := h.Revoke(context.Background(), id); err != nil {
			t.Fatal(err)
		}
		for range cap(done) {
			if err := <-done; !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrRevoking) {
				t.Fatal(err)
			}
		}
	}
	h.checkRecords()
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if left := h.userKeys(x); len(left) > 0 {
		t.Fatalf("%d keys are left, among them %q", len(left), left[0])
	}
}

var everyStep = flag.Bool("lease.every-step", false, "crash at each change of the file system, not at every seventh one")

// TestCrashAtEveryStepLeavesLeasesAndVersionsConsistent crashes at changes of the file system.
func TestCrashAtEveryStepLeavesLeasesAndVersionsConsistent(t *testing.T) {
	script := func(h *harness) {
		ctx := context.Background()
		_ = h.grant(1, time.Minute)
		_ = h.put("a", "", 1)
		_ = h.grant(2, time.Hour)
		_ = h.put("b", "", 2)
		_ = h.put("a", "", 2)
		held, err := h.Acquire(ctx, NewAttempt(), []byte("lock"), 2, nil, false)
		if err == nil {
			_, _, _ = h.Release(ctx, []byte("lock"), held.Token)
			_, _ = h.Acquire(ctx, NewAttempt(), []byte("lock"), 1, nil, false)
		}
		_ = h.Revoke(timeout(20*time.Millisecond), 1)
		_ = h.put("b", "", 0)
		_ = h.Revoke(timeout(20*time.Millisecond), 2)
	}
	crashed, from, stride := true, 1+time.Now().UnixNano()%7, int64(7)
	if *everyStep {
		from, stride = 1, 1
	}
	for at := from; crashed; at += stride {
		fs := vfs.NewMem()
		h := mustOpen(t, fs, Options{})
		fs.CrashAt(fs.Mutations() + at)
		script(h)
		crashed = fs.Crashed()
		h.stop()
		for seed, survival := range []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome} {
			h := mustOpen(t, fs.Crash(uint64(at)+uint64(seed), survival), Options{})
			h.checkRecords()
			for _, id := range h.ids() {
				if err := h.Revoke(context.Background(), id); err != nil {
					t.Error(err)
				}
			}
			h.checkRecords()
			if h.found("a") {
				t.Errorf("crash at %d: a key is left without a lease", at)
			}
			h.stop()
		}
	}
}

// timeout is a context that ends on its own.
func timeout(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	time.AfterFunc(d, cancel)
	return ctx
}

func TestLimitsOfLeases(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{Leases: 2})
	defer h.stop()
	for _, c := range []struct {
		id   ID
		ttl  time.Duration
		want error
	}{
		{1, TTLMin - 1, ErrTTL}, {1, TTLMax + 1, ErrTTL}, {1, TTLMin, nil}, {1, TTLMin, ErrExists}, {2, TTLMax, nil}, {3, TTLMin, ErrTooMany},
	} {
		if err := h.grant(c.id, c.ttl); !errors.Is(err, c.want) {
			t.Errorf("lease %d of %v: %v, want %v", c.id, c.ttl, err, c.want)
		}
	}
	if err := h.Revoke(context.Background(), 2); err != nil {
		t.Fatal(err)
	}
	h.mustGrant(4, TTLMin)
}
