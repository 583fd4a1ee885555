package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// abandoning is a store of which one page of the repair tree, or of its mirror, is damaged: the first merge that needs it
// abandons that tree, and the rebuilding of the root ends the other one.
type abandoning struct {
	t     *testing.T
	files image
	want  map[string]string // in the ranges of the pages that were lost
	page  page.ID
	nth   int // the operation that fails
	what  string

	reserve bool // the store has a disk reserve, so that a merge that does not fit is made in steps

	failed  bool              // the store writes no more until it is opened again
	unknown map[string]string // a write at that time, which may have been durable or not
}

// stopped reports whether err says that the superblock could not be written because the disk is full.
func stopped(err error) bool {
	return errors.Is(err, pager.ErrFailed) && strings.Contains(err.Error(), vfs.ErrNoSpace.Error())
}

// eachAbandoned calls do for some of the pages of the two trees, the roots and a leaf of each among them, and for each
// operation, until do reports that there are no more.
func eachAbandoned(t *testing.T, step int, do func(*abandoning) (met bool)) {
	t.Helper()
	files, want := skippingStore(t, 20)
	pages := repairTreePages(t, files.files(t))
	for i := len(pages) - 1; i >= 0; i -= 3 {
		for nth := 1; ; nth += step {
			a := &abandoning{t: t, files: files, want: maps.Clone(want), page: pages[i], nth: nth, what: fmt.Sprintf("page %d, operation %d", pages[i], nth)}
			if !do(a) || t.Failed() {
				break
			}
		}
	}
}

// open opens a copy of the files with the damage. rule fails an operation on the data file from then on.
func (a *abandoning) open(o *mvcc.Options, rule vfs.Rule) (s *mvcc.Store, disk vfs.FS, injected *vfs.Injected) {
	a.t.Helper()
	*o = modelOptions(a.files.files(a.t))
	if a.reserve {
		o.Storage.DiskReserve = storage.DiskReserveDerived
	}
	disk = o.Storage.FS
	flip(a.t, disk, int64(int(a.page)*o.Storage.PageSize+100))
	faulty := vfs.NewFaulty(disk)
	o.Storage.FS = faulty
	rule.Name, rule.Nth = dataFile[strings.LastIndexByte(dataFile, '/')+1:], a.nth
	injected = faulty.Inject(rule)
	s, err := mvcc.Open(*o)
	if err != nil {
		a.t.Fatalf("%s: open: %v", a.what, err)
	}
	return s, disk, injected
}

// write writes to every key of the skipped ranges, and makes a checkpoint. Only a full disk may refuse them. That is final if it was
// the superblock that could not be written.
func (a *abandoning) write(s *mvcc.Store, tag string) {
	a.t.Helper()
	if a.failed {
		return
	}
	x := mustSession(a.t, s)
	defer x.Close()
	for key, old := range a.want {
		value := tag + old
		_, err := put(x, key, value, mvcc.DurabilitySync)
		_, short := errors.AsType[*storage.ShortageError](err)
		switch {
		case err == nil:
			a.want[key] = value
		case stopped(err):
			a.failed, a.unknown = true, map[string]string{key: value}
			return
		case !short:
			a.t.Fatalf("%s: %s: %v", a.what, key, err)
		}
	}
	err := s.Checkpoint(context.Background())
	a.failed = stopped(err)
	if err != nil && !a.failed && !errors.Is(err, vfs.ErrNoSpace) {
		a.t.Fatalf("%s: checkpoint: %v", a.what, err)
	}
}

