package mvcc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// in is a deadline after d by the store's clock.
func in(s *Store, d time.Duration) uint64 { return s.expirer.now() + uint64(d.Milliseconds()) }

// checkDeadlines compares a store with the deadlines of its keys, zero for none: no key is missing before its deadline, and
// none is there later than a second after it.
func checkDeadlines(t testing.TB, s *Store, deadlines map[string]uint64) (there int) {
	t.Helper()
	before := s.expirer.now()
	keys := dump(t, s)
	after := s.expirer.now()
	for key, deadline := range deadlines {
		_, found := keys[key]
		if !found && (deadline == 0 || after < deadline) {
			t.Errorf("%q is missing at %d, its deadline is %d", key, after, deadline)
		}
		if found && deadline != 0 && deadline+1000 < before {
			t.Errorf("%q is there %d ms after its deadline", key, before-deadline)
		}
	}
	return len(keys)
}

// atLeisure are options for tests with a fake clock, which run background work every fake millisecond otherwise.
func atLeisure() Options {
	o := tiny(vfs.NewMem())
	o.GCInterval, o.SyncInterval = 100*time.Millisecond, 100*time.Millisecond
	return o
}

// withJumps are these options with a wall clock that is an offset ahead.
func withJumps() (o Options, offset *atomic.Int64) {
	o, offset = atLeisure(), new(atomic.Int64)
	o.WallClock = func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }
	return o, offset
}

// TestKeysExpireInTime: never before their deadlines, and at most a second later; in snapshots they stay.
func TestKeysExpireInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustOpen(t, atLeisure())
		x := mustSession(t, s)
		defer x.Close()
		rng, deadlines := rand.New(rand.NewPCG(1, 1)), map[string]uint64{"plain": 0}
		mustPut(t, s, "plain", "v")
		for i := range 400 {
			key := fmt.Sprint("key ", i)
			deadlines[key] = in(s, time.Duration(rng.IntN(3000))*time.Millisecond)
			putWith(t, x, key, "v", metadata.Fields{ExpiresAt: deadlines[key]})
		}
		reader := mustSession(t, s)
		defer reader.Close()
		at, err := reader.OpenSnapshot(0)
		if err != nil {
			t.Fatal(err)
		}
		there := len(dump(t, s))
		for range 50 {
			time.Sleep(100 * time.Millisecond)
			checkDeadlines(t, s, deadlines)
		}
		if n := checkDeadlines(t, s, deadlines); n != 1 || len(queue(t, s)) != 0 {
			t.Errorf("%d keys and %d entries are left", n, len(queue(t, s)))
		}
		c, err := reader.Scan(ScanOptions{})
		if err != nil {
			t.Fatal(err)
		}
		seen := 0
		for c.Next() {
			seen++
		}
		if c.Close(); seen != there {
			t.Errorf("a snapshot at %d has %d keys, and had %d", at, seen, there)
		}
		if st := s.Stats().Expiry; st.Expired != 400 || st.Stale != 0 || st.Lag != 0 || st.Err != nil {
			t.Errorf("%+v", st)
		}
	})
}

// TestClockJumpsExpireNothingAtOnce: the deadlines are those of the store's clock, which a jump of the wall clock moves by
// a tenth of the elapsed time at most.
func TestClockJumpsExpireNothingAtOnce(t *testing.T) {
	for _, jump := range []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -24 * time.Hour} {
		t.Run(jump.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, offset := withJumps()
				s := mustOpen(t, o)
				x := mustSession(t, s)
				defer x.Close()
				start := time.Now()
				deadlines := map[string]uint64{"soon": in(s, 3*time.Second), "late": in(s, 10*time.Minute)}
				for key, deadline := range deadlines {
					putWith(t, x, key, "v", metadata.Fields{ExpiresAt: deadline})
				}
				offset.Store(int64(jump))
				for range 12 {
					time.Sleep(500 * time.Millisecond)
					checkDeadlines(t, s, deadlines)
					if elapsed := time.Since(start); elapsed < 2700*time.Millisecond && get(t, s, "soon", 0) == "-" {
						t.Errorf("expired %v after a jump", elapsed)
					}
				}
				if get(t, s, "soon", 0) != "-" || get(t, s, "late", 0) != "v" {
					t.Error("the clock does not go on after a jump")
				}
				if jump < 0 {
					return
				}
				if _, err := s.Clock().Accept(); err != nil { // the operator knows that the wall clock is right
					t.Fatal(err)
				}
				time.Sleep(1100 * time.Millisecond)
				if get(t, s, "late", 0) != "-" {
					t.Error("an accepted clock does not expire what is overdue by it")
				}
			})
		})
	}
}

