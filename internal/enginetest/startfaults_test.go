package enginetest

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// startFaults is a store with large values, which is started while the device fails reads.
type startFaults struct {
	fs     *vfs.Mem
	o      mvcc.Options
	want   map[string]string
	tables []page.ID // pages of the allocation map and of the indirection table
	pages  page.ID
	asked  int  // starts with a sound device that said that the table asks to be rebuilt again
	killed bool // the last start that was not refused ended without a close
}

func newStartFaults(t *testing.T) *startFaults {
	f := &startFaults{fs: vfs.NewMem(), want: map[string]string{}}
	f.o = modelOptions(f.fs)
	f.o.Storage.PageSize = 4096
	s := mustReopen(t, f.o)
	for i := range 90 {
		if i == 60 {
			mustCheckpoint(t, s)
		}
		f.put(t, s, i, i)
	}
	for i := 0; i < 60; i += 7 { // blob pages have fragments that are not in use
		f.put(t, s, i, i+1)
	}
	mustClose(t, s)
	f.pages = page.ID(len(readFile(t, f.fs, dataFile)) / f.o.Storage.PageSize)
	f.tables = f.ofType(t, page.TypeArray)
	return f
}

// ofType are the intact pages of a type.
func (f *startFaults) ofType(t *testing.T, want page.Type) (ids []page.ID) {
	t.Helper()
	file := readFile(t, f.fs, dataFile)
	for id := page.ID(2); id < f.pages; id++ {
		p := file[int(id)*f.o.Storage.PageSize:][:f.o.Storage.PageSize]
		if page.Check(p, id) == nil && page.ReadHeader(p).Type == want {
			ids = append(ids, id)
		}
	}
	return ids
}

// put stores one of four kinds of values: in the leaf, in a blob page, in two of them, and in overflow pages.
func (f *startFaults) put(t *testing.T, s *mvcc.Store, key, version int) {
	t.Helper()
	k, v := fmt.Sprintf("key-%03d", key), fmt.Sprint(key, version)+strings.Repeat("v", []int{10, 1500, 3000, 20000}[version%4])
	mustPut(t, s, k, v)
	f.want[k] = v
}

// unreadable is a page that the device cannot read.
func (f *startFaults) unreadable(id page.ID) vfs.Rule {
	return vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Unreadable, Bytes: int(id) * f.o.Storage.PageSize, Err: syscall.EIO}
}

