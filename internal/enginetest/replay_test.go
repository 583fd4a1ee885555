package enginetest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// longLog has the files of a killed store whose checkpoints had stopped: all commits are in the
// log, many times the smallest memory.
func longLog(t testing.TB, commits int) (*vfs.Mem, map[string]string) {
	t.Helper()
	return longLogOn(t, vfs.NewMem(), commits)
}

func longLogOn(t testing.TB, disk *vfs.Mem, commits int) (*vfs.Mem, map[string]string) {
	t.Helper()
	fs := vfs.NewFaulty(disk)
	s, err := mvcc.Open(tiny(fs))
	if err != nil {
		t.Fatal(err)
	}
	fs.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "data.ekv", Err: syscall.ENOSPC})
	want := map[string]string{}
	x := mustSession(t, s)
	for i := range commits {
		k, v := fmt.Sprintf("key-%03d", i*7%500), fmt.Sprintf("%d-%s", i, strings.Repeat("v", i*37%900))
		d := mvcc.DurabilityAsync
		if i%50 == 49 || i == commits-1 {
			d = mvcc.DurabilitySync
		}
		w := mvcc.Write{Durability: d}
		if i%11 == 10 {
			w.Delete([]byte(k))
			delete(want, k)
		} else {
			w.Set([]byte(k), []byte(v))
			want[k] = v
		}
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
	}
	x.Close()
	left := disk.Crash(1, vfs.SurviveAll)
	_ = s.Close() // on a disk that is gone
	return left, want
}

// small is tiny with the least memory: two immutable memtables, and a cache of the same size.
func small(fs vfs.FS) mvcc.Options {
	o := tiny(fs)
	o.Storage.MemoryBytes, o.Storage.CacheBytes = 256<<10, 128<<10
	return o
}

const smallBytes = 256 << 10 // what replay may use of it

// TestReplayOfALongLogStaysWithinMemory: a log that is many times as long as memory is merged while
// it is replayed.
func TestReplayOfALongLogStaysWithinMemory(t *testing.T) {
	testseed.SkipUnderRace(t)
	fs, want := longLog(t, 7000)
	s := mustOpen(t, small(fs))
	r := s.Recovery()
	if r.Bytes < 10*smallBytes {
		t.Fatalf("only %d bytes of log: the test tests nothing", r.Bytes)
	}
	const slack = 16 << 10 // the record that fills a table
	if r.Checkpoints < 5 || r.MemtablePeak > smallBytes+slack {
		t.Errorf("%d checkpoints, memtables took %d bytes, %d are allowed", r.Checkpoints, r.MemtablePeak, smallBytes)
	}
	if r.Records != 7000 || int(r.Epoch) != 7000 {
		t.Errorf("replayed %d records, at epoch %d", r.Records, r.Epoch)
	}
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Error(err)
	}
	mustPut(t, s, "later", "v")
	want["later"] = "v"
	mustClose(t, s)
	if err := equalMaps(want, dump(t, mustOpen(t, small(fs)))); err != nil {
		t.Errorf("after a restart: %v", err)
	}
}

// checked is a context that is canceled after a number of checks.
type checked struct {
	context.Context
	cancel context.CancelFunc
	left   atomic.Int64
}

func (c *checked) Err() error {
	if c.left.Add(-1) == 0 {
		c.cancel()
	}
	return c.Context.Err()
}

// TestReplayEndsWithItsContextAndGoesOnWithTheNextStart: whenever the context ends, also while the
// replay merges, nothing is lost, and the next start does not replay merged commits again.
func TestReplayEndsWithItsContextAndGoesOnWithTheNextStart(t *testing.T) {
	testseed.SkipUnderRace(t)
	fs, want := longLog(t, 3000)
	before := mustReplayed(t, fs, 3000)
	for _, looks := range []int64{1, 2, 700, 701, 702} { // together fewer than there are records
		inner, cancel := context.WithCancel(t.Context())
		ctx := &checked{Context: inner, cancel: cancel}
		ctx.left.Store(looks)
		if _, err := mvcc.OpenContext(ctx, small(fs)); !errors.Is(err, context.Canceled) {
			t.Fatalf("after %d looks: %v", looks, err)
		}
		cancel()
	}
	s := mustOpen(t, small(fs))
	if r := s.Recovery(); r.Records == 0 || r.Records >= before {
		t.Errorf("replayed %d records after several starts that were ended, %d without", r.Records, before)
	}
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Error(err)
	}
}

// mustReplayed returns the number of records that a start on a copy of fs replays.
func mustReplayed(t *testing.T, fs *vfs.Mem, commits uint64) uint64 {
	t.Helper()
	s := mustOpen(t, small(mustRead(t, fs).files(t)))
	records := s.Recovery().Records
	if mustClose(t, s); records != commits {
		t.Fatalf("replayed %d records: the test tests nothing", records)
	}
	return records
}