// TestStaleEntriesDeleteNothing: only the deadline of the newest version counts, whatever became of the key since.
func TestStaleEntriesDeleteNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustOpen(t, atLeisure())
		x := mustSession(t, s)
		defer x.Close()
		soon, late := in(s, time.Second), in(s, time.Minute)
		for _, key := range []string{"plain", "later", "deleted", "again", "sooner", "same", "touched", "added", "revived"} {
			putWith(t, x, key, "1", metadata.Fields{ExpiresAt: soon})
		}
		mustCheckpoint(t, s)
		mustPut(t, s, "plain", "2")
		putWith(t, x, "later", "2", metadata.Fields{ExpiresAt: late})
		for _, key := range []string{"deleted", "again", "revived"} {
			w := new(Write)
			w.Delete([]byte(key))
			if _, err := commitAndWait(x, w); err != nil {
				t.Fatal(err)
			}
		}
		mustPut(t, s, "again", "2")
		putWith(t, x, "revived", "2", metadata.Fields{ExpiresAt: late}) // the entry of before its deletion is still there
		putWith(t, x, "sooner", "2", metadata.Fields{ExpiresAt: soon - 500})
		putWith(t, x, "same", "2", metadata.Fields{ExpiresAt: soon})
		invokeEither(t, x, Invoke{Kind: InvokeTouch, Key: []byte("touched"), ExpiresAt: late}, false)
		invokeEither(t, x, Invoke{Kind: InvokeAdd, Key: []byte("added"), Delta: 1}, false)
		deadlines := map[string]uint64{"plain": 0, "later": late, "again": 0, "sooner": soon - 500, "same": soon, "touched": late, "added": soon, "revived": late}
		for range 25 {
			time.Sleep(100 * time.Millisecond)
			checkDeadlines(t, s, deadlines)
		}
		if n := checkDeadlines(t, s, deadlines); n != 5 || checkQueue(t, s) != 0 {
			t.Errorf("%d keys are left: %v; queue %v", n, dump(t, s), queue(t, s))
		}
		if st := s.Stats().Expiry; st.Expired != 3 || st.Stale != 4 {
			t.Errorf("%+v", st)
		}
	})
}

// TestStoreWithoutDeadlinesNeverWakesTheExpirer, and the first deadline does.
func TestStoreWithoutDeadlinesNeverWakesTheExpirer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustOpen(t, atLeisure())
		x := mustSession(t, s)
		defer x.Close()
		for range 10 {
			mustPut(t, s, "k", "v")
			time.Sleep(time.Second)
		}
		if next := s.expirer.next.Load(); next != noDeadline || s.expirer.session == nil {
			t.Errorf("the expirer waits for %d", next)
		}
		putWith(t, x, "k", "v", metadata.Fields{ExpiresAt: in(s, 100*time.Millisecond)})
		time.Sleep(1100 * time.Millisecond)
		if get(t, s, "k", 0) != "-" || s.expirer.next.Load() != noDeadline {
			t.Error("the first deadline is overlooked, or the expirer does not rest after it")
		}
		if st := s.Stats().Expiry; st.Commits != 1 {
			t.Errorf("%+v", st)
		}
	})
}