// start opens a copy of the store while the device fails reads; during does something then. It returns what is there afterwards.
func (f *startFaults) start(t *testing.T, fs *vfs.Mem, during func(s *mvcc.Store), rules ...vfs.Rule) (*vfs.Mem, *mvcc.Store) {
	t.Helper()
	fs = fs.Crash(1, vfs.SurviveProcess)
	faulty := vfs.NewFaulty(fs)
	o := f.o
	o.Storage.FS = faulty
	var injected []*vfs.Injected
	for _, r := range rules {
		injected = append(injected, faulty.Inject(r))
	}
	s, err := mvcc.Open(o)
	if err != nil {
		return fs, nil
	}
	for _, r := range injected {
		r.Remove()
	}
	during(s)
	if f.killed = !f.killed; f.killed {
		left := fs.Crash(1, vfs.SurviveAll)
		_ = s.Close()
		return left, s
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return fs, s
}

// mustBeWhole starts a store with a sound device.
func (f *startFaults) mustBeWhole(t *testing.T, fs *vfs.Mem, what string) {
	t.Helper()
	o := f.o
	o.Storage.FS = fs
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatalf("%s: a start with a sound device: %v", what, err)
	}
	if incomplete := s.Recovery().Incomplete; len(incomplete) > 0 {
		t.Errorf("%s: incomplete with a sound device: %q", what, incomplete)
	}
	if strings.Contains(fmt.Sprint(s.Recovery().Repaired), "rebuilt while the device failed reads") {
		f.asked++
	}
	if lost := lostKeys(t, s, f.want); len(lost) > 0 {
		t.Errorf("%s: lost for good: %d values, the first %q; repaired: %.300q", what, len(lost), lost[0], s.Recovery().Repaired)
	}
	for began := time.Now(); s.Stats().Storage.Damage.SkippedPages > 0 && time.Since(began) < 10*time.Second; time.Sleep(time.Millisecond) {
		mustCheckpoint(t, s)
	}
	mustVerify(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestStartsDuringReadFaultsLoseNothing: reads of the data file fail while a store is started, from each of them on, or one page is
// unreadable and another read fails. Large values that this hides are there again after a start with a sound device.
func TestStartsDuringReadFaultsLoseNothing(t *testing.T) {
	testseed.SkipUnderRace(t)
	f := newStartFaults(t)
	if len(f.tables) < 2 {
		t.Fatalf("array pages: %v", f.tables)
	}
	incomplete := 0
	attempt := func(what string, rules ...vfs.Rule) {
		t.Helper()
		left, s := f.start(t, f.fs, func(*mvcc.Store) {}, rules...)
		if s != nil {
			r := s.Recovery()
			if len(r.Incomplete) > 0 {
				incomplete++
			}
			if n := s.Stats().Storage.Damage; n.Repaired != len(r.Repaired) || n.Incomplete != len(r.Incomplete) {
				t.Errorf("%s: counted %+v, reported %+v", what, n, r)
			}
		}
		f.mustBeWhole(t, left, what)
	}
	for k := 3; k < 40; k++ {
		attempt(fmt.Sprint("reads from ", k, " on"), vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Nth: k, Sticky: true, Err: syscall.EIO})
	}
	for _, table := range f.tables {
		for id := 2 + table%3; id < f.pages; id += 3 {
			attempt(fmt.Sprint("pages ", table, " and ", id), f.unreadable(table), f.unreadable(id))
		}
	}
	if incomplete < 20 || f.asked == 0 {
		t.Errorf("%d starts were incomplete, after %d the table asked to be rebuilt again", incomplete, f.asked)
	}
}

// TestAStoreThatWasStartedDuringReadFaultsLosesNothing: what an incomplete start hides is still there when the store was used, and perhaps
// started like that again.
func TestAStoreThatWasStartedDuringReadFaultsLosesNothing(t *testing.T) {
	testseed.SkipUnderRace(t)
	f := newStartFaults(t)
	stored, incomplete := f.want, 0
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 5))
		f.want = maps.Clone(stored)
		fs, what := f.fs, fmt.Sprint("seed ", seed)
		for range 1 + rng.IntN(3) {
			var rules []vfs.Rule
			for _, table := range f.tables {
				if rng.IntN(3) > 0 {
					rules = append(rules, f.unreadable(table))
				}
			}
			for range rng.IntN(4) {
				rules = append(rules, f.unreadable(2+page.ID(rng.IntN(int(f.pages)-2))))
			}
			var s *mvcc.Store
			fs, s = f.start(t, fs, func(s *mvcc.Store) { f.use(t, s, rng) }, rules...)
			if s != nil && len(s.Recovery().Incomplete) > 0 {
				incomplete++
				what += fmt.Sprintf("; %.200q", s.Recovery().Incomplete)
			}
		}
		f.mustBeWhole(t, fs, what)
		if t.Failed() {
			break
		}
	}
	if incomplete < 20 {
		t.Errorf("%d starts were incomplete", incomplete)
	}
}

// use overwrites and deletes keys, and makes checkpoints.
func (f *startFaults) use(t *testing.T, s *mvcc.Store, rng *rand.Rand) {
	t.Helper()
	for range rng.IntN(4) {
		for range rng.IntN(40) {
			if key := rng.IntN(120); rng.IntN(3) > 0 {
				f.put(t, s, key, rng.IntN(1000))
			} else {
				k := fmt.Sprintf("key-%03d", key)
				mustDelete(t, s, k)
				delete(f.want, k)
			}
		}
		if err := s.Checkpoint(t.Context()); err != nil && !asDamage(err) {
			t.Fatal(err)
		}
	}
}

// TestASinglePageOfTheTablesIsRepairedCompletely: it does not need to be read.
func TestASinglePageOfTheTablesIsRepairedCompletely(t *testing.T) {
	f := newStartFaults(t)
	repaired := 0
	for _, table := range f.tables {
		left, s := f.start(t, f.fs, func(*mvcc.Store) {}, f.unreadable(table))
		if s == nil {
			t.Fatalf("page %d: the start is refused", table)
		}
		if r := s.Recovery(); len(r.Incomplete) > 0 {
			t.Errorf("page %d: incomplete: %q", table, r.Incomplete)
		} else if len(r.Repaired) > 0 {
			repaired++
		}
		f.mustBeWhole(t, left, fmt.Sprint("page ", table))
	}
	if repaired < 2 {
		t.Errorf("%d of %v were repaired", repaired, f.tables)
	}
}

// TestAStartReadsAgainWhatTheDeviceFails: with some patience a device that fails for a moment costs nothing.
func TestAStartReadsAgainWhatTheDeviceFails(t *testing.T) {
	f := newStartFaults(t)
	f.o.Storage.StartPatience = 100 * time.Millisecond
	for k := 3; k < 20; k++ {
		_, s := f.start(t, f.fs, func(*mvcc.Store) {},
			vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Nth: k, Err: syscall.EIO}, vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Nth: k + 1, Err: syscall.EIO})
		if s == nil {
			t.Fatalf("read %d: the start is refused", k)
		}
		if r := s.Recovery(); strings.Contains(fmt.Sprint(r.Repaired, r.Incomplete), "rebuilt") { // superblocks have copies, and are written anew from them
			t.Errorf("read %d: repaired %q, incomplete %q", k, r.Repaired, r.Incomplete)
		}
	}
}