// load makes a bulk load of every key of the skipped ranges, of others, and of large values, and reports whether it was committed.
// Only a full disk may refuse it, and damage that it is the first to meet.
func (a *abandoning) load(s *mvcc.Store, tag string) bool {
	a.t.Helper()
	if a.failed {
		return false
	}
	loaded := map[string]string{}
	for key, old := range a.want {
		loaded[key] = tag + old
	}
	for i := range 30 {
		loaded[fmt.Sprintf("k%03d", i*7)] = tag + strings.Repeat("l", 100*i)
	}
	_, err := load(s, loaded)
	switch {
	case err == nil:
		maps.Copy(a.want, loaded)
	case stopped(err):
		a.failed, a.unknown = true, loaded
	case !asDamage(err) && !errors.Is(err, vfs.ErrNoSpace):
		a.t.Fatalf("%s: bulk load: %v", a.what, err)
	}
	return err == nil
}

// finish lets the store work without faults, until nothing is skipped, and checks it.
func (a *abandoning) finish(o mvcc.Options, disk vfs.FS) {
	a.t.Helper()
	o.Storage.FS = disk
	s := mustReopen(a.t, o)
	for key := range a.want { // which can be read whatever is lost
		if value, ok := a.unknown[key]; ok {
			if get(a.t, s, key, 0) == value { // all of it was durable, or nothing
				maps.Copy(a.want, a.unknown)
			}
			break
		}
	}
	mustHave(a.t, s, a.want, a.what)
	if err := s.Close(); err != nil {
		a.t.Fatalf("%s: close: %v", a.what, err)
	}
	if !endRepairTree(a.t, o, a.want) {
		a.t.Errorf("%s: pages are still skipped", a.what)
	}
	checkAfterRebuild(a.t, o, a.page, a.want, false)
}

// mustHave checks the values of some keys of a damaged store.
func mustHave(t testing.TB, s *mvcc.Store, want map[string]string, what string) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	for key, value := range want {
		if v, err := x.Get(nil, []byte(key), 0); err != nil || string(v.Data) != value {
			t.Fatalf("%s: %s is %.30q, %v; want %.30q", what, key, v.Data, err, value)
		}
	}
}

// TestFullDiskWhileARepairTreeIsGivenBack fills the disk at each write of the data file while one of the two repair trees is
// abandoned and the other one is given back. No acknowledged write is lost, nothing but the shortage is reported, and with
// space again everything ends as without it: no page and no value stays allocated.
func TestFullDiskWhileARepairTreeIsGivenBack(t *testing.T) {
	testseed.SkipUnderRace(t)
	fired := 0
	for _, sticky := range []bool{false, true} {
		eachAbandoned(t, 3, func(a *abandoning) bool {
			var o mvcc.Options
			s, disk, full := a.open(&o, vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Err: vfs.ErrNoSpace, Sticky: sticky})
			a.write(s, "first ")
			a.write(s, "second ")
			met := full.Fired() > 0
			if met {
				fired++
			}
			full.Remove()
			a.write(s, "third ")
			if err := s.Close(); err != nil && !a.failed && !errors.Is(err, vfs.ErrNoSpace) {
				t.Fatalf("%s: close: %v", a.what, err)
			}
			a.finish(o, disk)
			return met
		})
	}
	if fired < 20 {
		t.Errorf("the disk was full %d times: this tests too little", fired)
	}
}

// TestStepsGiveBackAnAbandonedRepairTree: a merge that does not fit is made in steps, and the first of them frees the abandoned tree. No page
// and no value stays allocated, and none is freed twice.
func TestStepsGiveBackAnAbandonedRepairTree(t *testing.T) {
	testseed.SkipUnderRace(t)
	inSteps := 0
	eachAbandoned(t, 2, func(a *abandoning) bool {
		a.reserve = true
		var o mvcc.Options
		s, disk, full := a.open(&o, vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Err: vfs.ErrNoSpace})
		a.write(s, "first ")
		met := full.Fired() > 0
		if met && !a.failed && s.Stats().Storage.Checkpoints.Finished == 1 { // the checkpoint that met the full disk
			inSteps++
		}
		a.write(s, "second ")
		full.Remove()
		if err := s.Close(); err != nil && !a.failed && !errors.Is(err, vfs.ErrNoSpace) {
			t.Fatalf("%s: close: %v", a.what, err)
		}
		a.finish(o, disk)
		return met
	})
	if inSteps == 0 {
		t.Error("no merge was made in steps: this tests nothing")
	}
}

