package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// vacuumOptions are those of a store with small pages that makes checkpoints only on request.
func vacuumOptions(fs vfs.FS) mvcc.Options {
	o := modelOptions(fs)
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 1<<20, 1<<20
	return o
}

func mustCheckpoint(t testing.TB, s *mvcc.Store) {
	t.Helper()
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// commitAll puts or deletes many keys in one commit.
func commitAll(t testing.TB, s *mvcc.Store, fill func(w *mvcc.Write)) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	w := mvcc.Write{Durability: mvcc.DurabilityAsync}
	fill(&w)
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
}

// versions returns the number of versions in the newest durable tree, and of their keys.
func versions(t testing.TB, s *mvcc.Store) (n, live uint64) {
	t.Helper()
	report, err := s.Verify(context.Background(), inspect.VerifyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	mustBeSound(t, report)
	return report.Versions, report.Keys
}

// mustConverge requests checkpoints, which have nothing to merge, until the tree has one version of
// each key.
func mustConverge(t testing.TB, s *mvcc.Store, atMost int) {
	t.Helper()
	for n := 1; ; n++ {
		mustCheckpoint(t, s)
		st := s.Stats().Storage
		if st.Tree.DeadVersionRatio == 0 {
			t.Logf("%d checkpoints: %d leaves read, %d written, %d versions dropped", n, st.Vacuum.Reads, st.Vacuum.Leaves, st.Vacuum.Versions)
			break
		}
		if n == atMost {
			t.Fatalf("after %d checkpoints: %+v", n, st)
		}
	}
	if n, live := versions(t, s); n != live {
		t.Fatalf("%d versions of %d keys, and the dead-version ratio is not reported", n, live)
	}
}

// TestVersionsOfALongReaderAreVacuumedAfterIt overwrites and deletes keys while an old snapshot is
// open, merges, ends the snapshot, and writes no more to these keys.
func TestVersionsOfALongReaderAreVacuumedAfterIt(t *testing.T) {
	s := mustOpen(t, vacuumOptions(vfs.NewMem()))
	want := map[string]string{}
	write := func(round, from, to int, del bool) {
		commitAll(t, s, func(w *mvcc.Write) {
			for i := from; i < to; i++ {
				k := fmt.Sprintf("key-%05d", i)
				if del {
					w.Delete([]byte(k))
					delete(want, k)
					continue
				}
				want[k] = fmt.Sprintf("round %d %s", round, strings.Repeat("v", i%40))
				if i%50 == 0 {
					want[k] = strings.Repeat(want[k], 60) // outside the leaf
				}
				w.Set([]byte(k), []byte(want[k]))
			}
		})
		mustCheckpoint(t, s)
	}
	write(1, 0, 4000, false)
	reader := mustSession(t, s)
	defer reader.Close()
	if _, err := reader.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	old := maps.Clone(want)
	live := s.Stats().Storage.Pages.Live
	write(2, 0, 3000, false)
	write(3, 2000, 4000, true)
	write(4, 2500, 2600, false)

	for range 10 {
		mustCheckpoint(t, s)
	}
	st := s.Stats().Storage
	if st.Tree.DeadVersionRatio < 0.4 || st.Vacuum.Versions != 0 {
		t.Fatalf("with an old snapshot: %+v", st)
	}
	if err := equalMaps(old, dumpAt(t, reader)); err != nil {
		t.Fatalf("the old snapshot: %v", err)
	}
	reader.Close()
	mustConverge(t, s, 60)
	mustHold(t, s, want)
	// The next checkpoint counts the pages as free.
	if now := s.Stats().Storage.Pages.Live; now > live {
		t.Errorf("%d pages are live, %d before anything was superseded", now, live)
	}
}

// TestVacuumRestsWhileNoVersionIsDead: if a snapshot needs all superseded versions, and nothing
// else changes, vacuum reads the leaves once.
func TestVacuumRestsWhileNoVersionIsDead(t *testing.T) {
	s := mustOpen(t, vacuumOptions(vfs.NewMem()))
	fill := func(value string) {
		commitAll(t, s, func(w *mvcc.Write) {
			for i := range 2000 {
				w.Set(fmt.Appendf(nil, "key-%05d", i), []byte(value))
			}
		})
		mustCheckpoint(t, s)
	}
	fill("old")
	first, second := mustSession(t, s), mustSession(t, s)
	defer first.Close()
	defer second.Close()
	if _, err := first.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	fill("middle")
	if _, err := second.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	fill("new")
	rest := func() storage.Stats {
		for range 100 {
			mustCheckpoint(t, s)
		}
		return s.Stats().Storage
	}
	before := rest()
	after := rest()
	if before.Vacuum.Reads == 0 || after.Vacuum.Reads != before.Vacuum.Reads || after.Checkpoints.Newest != before.Checkpoints.Newest || after.Vacuum.Leaves != 0 {
		t.Fatalf("vacuum continued: %+v, then %+v", before, after)
	}
	second.Close()
	middle := rest()
	if n, live := versions(t, s); n != 2*live || middle.Vacuum.Versions != live {
		t.Fatalf("%d versions of %d keys: the versions that only the newer snapshot needed must be removed: %+v", n, live, middle)
	}
	if v, err := first.Read(nil, []byte("key-00100")); err != nil || string(v.Data) != "old" {
		t.Fatalf("the older snapshot reads %q, %v", v.Data, err)
	}
	first.CloseSnapshot()
	first.Close()
	mustConverge(t, s, 100)
}

// TestIdleStoreIsVacuumed: without writes and requests for checkpoints the dead versions are
// dropped nevertheless. After that there are no more checkpoints.
func TestIdleStoreIsVacuumed(t *testing.T) {
	testseed.SkipUnderRace(t)
	t.Parallel()
	o := vacuumOptions(vfs.NewMem())
	o.CheckpointInterval = time.Hour
	s := mustOpen(t, o)
	commitAll(t, s, func(w *mvcc.Write) {
		for i := range 500 {
			w.Set(fmt.Appendf(nil, "key-%05d", i), []byte("old"))
		}
	})
	reader := mustSession(t, s)
	defer reader.Close()
	if _, err := reader.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	commitAll(t, s, func(w *mvcc.Write) {
		for i := range 500 {
			w.Delete(fmt.Appendf(nil, "key-%05d", i))
		}
	})
	mustCheckpoint(t, s)
	if share := s.Stats().Storage.Tree.DeadVersionRatio; share < 0.9 {
		t.Fatalf("stale share %.2f", share)
	}
	reader.Close()
	vacuumed := func() bool { return s.Stats().Storage.Tree.DeadVersionRatio == 0 }
	for until := time.Now().Add(20 * time.Second); !vacuumed(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%+v", s.Stats().Storage.Tree)
		}
	}
	quiet := func() bool { // the file shrinks, too
		before := s.Stats().Storage
		time.Sleep(2500 * time.Millisecond)
		after := s.Stats().Storage
		return before.Checkpoints.Newest == after.Checkpoints.Newest && before.Pages.PagesRead == after.Pages.PagesRead
	}
	for tries := 0; !quiet(); tries++ {
		if tries == 2 {
			t.Fatalf("vacuum did not come to rest: %+v", s.Stats().Storage.Pages)
		}
	}
	if n, _ := versions(t, s); n != 0 {
		t.Fatalf("%d versions are left", n)
	}
}