// TestAReadOfAStartedStoreDoesNotWaitForTheDevice: only a start tries pages again.
func TestAReadOfAStartedStoreDoesNotWaitForTheDevice(t *testing.T) {
	f := newStartFaults(t)
	faulty := vfs.NewFaulty(f.fs)
	f.o.Storage.FS, f.o.Storage.StartPatience = faulty, 40*time.Second
	s := mustReopen(t, f.o)
	fault := faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Nth: 1, Sticky: true, Err: syscall.EIO})
	began := time.Now()
	if lost := lostKeys(t, s, map[string]string{"key-003": f.want["key-003"]}); len(lost) == 0 || time.Since(began) > 5*time.Second {
		t.Errorf("lost %q after %v", lost, time.Since(began))
	}
	fault.Remove()
	mustClose(t, s)
}

// TestAnIncompleteStartGivesTheSpaceBack: the next start finds out which pages are live.
func TestAnIncompleteStartGivesTheSpaceBack(t *testing.T) {
	f := newStartFaults(t)
	live := func(fs vfs.FS) int {
		o := f.o
		o.Storage.FS = fs
		s := mustReopen(t, o)
		defer s.Close()
		x := mustSession(t, s)
		if _, err := x.DeleteRange(t.Context(), mvcc.RangeDelete{Durability: mvcc.DurabilitySync}); err != nil {
			t.Fatal(err)
		}
		x.Close()
		for range 30 {
			mustCheckpoint(t, s)
			time.Sleep(time.Millisecond)
		}
		return int(s.Stats().Storage.Pages.Live)
	}
	sound := live(f.fs.Crash(1, vfs.SurviveProcess))
	for k := 3; k < 20; k++ {
		left, _ := f.start(t, f.fs, func(s *mvcc.Store) { mustPut(t, s, "more", "value"); mustCheckpoint(t, s) },
			vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Nth: k, Sticky: true, Err: syscall.EIO})
		if n := live(left); n > sound+3 {
			t.Errorf("reads from %d on: %d pages are live when everything is deleted, %d without the faults", k, n, sound)
		}
	}
}

// TestIDsOfHiddenValuesAreNotUsedAgain: a start cannot read the leaves and one page of values, so that it sees neither these values nor
// references to them. Then values are stored, overwritten and deleted.
func TestIDsOfHiddenValuesAreNotUsedAgain(t *testing.T) {
	testseed.SkipUnderRace(t)
	f := newStartFaults(t)
	stored, hidden := f.want, 0
	var rules []vfs.Rule
	for _, id := range append(f.ofType(t, page.TypeLeaf), f.tables...) {
		rules = append(rules, f.unreadable(id))
	}
	for i, id := range f.ofType(t, page.TypeBlobs) {
		f.want = maps.Clone(stored)
		rng := rand.New(rand.NewPCG(uint64(i), 6))
		left, s := f.start(t, f.fs, func(s *mvcc.Store) {
			for i := range 60 {
				f.put(t, s, 200+i, 1+i)
			}
			mustCheckpoint(t, s)
			f.use(t, s, rng)
		}, append(rules, f.unreadable(id))...)
		if s != nil && len(s.Recovery().Incomplete) > 0 {
			hidden++
		}
		f.mustBeWhole(t, left, fmt.Sprint("page ", id))
	}
	if hidden < 5 {
		t.Errorf("%d starts were incomplete", hidden)
	}
}

