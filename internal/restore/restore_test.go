package restore

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// points are restored into directories, and compared by what a client reads; randomTargets are only replayed from the archive, which takes a
// millisecond each.
var points = flag.Int("restore.points", 6, "random epochs and times that are restored; 200 is the long form")

const randomTargets = 200 / exhaustiveStep

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// bench is a store with an archive, and what its state is after each commit.
type bench struct {
	t       *testing.T
	dir     string
	target  *objectstore.Faulty
	store   *mvcc.Store
	stop    func() // of the archiver
	arch    *archive.Archiver
	rng     *rand.Rand
	now     map[string]string
	states  map[keys.Epoch]uint64 // hash of the state after each commit of a client
	yields  bool
	fs      vfs.FS        // of the store; nil: that of the system
	age     time.Duration // of the change log
	reserve int64         // of the disk

	merge       archive.MergeOptions
	forgetLoads bool // nothing keeps bulk loads for the archive
	history     keys.Lineage
	fileBytes   int64
	lifetime    time.Duration // of the archiver's hold, if it is not the usual one

	named        string        // history that is restored
	answerWithin time.Duration // of the owner of the archive, if it is not short
}

func newBench(t *testing.T) *bench {
	t.Helper()
	store, err := objectstore.Open("file://"+t.TempDir(), objectstore.Options{})
	check(t, err)
	b := &bench{t: t, dir: filepath.Join(t.TempDir(), "db"), target: objectstore.NewFaulty(store), rng: rand.New(rand.NewPCG(testseed.Base(t), 1)), now: map[string]string{}, states: map[keys.Epoch]uint64{0: hash(nil)}, age: time.Hour, merge: archive.MergeOptions{Off: true}}
	b.open()
	t.Cleanup(b.close)
	return b
}

// options makes generations rotate often.
func (b *bench) options(dir string) mvcc.Options {
	hold := archive.Hold("test", b.yields)
	hold.Lifetime = cmp.Or(b.lifetime, hold.Lifetime)
	return mvcc.Options{Storage: storage.Options{
		FS: b.fs, Dir: dir, DiskReserve: b.reserve, PageSize: 1024, MemoryBytes: 256 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, CheckpointBytes: 128 << 10,
		ChangeLog: storage.ChangeLog{Age: b.age, Archive: hold},
	}, SyncInterval: time.Millisecond, GCInterval: time.Millisecond}
}

func (b *bench) open() {
	b.t.Helper()
	s, err := mvcc.Open(b.options(b.dir))
	check(b.t, err)
	b.store, b.history = s, s.History().Lineage
	s.HoldBulkLoads(!b.forgetLoads)
	b.archive()
}

func (b *bench) archiveOptions() archive.Options {
	return archive.Options{
		Target: b.target, Identity: b.identity, Merge: b.merge, Interval: 20 * time.Millisecond, FileBytes: cmp.Or(b.fileBytes, 8<<10), Yields: b.yields, AnswerWithin: cmp.Or(b.answerWithin, 300*time.Millisecond),
	}
}

// archive starts the archiver.
func (b *bench) archive() {
	b.arch = archive.New(b.store.Changes(), b.archiveOptions())
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.arch.Run(ctx)
	}()
	b.stop = func() {
		cancel()
		<-done
	}
}

// mergeQuickly merges small files all the time, and deletes their parts at once.
func (b *bench) mergeQuickly() {
	b.t.Helper()
	b.stop()
	b.merge = archive.MergeOptions{Every: 3 * time.Millisecond, Files: 4, Bytes: 512 << 10, Grace: time.Nanosecond}
	b.archive()
}

// merged waits until files were merged and parts deleted, and ends the archiver when it has archived everything.
func (b *bench) merged() {
	b.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; b.commits(2) {
		b.archived()
		s := b.arch.Status().Merges
		if s.Created > 0 && s.Deleted > 0 {
			break
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("no files were merged: %+v", s)
		}
	}
	b.stop()
	if s := b.arch.Status().Merges; s.Failures > 0 {
		b.t.Fatalf("merges have failed: %+v", s)
	}
}

func (b *bench) identity() archive.Identity {
	h := b.store.History()
	return archive.Identity{Lineage: h.Lineage, StoreID: b.store.ID(), Level: b.store.FeatureLevel(), Parent: h.Parent, PageSize: b.store.Stats().Storage.PageSize}
}

func (b *bench) close() {
	if b.store == nil {
		return
	}
	b.stop()
	check(b.t, b.store.Close())
	b.store = nil
}

// commits makes random commits, and notes the states after them.
func (b *bench) commits(n int) {
	b.t.Helper()
	x, err := b.store.Session()
	check(b.t, err)
	defer x.Close()
	for range n {
		var w mvcc.Write
		for range 1 + b.rng.IntN(4) {
			key := fmt.Sprintf("key %03d", b.rng.IntN(200))
			if _, twice := b.now["\x00"+key]; twice {
				continue
			}
			if b.now["\x00"+key] = ""; b.rng.IntN(4) == 0 {
				w.Delete([]byte(key))
				delete(b.now, key)
				continue
			}
			value := fmt.Sprintf("value %d of %d bytes %s", b.rng.Uint64(), b.rng.IntN(1000), bytes.Repeat([]byte("x"), b.rng.IntN(600)))
			w.Set([]byte(key), []byte(value))
			b.now[key] = value
		}
		maps.DeleteFunc(b.now, func(k, _ string) bool { return k[0] == 0 })
		epoch, err := x.Commit(b.t.Context(), &w)
		check(b.t, err)
		check(b.t, b.store.Wait(b.t.Context(), epoch, mvcc.DurabilitySync))
		b.states[epoch] = hash(b.now)
	}
}