// TestVacuumThatFindsNoSpaceIsRepeated: a checkpoint that fails on a full disk has dropped nothing.
// A later checkpoint drops the versions, although there were no new writes.
func TestVacuumThatFindsNoSpaceIsRepeated(t *testing.T) {
	mem := vfs.NewMem()
	faulty := vfs.NewFaulty(mem)
	s := mustOpen(t, vacuumOptions(faulty))
	reader := mustSession(t, s)
	defer reader.Close()
	for round := range 2 {
		commitAll(t, s, func(w *mvcc.Write) {
			for i := range 300 {
				w.Set(fmt.Appendf(nil, "key-%05d", i), fmt.Appendf(nil, "round %d", round))
			}
		})
		mustCheckpoint(t, s)
		if round == 0 {
			if _, err := reader.OpenSnapshot(0); err != nil {
				t.Fatal(err)
			}
		}
	}
	full := faulty.Inject(vfs.Rule{Op: vfs.OpWrite, Name: path.Base(dataFile), Err: vfs.ErrNoSpace})
	reader.Close()
	if err := s.Checkpoint(context.Background()); !errors.Is(err, vfs.ErrNoSpace) || full.Fired() == 0 {
		t.Fatalf("%v after %d faults", err, full.Fired())
	}
	full.Remove()
	mustConverge(t, s, 20)
}