// TestAnIncompleteStartWritesNothing: the table that could not be read may be intact. If no checkpoint comes before the next start, that
// start finds the store as it was. If both tables are damaged and reads fail late, the one is rebuilt completely and the other is not.
func TestAnIncompleteStartWritesNothing(t *testing.T) {
	f := newStartFaults(t)
	for _, damaged := range [][]page.ID{nil, f.tables} {
		stored := f.fs.Crash(1, vfs.SurviveProcess)
		for _, id := range damaged {
			flip(t, stored, int64(id)*int64(f.o.Storage.PageSize)+100)
		}
		before, incomplete, mixed := readFile(t, stored, dataFile), 0, 0
		// Which read is the last one that succeeds for one table and not for the other depends on the order of the goroutines that read.
		for k, end := 3, 3*int(f.pages); k < end || damaged != nil && mixed == 0 && k < 6*end; k += 1 + k%end/20 {
			fs := stored.Crash(1, vfs.SurviveProcess)
			faulty := vfs.NewFaulty(fs)
			o := f.o
			o.Storage.FS = faulty
			faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Nth: k % end, Sticky: true, Err: syscall.EIO})
			s, err := mvcc.Open(o)
			if err != nil {
				continue
			}
			// A superblock is written anew from its copy, and what is replayed asks for a checkpoint.
			r := s.Recovery()
			if len(r.Incomplete) > 0 && !strings.Contains(fmt.Sprint(r.Repaired), "superblock") && r.Records == 0 {
				incomplete++
				mixed += len(r.Repaired)
				if !bytes.Equal(before, readFile(t, fs, dataFile)) {
					t.Errorf("reads from %d on: the data file has changed; repaired %q, incomplete %q", k, r.Repaired, r.Incomplete)
				}
			}
			_ = s.Close()
		}
		if incomplete < 5 || damaged != nil && mixed == 0 {
			t.Errorf("damaged %v: %d starts were incomplete, with %d repairs", damaged, incomplete, mixed)
		}
	}
}

// moveBlobs fills all free pages with copies of pages of values, as a checkpoint with the number of the newest one does that was killed before its
// superblock. It returns the roots of the tables.
func (f *startFaults) moveBlobs(t *testing.T) (roots []page.ID, moved int) {
	t.Helper()
	f.pages = page.ID(len(readFile(t, f.fs, dataFile)) / f.o.Storage.PageSize)
	f.fs = f.fs.Crash(1, vfs.SurviveProcess)
	p, err := pager.Open(f.fs, dataFile, pager.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	data, err := f.fs.Open(dataFile, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	buf, to := make([]byte, p.PageSize()), page.ID(1)
	for _, id := range f.ofType(t, page.TypeBlobs) {
		for to++; to < p.PageCount() && p.IsLive(to); to++ {
		}
		if !p.IsLive(id) || to >= p.PageCount() {
			continue
		}
		if err := p.ReadPage(id, buf); err != nil {
			t.Fatal(err)
		}
		h := page.ReadHeader(buf)
		h.ID, h.Checkpoint = to, p.Checkpoint()
		page.PutHeader(buf, h)
		page.Seal(buf)
		if _, err := data.WriteAt(buf, int64(to)*int64(len(buf))); err != nil {
			t.Fatal(err)
		}
		moved++
	}
	return []page.ID{p.MapRoot(), p.Blobs().Table.Page}, moved
}

// TestTablesThatAStartCannotReadAreNotReadAgain: a start cannot read the tables, finds values in copies that the durable state does not have, and is
// killed while it writes what it has repaired, or in its first checkpoint. The next start must not look for the values where the
// state had them: other pages are there by now.
func TestTablesThatAStartCannotReadAreNotReadAgain(t *testing.T) {
	testseed.SkipUnderRace(t)
	f := &startFaults{fs: vfs.NewMem(), want: map[string]string{}}
	f.o = modelOptions(f.fs)
	f.o.Storage.PageSize, f.o.Storage.CheckpointWorkers = 4096, 1
	f.o.Storage.MemtableBytes, f.o.Storage.SegmentBytes, f.o.Storage.CheckpointBytes, f.o.GCInterval = 1<<20, 1<<20, 1<<20, time.Hour // no checkpoint but these
	s := mustReopen(t, f.o)
	for i := range 40 {
		f.put(t, s, i, 1)
	}
	mustCheckpoint(t, s)
	for i := range 60 { // their leaves are free in the end
		f.put(t, s, 40+i, 0)
	}
	mustCheckpoint(t, s)
	f.put(t, s, 40, 4)
	mustClose(t, s)
	roots, moved := f.moveBlobs(t)
	killed, repaired := 0, 0
	for k := int64(1); ; k++ {
		fs := f.fs.Crash(1, vfs.SurviveProcess)
		faulty, o := vfs.NewFaulty(fs), f.o
		o.Storage.FS = faulty
		for _, id := range roots {
			faulty.Inject(f.unreadable(id))
		}
		fs.CrashAt(fs.Mutations() + k)
		s, err := mvcc.Open(o)
		if err == nil {
			if n := len(s.Recovery().Repaired); n == 2 {
				repaired++
			}
			_ = s.Checkpoint(t.Context())
		}
		crashed, left := fs.Crashed(), fs.Crash(1, vfs.SurviveAll)
		if s != nil {
			_ = s.Close()
		}
		if !crashed {
			break
		}
		killed++
		f.mustBeWhole(t, left, fmt.Sprint("mutation ", k))
	}
	if t.Logf("%d pages were moved, %d starts were killed, %d were repaired", moved, killed, repaired); moved == 0 || killed < 20 || repaired == 0 {
		t.Error("too few")
	}
}
