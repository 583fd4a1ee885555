package restore

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// load bulk loads some keys, and notes the state after it.
func (b *bench) load(n int, valueBytes int) mvcc.BulkLoaded {
	b.t.Helper()
	load, err := b.store.BeginBulkLoad()
	check(b.t, err)
	for range n {
		key := fmt.Sprintf("key %03d", b.rng.IntN(400))
		value := fmt.Sprintf("loaded %d %s", b.rng.Uint64(), strings.Repeat("y", b.rng.IntN(valueBytes)))
		check(b.t, load.Add([]byte(key), []byte(value)))
		b.now[key] = value
	}
	done, err := load.Commit(b.t.Context())
	check(b.t, errors.Join(err, load.Close()))
	b.states[done.Epoch] = hash(b.now)
	return done
}

// TestBulkLoadsAreInTheArchive: a bulk load does not end the chain of an archive. Each state before it, at its epoch and after it is restored
// from the archive alone.
func TestBulkLoadsAreInTheArchive(t *testing.T) {
	testseed.SkipUnderRace(t)
	b := newBench(t)
	b.mergeQuickly()
	b.commits(10)
	var loads []keys.Epoch
	for i := range 4 {
		loads = append(loads, b.load(100, 800).Epoch)
		if i == 1 { // at once after another one
			loads = append(loads, b.load(30, 20_000).Epoch)
		}
		if i == 2 {
			b.close()
			b.open()
		}
		b.commits(10)
	}
	b.merged()
	if s := b.arch.Status(); s.Breaks != 0 || s.Break != nil {
		t.Fatalf("the archive has begun anew: %+v", s.Break)
	}
	times := b.times()
	for i := 0; i < len(times); i += exhaustiveStep {
		one := times[i]
		replayed, reached, err := b.replayed(archive.Point{}, archive.Target{Epoch: one.epoch})
		check(t, err)
		if replayed != b.state(one.epoch) || reached.Epoch > one.epoch {
			t.Fatalf("the archive leads to epoch %d, which has another state than epoch %d", reached.Epoch, one.epoch)
		}
	}
	for _, e := range loads {
		for _, at := range []keys.Epoch{e - 1, e, e + 3} {
			r, got, err := b.restore(archive.Target{Epoch: at})
			check(t, err)
			if got != b.state(at) || r.Reached.Epoch > at {
				t.Fatalf("epoch %d is restored as epoch %d, with another state", at, r.Reached.Epoch)
			}
		}
	}
	b.archive()
	awaitNoHolds(b)
}

// TestBulkLoadIsArchivedAfterACrashAtAnyOperation: the archiver is ended at each operation of the target, with an answer that is lost or
// without one, while a bulk load and what follows it are archived, and begins again: nothing is missing, and nothing is kept for ever.
func TestBulkLoadIsArchivedAfterACrashAtAnyOperation(t *testing.T) {
	b := newBench(t)
	b.commits(3)
	for _, kind := range []objectstore.FaultKind{objectstore.FailForGood, objectstore.FailAfter} {
		for n, fired := 1, true; fired; n += exhaustiveStep {
			b.stop()
			b.load(12, 3000) // two objects
			b.commits(2)
			rule := b.target.Inject(objectstore.Fault{Nth: n, Sticky: kind == objectstore.FailForGood, Kind: kind})
			b.archive()
			for deadline := time.Now().Add(10 * time.Second); b.target.Fired(rule) == 0 && b.arch.Status().Archived < b.store.Changes().Stable() && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
			b.stop()
			fired = b.target.Fired(rule) > 0
			b.target.Heal()
			b.fileBytes = int64(6+n%5) << 10 // another division of the same entries
			b.archive()
			b.archived()
			if s := b.arch.Status(); s.Breaks != 0 {
				t.Fatalf("operation %d: the archive has begun anew: %+v", n, s.Break)
			}
		}
		b.whole()
	}
	awaitNoHolds(b)
}

// awaitNoHolds waits until no bulk load is kept.
func awaitNoHolds(b *bench) {
	b.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); len(b.store.Holds()) > 0; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatalf("bulk loads are kept for ever: %+v", b.store.Holds())
		}
	}
}