// TestOverdueKeysExpireAfterACrash: the queue is as durable as the keys.
func TestOverdueKeysExpireAfterACrash(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	x := mustSession(t, s)
	deadlines := map[string]uint64{"far": in(s, time.Hour)}
	for i := range 300 {
		deadlines[fmt.Sprint("key ", i)] = in(s, 100*time.Millisecond)
	}
	for key, deadline := range deadlines {
		putWith(t, x, key, "v", metadata.Fields{ExpiresAt: deadline})
	}
	if err := s.Wait(context.Background(), s.Visible(), DurabilitySync); err != nil {
		t.Fatal(err)
	}
	x.Close()
	s = mustOpen(t, tiny(fs.Crash(1, vfs.SurviveNone)))
	for len(dump(t, s)) > 1 || len(queue(t, s)) > 1 {
		if st := s.Stats().Expiry; st.Err != nil {
			t.Fatal(st.Err)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if get(t, s, "far", 0) != "v" || checkQueue(t, s) != 0 {
		t.Errorf("left: %v", dump(t, s))
	}
}

// TestWritersAndExpirerAgree: several writers set, refresh and remove deadlines while keys expire. Each key has one writer,
// which knows what must be there.
func TestWritersAndExpirerAgree(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	var writers sync.WaitGroup
	deadlines := make([]map[string]uint64, 3)
	for n := range deadlines {
		deadlines[n] = make(map[string]uint64)
		writers.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			rng := rand.New(rand.NewPCG(3, uint64(n)))
			for range 1500 {
				key := fmt.Sprint("key ", n, " ", rng.IntN(40))
				var f metadata.Fields
				if rng.IntN(3) > 0 {
					f.ExpiresAt = in(s, time.Duration(rng.IntN(30))*time.Millisecond)
				}
				putWith(t, x, key, "v", f)
				deadlines[n][key] = f.ExpiresAt
			}
		})
	}
	writers.Wait()
	for last := in(s, 50*time.Millisecond); s.expirer.now() < last || s.expirer.next.Load() != noDeadline || s.expirer.progress.Load() != noDeadline; {
		time.Sleep(time.Millisecond)
	}
	all := dump(t, s)
	for n := range deadlines {
		for key, deadline := range deadlines[n] {
			if _, found := all[key]; found != (deadline == 0) {
				t.Errorf("%q with the deadline %d: found %v", key, deadline, found)
			}
		}
	}
	if left := queue(t, s); len(left) != 0 {
		t.Errorf("left in the queue: %v", left)
	}
	if st := s.Stats().Expiry; st.Expired == 0 || st.Stale == 0 {
		t.Errorf("nothing happened: %+v", st)
	}
}

// TestBatchesOfTheExpirerFitTheirWork: they grow by an eighth, are halved when they hold latches for long, and stay in bounds.
func TestBatchesOfTheExpirerFitTheirWork(t *testing.T) {
	e := &expirer{size: expiryBatchMax}
	for range 20 {
		e.adapt(expiryHeldMax+1, 0, 0)
	}
	if e.size != expiryBatchMin || e.size < readBeforeMin { // smaller ones would read pages under their latches
		t.Errorf("halved to %d", e.size)
	}
	for range 100 {
		e.adapt(expiryHeldMax, expiryTookMax, 0)
	}
	if e.size != expiryBatchMax {
		t.Errorf("grown to %d", e.size)
	}
	if e.adapt(0, expiryTookMax+1, expiryLateMax); e.size != expiryBatchMax/2 {
		t.Errorf("%d after a long commit", e.size)
	}
	if e.adapt(expiryHeldLate, expiryTookMax+1, expiryLateMax+1); e.size <= expiryBatchMax/2 {
		t.Errorf("%d after a long commit of a batch that is late", e.size)
	}
	if e.adapt(expiryHeldLate+1, 0, expiryLateMax+1); e.size > expiryBatchMax/2 {
		t.Errorf("%d after one that held its latches for very long", e.size)
	}
}