// TestRecoveryThatMergesSurvivesACrashAtEveryOperation cuts the power at each operation of such a
// recovery, and again in the next recovery, until one completes.
func TestRecoveryThatMergesSurvivesACrashAtEveryOperation(t *testing.T) {
	disk, want := longLog(t, 900)
	files := mustRead(t, disk)
	whole := files.files(t)
	before := whole.Mutations()
	s, err := mvcc.Open(small(whole))
	if err != nil {
		t.Fatal(err)
	}
	if s.Recovery().Checkpoints < 2 {
		t.Fatalf("%+v: the test tests nothing", s.Recovery())
	}
	ops := whole.Mutations() - before
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	step := int64(exhaustiveStep)
	if testing.Short() {
		step = 7
	}
	for k := int64(1); k <= ops; k += step {
		keep := []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll}[k%3]
		fs := files.files(t)
		for try := range int64(3) { // three crashes, each a little later than the one before
			fs.CrashAt(fs.Mutations() + k + try*5)
			if s, err := mvcc.Open(small(fs)); err == nil {
				_ = s.Close()
			} else if !errors.Is(err, vfs.ErrCrashed) {
				t.Fatalf("crash at operation %d of %d, keep %d, try %d: %v", k, ops, keep, try, err)
			}
			fs = fs.Crash(uint64(k+try), keep)
		}
		s := mustOpen(t, small(fs))
		if err := equalMaps(want, dump(t, s)); err != nil {
			t.Fatalf("crash at operation %d of %d, keep %d: %v", k, ops, keep, err)
		}
		mustClose(t, s)
	}
}

// TestDamageFarBackInALongLogIsRefusedAsEver: the commits that were merged before the damage was
// found are correct, nothing is dropped, and the log can be repaired.
func TestDamageFarBackInALongLogIsRefusedAsEver(t *testing.T) {
	fs, _ := longLog(t, 2000)
	files := mustRead(t, fs)
	names := segmentNames(files)
	name := names[len(names)/2]
	files[name][5000] ^= 1
	var refused [2]*storage.CorruptionError
	for i, o := range []mvcc.Options{tiny(files.files(t)), small(files.files(t))} {
		_, err := mvcc.Open(o)
		if !errors.As(err, &refused[i]) || refused[i].File != name {
			t.Fatalf("damage in %s: %v", name, err)
		}
		if i == 1 {
			fs = o.Storage.FS.(*vfs.Mem)
		}
	}
	if !reflect.DeepEqual(refused[0], refused[1]) {
		t.Errorf("with much memory: %v; with little: %v", refused[0], refused[1])
	}
	if got := segmentNames(mustRead(t, fs)); len(got) != len(names) {
		t.Errorf("of %d segments %d are left", len(names), len(got))
	}
	dropped, err := inspect.RepairLog(fs, "db")
	if err != nil || dropped.Cause == nil {
		t.Fatalf("repair: %+v, %v", dropped, err)
	}
	s := mustOpen(t, small(fs))
	if s.Visible() < dropped.From || len(dump(t, s)) == 0 {
		t.Errorf("repaired at epoch %d; dropped from %d", s.Visible(), dropped.From)
	}
}

func segmentNames(files image) (names []string) {
	for name := range files {
		if strings.HasSuffix(name, ".log") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// TestReplaySkipsDamage: damaged pages do not stop a recovery that merges, as they do not stop
// checkpoints.
func TestReplaySkipsDamage(t *testing.T) {
	disk := vfs.NewMem()
	s, err := mvcc.Open(tiny(disk))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 600 {
		mustPut(t, s, fmt.Sprintf("key-%03d", i), "before")
	}
	mustClose(t, s)
	damageUserLeaves(t, disk, 8192)
	fs, want := longLogOn(t, disk, 3000)
	if s, err = mvcc.Open(small(fs)); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if r := s.Recovery(); r.Checkpoints < 2 || r.MemtablePeak > smallBytes+(16<<10) || s.Stats().Storage.Damage.SkippedPages == 0 {
		t.Errorf("%+v, %d skipped pages", r, s.Stats().Storage.Damage.SkippedPages)
	}
	x := mustSession(t, s)
	defer x.Close()
	for i := range 600 {
		k := fmt.Sprintf("key-%03d", i)
		v, err := x.Get(nil, []byte(k), 0)
		if i >= 500 && !asDamage(err) || i < 500 && (err != nil || v.Found != (want[k] != "") || string(v.Data) != want[k]) {
			t.Fatalf("%s: %v %.20q, %v; want %.20q", k, v.Found, v.Data, err, want[k])
		}
	}
}

// TestReplayGoesOnInMemoryOnAFullDisk: a store on a full disk opens with all its commits in memory.
func TestReplayGoesOnInMemoryOnAFullDisk(t *testing.T) {
	disk, want := longLog(t, 1500)
	fs := vfs.NewFaulty(disk)
	full := fs.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "data.ekv", Err: syscall.ENOSPC})
	s := mustOpen(t, small(fs))
	if r := s.Recovery(); full.Fired() == 0 || r.Checkpoints != 0 || r.MemtablePeak < 3*smallBytes {
		t.Errorf("%+v", r)
	}
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Error(err)
	}
	full.Remove()
	x := mustSession(t, s)
	defer x.Close()
	if err := waitFor(func() bool { _, err := put(x, "later", "v", mvcc.DurabilitySync); return err == nil }); err != nil {
		t.Errorf("with room again: %v", err)
	}
}