// TestBulkLoadIsKeptUntilItIsArchived: while the target fails, keys of a bulk load are overwritten and deleted, versions are collected, and
// the store is opened again. Then the archive gets what was loaded. It goes on after a bulk load of which the list of objects alone fills a file.
func TestBulkLoadIsKeptUntilItIsArchived(t *testing.T) {
	b := newBench(t)
	b.commits(5)
	b.archived()
	b.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Kind: objectstore.FailForGood})
	done := b.load(200, 500)
	for range 3 {
		b.commits(60)
		check(t, b.store.Checkpoint(t.Context()))
		b.close()
		b.open()
	}
	if got := b.store.LowWatermark(); got > done.Epoch {
		t.Fatalf("versions before epoch %d were collected, and the bulk load at epoch %d is not archived", got, done.Epoch)
	}
	b.target.Heal()
	b.whole()
	awaitNoHolds(b)
	for _, at := range []keys.Epoch{done.Epoch - 1, done.Epoch, done.Epoch + 20} {
		replayed, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: at})
		check(t, err)
		if replayed != b.state(at) {
			t.Fatalf("the archive has another state at epoch %d", at)
		}
	}
	b.stop()
	b.fileBytes = 1 << 10
	b.archive()
	b.load(150, 500)
	b.commits(1)
	b.archived()
}

// tick waits until the clock of the store has gone on: it is stored once a millisecond, and what is committed meanwhile has one time.
func (b *bench) tick() {
	clock := b.store.Clock()
	for at := clock.Now(); clock.Now() == at; {
		time.Sleep(100 * time.Microsecond)
	}
}

// TestBulkLoadHasItsTime: a restore to the time of a bulk load, or to a later one, has what was loaded, and one to a time before has not.
func TestBulkLoadHasItsTime(t *testing.T) {
	b := newBench(t)
	b.commits(3)
	began := b.times()
	b.stop()
	b.tick()
	done := b.load(50, 100)
	b.tick()
	load, held, _ := b.store.Changes().HeldLoad(began[len(began)-1].epoch, done.Epoch)
	at := time.UnixMicro(int64(load.Time))
	if before := began[len(began)-1].at; !held || !at.After(before) {
		t.Fatalf("%+v is not after %v", load, before)
	}
	b.archive()
	b.commits(1)
	b.archived()
	for at, want := range map[time.Time]uint64{at.Add(-time.Microsecond): b.state(done.Epoch - 1), at: b.state(done.Epoch)} {
		got, reached, err := b.replayed(archive.Point{}, archive.Target{Time: at})
		check(t, err)
		if got != want {
			t.Fatalf("%v leads to epoch %d of %v, the bulk load is of epoch %d", at, reached.Epoch, reached.Time, done.Epoch)
		}
	}
}

// TestBulkLoadThatIsGivenUpEndsTheChain: an operator ends what keeps a bulk load before it is archived. Then the archive begins anew, and says
// why.
func TestBulkLoadThatIsGivenUpEndsTheChain(t *testing.T) {
	b := newBench(t)
	b.commits(5)
	b.archived()
	b.stop()
	done := b.load(200, 500)
	x, err := b.store.Session()
	check(t, err)
	held := b.store.Holds()
	if len(held) != 1 || held[0].Epoch != done.Epoch || !strings.HasPrefix(held[0].Owner, "log archive: bulk load after epoch ") {
		t.Fatalf("%+v", held)
	}
	_, err = x.EndHold(t.Context(), held[0].ID)
	check(t, err)
	x.Close()
	b.archive()
	b.commits(3)
	b.archived()
	if s := b.arch.Status(); s.Breaks != 1 || s.Break.First != done.Epoch+1 || !strings.Contains(s.Break.Reason, fmt.Sprintf("the bulk load at epoch %d is not in the archive", done.Epoch)) {
		t.Fatalf("%+v", s.Break)
	}
}