// TestALateExpirerHasMoreCommitsInFlight: beside hundreds of clients two are not enough.
func TestALateExpirerHasMoreCommitsInFlight(t *testing.T) {
	e := newExpirer(mustOpen(t, tiny(vfs.NewMem())))
	for deadline, want := range map[uint64]int{1: expiryCommitsLate, e.now(): expiryCommitsMax, e.now() + 10_000: expiryCommitsMax} {
		if got := e.commitsMax(deadline); got != want {
			t.Errorf("%d with a deadline %v ago, want %d", got, e.late(deadline), want)
		}
	}
}

// TestALongPassEndsAndGoesOn: so that what commits note during it is no lag for long.
func TestALongPassEndsAndGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, offset := withJumps()
		s := mustOpen(t, o)
		x := mustSession(t, s)
		defer x.Close()
		const n = 3*expiryBatchMax + 1
		deadline := in(s, time.Hour)
		for i := range n {
			putWith(t, x, fmt.Sprint(i), "v", metadata.Fields{ExpiresAt: deadline})
		}
		time.Sleep(time.Second) // the first pass of the store's expirer has ended: it waits for the deadline
		s.expirer.next.Store(noDeadline)
		time.Sleep(2 * expirySleepMax) // it waits for nothing
		offset.Store(int64(2 * time.Hour))
		if _, err := s.clock.Accept(); err != nil {
			t.Fatal(err)
		}
		e := newExpirer(s)
		e.jobs, e.done = make(chan *expiryBatch), make(chan *expiryBatch, expiryCommitsLate)
		for range expiryCommitsLate {
			e.idle = append(e.idle, new(expiryBatch))
		}
		go func() {
			for b := range e.jobs {
				b.commit(context.Background(), x)
				e.done <- b
			}
		}()
		defer close(e.jobs)
		for range 2 {
			if err := e.pass(t.Context(), time.Now().Add(-1)); err != nil {
				t.Fatal(err)
			}
		}
		if got, next := e.expired.Load(), e.next.Load(); got <= expiryBatchMax || got > 2*expiryBatchMax || next != deadline {
			t.Errorf("two passes that end at once have deleted %d keys, want two batches, and the next one begins at %d, want %d", got, next, deadline)
		}
		if err := e.pass(t.Context(), time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if got := e.expired.Load(); got != n {
			t.Errorf("%d of %d keys are deleted", got, n)
		}
	})
}

// TestExpiryIsTheOriginOfItsCommits, and a commit has no more than its bound of keys.
func TestExpiryIsTheOriginOfItsCommits(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	b := new(expiryBatch)
	past := in(s, 0) - 1
	f := metadata.Fields{ExpiresAt: far}
	putWith(t, x, "live", "v", f)
	for _, key := range []string{"live", "stale"} {
		f.ExpiresAt = far
		if key == "stale" {
			f.ExpiresAt = past
		}
		b.add(keys.AppendOwned(nil, keys.SystemExpiry, f.ExpiresAt, keys.Append(nil, keys.SpaceUser, []byte(key))))
	}
	b.commit(context.Background(), x)
	if b.err != nil || b.write.Origin != batch.OriginExpiry || b.expired != 1 || b.stale != 1 || get(t, s, "live", 0) != "-" {
		t.Errorf("%+v", b)
	}
}

// TestFailedBatchIsTakenAgain: two batches are in flight; the later one is done first, a third one begins, and then the first
// one fails.
func TestFailedBatchIsTakenAgain(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	e := newExpirer(s)
	e.done = make(chan *expiryBatch, 1)
	b := new(expiryBatch)
	b.reset()
	b.add(keys.AppendOwned(nil, keys.SystemExpiry, 5, []byte("xk")))
	b.err = context.DeadlineExceeded
	e.next.Store(noDeadline)
	e.progress.Store(7) // of the second batch
	e.inFlight = 1
	e.done <- b
	if err := e.collect(); err == nil {
		t.Fatal("the batch has not failed")
	}
	if next := e.next.Load(); next != 5 {
		t.Errorf("the next pass begins at %d, and the entry has the deadline 5", next)
	}
}