// state is the hash of the state after the last commit that is not later than an epoch.
func (b *bench) state(at keys.Epoch) uint64 {
	best := keys.Epoch(0)
	for e := range b.states {
		if e <= at {
			best = max(best, e)
		}
	}
	return b.states[best]
}

func hash(m map[string]string) uint64 {
	h := fnv.New64a()
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(h, "%d %s %d %s ", len(k), k, len(m[k]), m[k])
	}
	return h.Sum64()
}

// archived waits until everything is archived.
func (b *bench) archived() {
	b.t.Helper()
	stable := b.store.Changes().Stable()
	for deadline := time.Now().Add(20 * time.Second); b.arch.Status().Archived < stable; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatalf("epoch %d is not archived: %+v", stable, b.arch.Status())
		}
	}
}

// restore restores a state, and returns the hash of what a client sees of it.
func (b *bench) restore(target archive.Target) (*Report, uint64, error) {
	b.t.Helper()
	dir := filepath.Join(b.t.TempDir(), "restored")
	r, err := Run(b.t.Context(), Options{Store: b.target, Target: target, History: b.named, Dir: dir, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage()})
	if err != nil {
		for _, name := range []string{dir, dir + partialSuffix} {
			if _, there := os.Stat(name); !errors.Is(there, os.ErrNotExist) {
				b.t.Fatalf("%s was left after %v", name, err)
			}
		}
		return nil, 0, err
	}
	s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: dir, PageSize: 1024, MemoryBytes: 64 << 20}})
	check(b.t, err)
	defer func() { check(b.t, s.Close()) }()
	if s.History().Lineage != r.NewLineage || s.ID() != r.StoreID || r.NewLineage == r.Lineage || s.History().Parent != r.Reached.Epoch {
		b.t.Fatalf("store %x, %+v; report %+v", s.ID(), s.History(), r)
	}
	return r, contents(b.t, s), nil
}

func contents(t *testing.T, s *mvcc.Store) uint64 {
	t.Helper()
	h, err := readContents(s)
	check(t, err)
	return h
}

func readContents(s *mvcc.Store) (uint64, error) {
	x, err := s.Session()
	if err != nil {
		return 0, err
	}
	defer x.Close()
	if _, err := x.OpenSnapshot(0); err != nil {
		return 0, err
	}
	defer x.CloseSnapshot()
	c, err := x.Scan(mvcc.ScanOptions{})
	if err != nil {
		return 0, err
	}
	found := map[string]string{}
	for c.Next() {
		found[string(c.Key())] = string(c.Value())
	}
	return hash(found), c.Err()
}

func (b *bench) lineage() keys.Lineage { return b.history }

// moment is an epoch and its time: the latest of all commits up to it.
type moment struct {
	epoch keys.Epoch
	at    time.Time
}

// randomTarget is a random epoch or time, and the last epoch that belongs to it. It is not ok if it is the time of the last commit.
func (b *bench) randomTarget(times []moment, byTime bool) (target archive.Target, at keys.Epoch, ok bool) {
	one := times[b.rng.IntN(len(times))]
	if !byTime {
		return archive.Target{Epoch: one.epoch}, one.epoch, true
	}
	for _, other := range times {
		if !other.at.After(one.at) {
			at = max(at, other.epoch)
		}
	}
	return archive.Target{Time: one.at}, at, at != times[len(times)-1].epoch
}

// times are the times of the epochs, as the log of the store has them.
func (b *bench) times() (list []moment) {
	b.t.Helper()
	log := b.store.Changes().ReadLog(1, wal.TailMark{})
	defer log.Close()
	running := uint64(0)
	for {
		rec, ok, err := log.Next(b.store.Changes().Stable())
		check(b.t, err)
		if !ok {
			return list
		}
		if len(rec.Body) > 0 {
			h, err := batch.HeaderOf(rec.Body)
			check(b.t, err)
			running = max(running, h.Time)
		}
		list = append(list, moment{rec.Epoch, time.UnixMicro(int64(running))})
	}
}

// TestRestoreEqualsTheModelAtRandomEpochsAndTimes: of 200 random epochs and times, each has in the archive the state of the model, and some
// are restored (all of them with -restore.points=200): whatever epoch or time is restored, the store has the state of then, and no other
// one. The original is closed and opened again meanwhile, and files of the archive are merged.
func TestRestoreEqualsTheModelAtRandomEpochsAndTimes(t *testing.T) {
	testseed.SkipUnderRace(t)
	b := newBench(t)
	b.mergeQuickly()
	for range 3 {
		b.commits(60)
		b.close()
		b.open()
	}
	b.commits(40)
	b.merged()
	times := b.times()
	last := times[len(times)-1]
	for i := range max(*points, randomTargets) {
		target, at, ok := b.randomTarget(times, i%2 == 0)
		if !ok {
			continue // no later commit proves that the archive has all of this time
		}
		replayed, reached, err := b.replayed(archive.Point{}, target)
		check(t, err)
		if replayed != b.state(at) || reached.Epoch > at {
			t.Fatalf("%v: the archive leads to epoch %d, which has another state than epoch %d", &target, reached.Epoch, at)
		}
		if i >= *points {
			continue
		}
		r, got, err := b.restore(target)
		check(t, err)
		if got != b.state(at) || r.Reached.Epoch > at {
			t.Fatalf("%v: restored epoch %d, which has another state than epoch %d", &target, r.Reached.Epoch, at)
		}
	}
	r, got, err := b.restore(archive.Target{})
	check(t, err)
	if got != hash(b.now) || r.Reached.Epoch != last.epoch {
		t.Fatalf("the latest state is of epoch %d, want %d", r.Reached.Epoch, last.epoch)
	}
}