// TestSpaceOfDeletedKeysDoesNotWaitForTheInterval deletes most keys in a memtable that is far from
// full.
func TestSpaceOfDeletedKeysDoesNotWaitForTheInterval(t *testing.T) {
	testseed.SkipUnderRace(t)
	t.Parallel()
	o := vacuumOptions(vfs.NewMem())
	o.CheckpointInterval = 30 * time.Second
	s := mustOpen(t, o)
	commitAll(t, s, func(w *mvcc.Write) {
		for i := range 5000 {
			w.Set(fmt.Appendf(nil, "key-%05d", i), make([]byte, 100))
		}
	})
	mustCheckpoint(t, s)
	before := s.Stats().Storage.Pages.FileBytes
	commitAll(t, s, func(w *mvcc.Write) {
		for i := range 4500 {
			w.Delete(fmt.Appendf(nil, "key-%05d", i))
		}
	})
	var p pager.Stats
	for until := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if p = s.Stats().Storage.Pages; p.FileBytes <= 2*500*(9+100) {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("the file has %d bytes, %d before: %+v", p.FileBytes, before, p)
		}
	}
}

// TestValuesThatABulkLoadReplacedAreVacuumed replaces all keys of a tree by a bulk load, twice.
func TestValuesThatABulkLoadReplacedAreVacuumed(t *testing.T) {
	s := mustOpen(t, vacuumOptions(vfs.NewMem()))
	want := entriesFor("a", 3000, 1, rand.New(rand.NewPCG(1, 1)))
	mustLoad(t, s, want)
	for k, v := range entriesFor("b", 3000, 1, rand.New(rand.NewPCG(2, 1))) {
		want[k] = v
	}
	mustLoad(t, s, want)
	mustConverge(t, s, 60)
	if n := s.Stats().Storage.Vacuum.Versions; n != 3000 {
		t.Fatalf("%d versions were vacuumed", n)
	}
	mustHold(t, s, want)
}

// TestRetainedVersionsAreVacuumedAfterTheRetentionTime overwrites keys in a store with a retention
// time, and reads past epochs within that time. On a machine so busy that the time is over before
// the first read, it uses a longer time.
func TestRetainedVersionsAreVacuumedAfterTheRetentionTime(t *testing.T) {
	for retention := 400 * time.Millisecond; retainedReads(t, retention) == 0; retention *= 2 {
		if retention > time.Minute {
			t.Fatalf("no read within %v", retention)
		}
	}
}

// retainedReads is the number of reads of past epochs within the retention time.
func retainedReads(t *testing.T, retention time.Duration) (reads int) {
	o := vacuumOptions(vfs.NewMem())
	o.Retention = retention
	s := mustOpen(t, o)
	old := mustPut(t, s, "key", "old")
	began := time.Now()
	mustPut(t, s, "key", "new")
	mustCheckpoint(t, s)
	for ; ; reads++ {
		mustCheckpoint(t, s)
		x := mustSession(t, s)
		v, err := x.Get(nil, []byte("key"), old)
		x.Close()
		if time.Since(began) > retention {
			break
		}
		if err != nil || string(v.Data) != "old" {
			t.Fatalf("%v after it was overwritten: %q, %v", time.Since(began), v.Data, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := waitFor(func() bool { mustCheckpoint(t, s); return s.Stats().Storage.Tree.DeadVersionRatio == 0 }); err != nil {
		t.Fatalf("%v: %+v", err, s.Stats().Storage.Tree)
	}
	return reads
}

// TestSnapshotsSeeTheirStateDuringVacuum opens and ends snapshots at random over overwrites,
// deletions, bulk loads and restarts, with vacuuming checkpoints in between. In the end no dead
// version is left.
func TestSnapshotsSeeTheirStateDuringVacuum(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 31))
			o := vacuumOptions(vfs.NewMem())
			s := mustOpen(t, o)
			now := map[string]string{}
			snapshots := map[*session]map[string]string{}
			for round := range 40 {
				commitAll(t, s, func(w *mvcc.Write) {
					for i := range 600 {
						k := fmt.Sprintf("k%04d", i)
						switch rng.IntN(12) {
						case 0:
							w.Delete([]byte(k))
							delete(now, k)
						case 1, 2:
							now[k] = fmt.Sprintf("round %d %s", round, strings.Repeat("v", rng.IntN(160)))
							w.Set([]byte(k), []byte(now[k]))
						}
					}
				})
				if rng.IntN(3) == 0 {
					x := mustSession(t, s)
					if _, err := x.OpenSnapshot(0); err != nil {
						t.Fatal(err)
					}
					snapshots[x] = maps.Clone(now)
				}
				for range rng.IntN(4) {
					mustCheckpoint(t, s)
				}
				for x, state := range snapshots {
					if err := equalMaps(state, dumpAt(t, x)); err != nil {
						t.Fatalf("round %d, snapshot at %d: %v", round, x.at, err)
					}
					if rng.IntN(4) == 0 {
						x.Close()
						delete(snapshots, x)
					}
				}
				if len(snapshots) == 0 && rng.IntN(4) == 0 {
					mustClose(t, s)
					s = mustOpen(t, o)
				}
			}
			for x := range snapshots {
				x.Close()
			}
			mustConverge(t, s, 60)
			mustHold(t, s, now)
		})
	}
}