// TestBulkLoadWhileARepairTreeIsGivenBack makes bulk loads into the skipped ranges, while one of the two repair trees is abandoned
// and the other one is given back, and fills the disk at each write of the data file. A bulk load is there as a whole or not at
// all, and in the end no page and no value stays allocated.
func TestBulkLoadWhileARepairTreeIsGivenBack(t *testing.T) {
	testseed.SkipUnderRace(t)
	fired, loaded := 0, 0
	for _, write := range []bool{false, true} { // a merge meets the damage first, or the bulk load does
		eachAbandoned(t, 11, func(a *abandoning) bool {
			var o mvcc.Options
			s, disk, full := a.open(&o, vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Err: vfs.ErrNoSpace})
			if write {
				a.write(s, "before ")
			}
			for i := range 3 {
				if a.load(s, fmt.Sprint("load ", i, " ")) {
					loaded++
				}
			}
			met := full.Fired() > 0
			if met {
				fired++
			}
			full.Remove()
			committed := a.load(s, "last load ") || a.load(s, "very last load ")
			if !committed && !a.failed {
				t.Errorf("%s: without a fault two bulk loads were refused", a.what)
			}
			if err := s.Close(); err != nil && !a.failed {
				t.Fatalf("%s: close: %v", a.what, err)
			}
			a.finish(o, disk)
			return met
		})
	}
	if fired < 10 || loaded < 10 {
		t.Errorf("the disk was full %d times, %d bulk loads: this tests too little", fired, loaded)
	}
}

// TestAFailedCheckpointLeavesTheMapExact damages an inner node of the repair tree or of its mirror so that it cannot be corrected, and
// fills the disk at each operation. A checkpoint that frees the abandoned tree would leave pages allocated, and fails: what it would have
// freed is live as before. If no checkpoint was committed until the node can be read again, the tree is freed as a whole, and the root of
// the store's tree is rebuilt.
func TestAFailedCheckpointLeavesTheMapExact(t *testing.T) {
	files, want := skippingStore(t, 20)
	pageSize, before, failed := modelOptions(nil).Storage.PageSize, lastCheckpoint(t, files.files(t)), 0
	for _, id := range repairTreePages(t, files.files(t)) {
		if page.ReadHeader(files[dataFile][int(id)*pageSize:]).Type != page.TypeInner {
			continue
		}
		for nth, met := 1, true; met && !t.Failed(); nth += exhaustiveStep {
			a := &abandoning{t: t, files: files, want: maps.Clone(want), page: id, nth: nth, what: fmt.Sprintf("page %d, operation %d", id, nth)}
			var o mvcc.Options
			s, disk, full := a.open(&o, vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Err: vfs.ErrNoSpace, Sticky: true})
			flipMore := func() {
				for i := range 20 {
					flip(t, disk, int64(int(id)*pageSize+101+i))
				}
			}
			flipMore()
			a.write(s, "first ")
			if met = full.Fired() > 0; !met || a.failed || lastCheckpoint(t, disk) != before { // the node is not live any more
				_ = s.Close()
				continue
			}
			flipMore()
			flip(t, disk, int64(int(id)*pageSize+100))             // the node is intact
			a.failed = stopped(s.Checkpoint(context.Background())) // now a checkpoint in the background has ended, too
			full.Remove()
			a.write(s, "second ")
			if err := s.Close(); err != nil && !a.failed {
				t.Fatalf("%s: close: %v", a.what, err)
			}
			failed++
			a.finish(o, disk)
		}
	}
	if failed == 0 {
		t.Error("no checkpoint failed before one was committed: this tests nothing")
	}
}

// lastCheckpoint is the number of the last durable checkpoint.
func lastCheckpoint(t testing.TB, fs vfs.FS) uint64 {
	t.Helper()
	p, err := pager.OpenSnapshot(fs, dataFile)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	return p.Checkpoint()
}