// TestLogThatIsLostAfterABulkLoadIsAGap: while the entries of a bulk load are uploaded, the log after it is given up. The archive goes on
// after a gap, instead of adding to the file that has the bulk load for ever.
func TestLogThatIsLostAfterABulkLoadIsAGap(t *testing.T) {
	b := newBench(t)
	b.close()
	b.age, b.yields = 0, true
	b.open()
	b.commits(20)
	b.archived()
	answer := make(chan struct{})
	upload := b.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: b.lineage().String() + "/log/load-", Kind: objectstore.Slow, Nth: 1, Until: answer})
	done := b.load(50, 500)
	for deadline := time.Now().Add(20 * time.Second); b.target.Fired(upload) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the bulk load is not uploaded")
		}
	}
	for b.store.Changes().OldestInLog() <= done.Epoch+1 {
		b.commits(50)
		check(t, b.store.Checkpoint(t.Context()))
		if h := b.store.Changes().LogHolder(archive.HolderName); h != nil {
			h.Release() // as a full disk does
		}
	}
	close(answer)
	b.commits(5)
	b.archived()
	s := b.arch.Status()
	if s.Breaks != 1 || s.Break.First <= done.Epoch+1 {
		t.Fatalf("the gap is not noted: %+v", s)
	}
	missing := new(archive.MissingError)
	if _, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: s.Archived}); !errors.As(err, &missing) || missing.From > done.Epoch || missing.Through < done.Epoch {
		t.Fatalf("the gap is crossed, with a bulk load at epoch %d: %v", done.Epoch, err)
	}
	if _, _, err := b.replayed(archive.Point{Epoch: s.Break.First}, archive.Target{Epoch: s.Archived}); err != nil {
		t.Fatalf("from a base after the gap: %v", err)
	}
	b.close()
	b.open()
	b.commits(5)
	b.archived()
	if s := b.arch.Status(); s.Breaks != 0 {
		t.Fatalf("a start begins anew: %+v", s)
	}
	awaitNoHolds(b)
}

// TestBulkLoadThatCannotBeArchivedFillsNoDisk: while the target fails, what is overwritten since a bulk load fills the disk. The log is given up
// then, and so is the bulk load: without the log after it, the archive has no use for it.
func TestBulkLoadThatCannotBeArchivedFillsNoDisk(t *testing.T) {
	b := newBench(t)
	b.close()
	disk := vfs.NewMem()
	b.fs, b.dir, b.age, b.yields, b.reserve = disk, "db", 0, true, storage.DiskReserveDerived
	b.open()
	b.commits(20)
	b.archived()
	b.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Kind: objectstore.FailForGood})
	b.load(50, 500)
	disk.SetCapacity(6 << 20)
	x, err := b.store.Session()
	check(t, err)
	defer x.Close()
	value := bytes.Repeat([]byte("x"), 20_000)
	for accepted, deadline := 0, time.Now().Add(10*time.Second); accepted < 600; {
		var w mvcc.Write
		w.Set([]byte("key"), value)
		if _, err = x.Commit(t.Context(), &w); err == nil {
			accepted++
			continue
		}
		if time.Sleep(time.Millisecond); time.Now().After(deadline) {
			t.Fatalf("%d accepted, %v, holds %+v, oldest %d, pages %+v", accepted, err, b.store.Holds(), b.store.Changes().OldestInLog(), b.store.Stats().Storage.Pages)
		}
	}
	awaitNoHolds(b)
}

// runObjects are the objects with entries of bulk loads.
func (b *bench) runObjects() []string {
	return slices.DeleteFunc(b.objects(), func(name string) bool { return !strings.Contains(name, "/log/load-") })
}

// TestEachLostOrDamagedPartOfABulkLoadIsNamed: without one of its objects, a plan is refused and names the state before the bulk load; with
// any byte of one changed or cut, the restore fails, names the object, and leaves nothing.
func TestEachLostOrDamagedPartOfABulkLoadIsNamed(t *testing.T) {
	b := newBench(t)
	b.commits(5)
	done := b.load(60, 1500)
	b.commits(3)
	b.archived()
	stable := b.arch.Status().Archived
	b.close()
	all := b.runObjects()
	if len(all) < 3 {
		t.Fatalf("%d objects", len(all))
	}
	for _, name := range all[:3] {
		data := b.object(name)
		check(t, b.target.Delete(t.Context(), name))
		missing := new(archive.MissingError)
		if _, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: stable}); !errors.As(err, &missing) || missing.Latest.Epoch >= done.Epoch || missing.Through != done.Epoch || !strings.Contains(err.Error(), path.Base(name)) {
			t.Fatalf("without %s: %v", name, err)
		}
		if got, reached, err := b.replayed(archive.Point{}, archive.Target{Epoch: missing.Latest.Epoch}); err != nil || got != b.state(reached.Epoch) {
			t.Fatalf("the state that was named cannot be restored: %v", err)
		}
		if _, _, err := b.replayed(archive.Point{Epoch: done.Epoch}, archive.Target{Epoch: stable}); err != nil {
			t.Fatalf("from a base with the bulk load: %v", err)
		}
		for at := 0; at < len(data); at += 1 + len(data)/100 {
			spoiled := bytes.Clone(data)
			spoiled[at] ^= 0x10
			b.spoiled(name, spoiled, stable)
		}
		b.spoiled(name, data[:len(data)-1], stable)
		b.spoiled(name, append(bytes.Clone(data), 0), stable)
		b.spoiled(name, b.object(all[3]), stable)
		check(t, b.target.Create(t.Context(), name, objectstore.Bytes(data)))
	}
	got, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: stable})
	check(t, err)
	if got != hash(b.now) {
		t.Fatal("the mended archive has another state")
	}
}