const vacuumRounds = 3

// vacuumRound returns the writes of round n: values of many sizes, and in the last round also
// deletions.
func vacuumRound(n int, set func(k, v []byte), del func(k []byte)) {
	for i := range 80 {
		k := fmt.Appendf(nil, "k%03d", i)
		if n == vacuumRounds-1 && i%3 == 0 {
			del(k)
			continue
		}
		set(k, []byte(strings.Repeat(fmt.Sprint(n), 10+i%30*8)))
	}
}

func vacuumState(rounds int) map[string]string {
	m := map[string]string{}
	for n := range rounds {
		vacuumRound(n, func(k, v []byte) { m[string(k)] = string(v) }, func(k []byte) { delete(m, string(k)) })
	}
	return m
}

// vacuumScript writes rounds, each of them one epoch, with an open snapshot of the first, ends it,
// and vacuums. acked counts the rounds that were acknowledged; the last argument becomes true when
// nothing is left to vacuum.
func vacuumScript(fs vfs.FS, acked *int, vacuumed *bool) error {
	s, err := mvcc.Open(vacuumOptions(fs))
	if err != nil {
		return err
	}
	return errors.Join(vacuumRun(s, acked, vacuumed), s.Close())
}

func vacuumRun(s *mvcc.Store, acked *int, vacuumed *bool) error {
	x, err := openSession(s)
	if err != nil {
		return err
	}
	defer x.Close()
	reader, err := openSession(s)
	if err != nil {
		return err
	}
	defer reader.Close()
	for round := range vacuumRounds {
		w := mvcc.Write{Durability: mvcc.DurabilitySync}
		vacuumRound(round, w.Set, w.Delete)
		if _, err := commitAndWait(x, &w); err != nil {
			return err
		}
		*acked = round + 1
		if round == 0 {
			if _, err := reader.OpenSnapshot(0); err != nil {
				return err
			}
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			return err
		}
	}
	reader.CloseSnapshot()
	for range 4 {
		if err := s.Checkpoint(context.Background()); err != nil {
			return err
		}
	}
	st := s.Stats().Storage
	*vacuumed = st.Tree.DeadVersionRatio == 0 && st.Vacuum.Versions > 0
	return nil
}

// TestVacuumSurvivesACrashAtEveryOperation cuts the power at each file operation of a store that
// vacuums.
func TestVacuumSurvivesACrashAtEveryOperation(t *testing.T) {
	whole, acked, vacuumed := vfs.NewMem(), 0, false
	if err := vacuumScript(whole, &acked, &vacuumed); err != nil || !vacuumed {
		t.Fatalf("vacuumed %v, %v: the test tests nothing", vacuumed, err)
	}
	ops := whole.Mutations()
	step := int64(3 * exhaustiveStep)
	if testing.Short() {
		step = 7
	}
	for k := int64(1); k <= ops; k += step {
		keep := []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll}[k/step%3]
		fs := vfs.NewMem()
		fs.CrashAt(k)
		acked = 0
		_ = vacuumScript(fs, &acked, &vacuumed) // it ends where the power was cut
		left := fs.Crash(uint64(k), keep)
		verifyUnlessNew(t, left)
		s, err := mvcc.Open(vacuumOptions(left))
		if err != nil {
			t.Fatalf("crash at %d of %d: %v", k, ops, err)
		}
		survived := int(s.Recovery().Epoch)
		if survived < acked {
			t.Fatalf("crash at %d of %d, keep %v: %d rounds survived, %d were acknowledged", k, ops, keep, survived, acked)
		}
		for range 2 { // before and after the rest is vacuumed
			if err := equalMaps(vacuumState(survived), dump(t, s)); err != nil {
				t.Fatalf("crash at %d of %d, keep %v, round %d: %v", k, ops, keep, survived, err)
			}
			mustConverge(t, s, 20)
		}
		mustClose(t, s)
	}
}