// spoiled checks that a restore with another content of an object fails and names it.
func (b *bench) spoiled(name string, content []byte, at keys.Epoch) {
	b.t.Helper()
	check(b.t, b.target.Create(b.t.Context(), name, objectstore.Bytes(content)))
	_, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: at})
	if !errors.Is(err, archive.ErrDamaged) && !errors.Is(err, archive.ErrNewerFormat) && !Unreachable(err) || !strings.Contains(err.Error(), path.Base(name)) {
		b.t.Fatalf("%s: %v", name, err)
	}
	check(b.t, b.target.Delete(b.t.Context(), name))
}

// TestPruneDeletesPartsOfBulkLoads: with the files, and none that a state after the oldest backup needs.
func TestPruneDeletesPartsOfBulkLoads(t *testing.T) {
	b := newBench(t)
	b.commits(5)
	early := b.load(60, 1500).Epoch
	b.commits(5)
	b.archived()
	old := len(b.runObjects())
	for range 2 {
		b.commits(20)
		b.archived()
	}
	_, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(3)
	late := b.load(60, 1500).Epoch
	b.commits(3)
	b.archived()
	would, _ := b.prune(true)
	did, _ := b.prune(false)
	if would != did || did.Through < early {
		t.Fatalf("%+v, and %+v was to be done", did, would)
	}
	all := b.runObjects()
	for _, name := range all {
		if strings.Contains(name, fmt.Sprintf("load-%016x-", early)) {
			t.Fatalf("%s is left of %d", name, old)
		}
	}
	if len(all) == 0 || old == 0 {
		t.Fatal("nothing is left of the other bulk load")
	}
	_, got, err := b.restore(archive.Target{Epoch: late})
	check(t, err)
	if got != b.state(late) {
		t.Fatal("the later bulk load is another one")
	}
}

// TestBulkLoadLargerThanMemoryIsRestored: its entries are merged while they are read.
func TestBulkLoadLargerThanMemoryIsRestored(t *testing.T) {
	b := newBench(t)
	b.fileBytes = 1 << 20
	b.stop()
	b.archive()
	b.commits(3)
	load, err := b.store.BeginBulkLoad()
	check(t, err)
	value := make([]byte, 700)
	for i := range 14_000 {
		for j := range value {
			value[j] = byte(b.rng.Uint32())
		}
		check(t, load.Add(fmt.Appendf(nil, "key %06d", i), value))
		if i%10_000 == 0 {
			b.now[fmt.Sprintf("key %06d", i)] = string(value)
		}
	}
	done, err := load.Commit(t.Context())
	check(t, errors.Join(err, load.Close()))
	b.commits(3)
	b.archived()
	if n := len(b.runObjects()); n < 8 {
		t.Fatalf("%d objects", n)
	}
	dir := filepath.Join(t.TempDir(), "restored")
	r, err := Run(t.Context(), Options{Store: b.target, Target: archive.Target{}, Dir: dir, PageSize: 4096, Memory: 4 << 20, Lineage: b.lineage()})
	check(t, err)
	if r.Loads != 1 || r.Checkpoints < 2 || r.Reached.Epoch <= done.Epoch {
		t.Fatalf("%+v", r)
	}
	s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: dir, PageSize: 4096, MemoryBytes: 8 << 20}})
	check(t, err)
	defer func() { check(t, s.Close()) }()
	want, err := ContentsOf(t.Context(), b.store)
	check(t, err)
	check(t, compareContents(t.Context(), s, &want))
}
