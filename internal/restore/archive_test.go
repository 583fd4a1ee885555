package restore

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// replayed is the hash of the state that the archive has at a target, without a store.
func (b *bench) replayed(base archive.Point, target archive.Target) (uint64, archive.Point, error) {
	b.t.Helper()
	plan, err := archive.NewPlan(b.t.Context(), b.target, b.lineage(), base, target, "")
	if err != nil {
		return 0, archive.Point{}, err
	}
	state := map[string]string{}
	var r batch.Reader
	reached, err := plan.Replay(b.t.Context(), func(rec archive.Record) error {
		if len(rec.Body) == 0 {
			return nil
		}
		if err := r.Read(rec.Body); err != nil {
			return err
		}
		for r.Next() {
			key := string(keys.User(r.Key))
			switch {
			case keys.SpaceOf(r.Key) != keys.SpaceUser:
			case r.Kind.HasValue():
				state[key] = string(r.Value)
			default:
				delete(state, key)
			}
		}
		return r.Err()
	})
	return hash(state), reached, err
}

// whole checks that the archive has everything, from the first epoch on.
func (b *bench) whole() {
	b.t.Helper()
	b.archived()
	got, reached, err := b.replayed(archive.Point{}, archive.Target{})
	check(b.t, err)
	if want := b.state(reached.Epoch); got != want || want != hash(b.now) {
		b.t.Fatalf("the archive has another state at epoch %d", reached.Epoch)
	}
}

// objects are the archive files.
func (b *bench) objects() (names []string) {
	check(b.t, b.target.List(b.t.Context(), b.lineage().String()+"/log/", func(o objectstore.Object) error {
		names = append(names, o.Name)
		return nil
	}))
	return names
}

// TestNothingIsMissingAfterACrashAtAnyOperation: the archiver is ended at each operation of the target, with an answer that is lost or
// without one, and begins again: the archive has every epoch once.
func TestNothingIsMissingAfterACrashAtAnyOperation(t *testing.T) {
	b := newBench(t)
	for _, kind := range []objectstore.FaultKind{objectstore.FailForGood, objectstore.FailAfter} {
		for n := 1; ; n += exhaustiveStep {
			b.stop()
			rule := b.target.Inject(objectstore.Fault{Nth: n, Sticky: kind == objectstore.FailForGood, Kind: kind})
			b.archive()
			b.commits(3)
			for deadline := time.Now().Add(10 * time.Second); b.target.Fired(rule) == 0 && b.arch.Status().Archived < b.store.Changes().Stable() && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
			b.stop()
			fired := b.target.Fired(rule) > 0
			b.target.Heal()
			b.archive()
			if !fired {
				break
			}
		}
		b.whole()
	}
}

// TestTargetThatFailsInAnyWayDelaysTheArchive: whatever a target does, the holder stays until the file is there, and the archive is
// whole once the target has recovered.
func TestTargetThatFailsInAnyWayDelaysTheArchive(t *testing.T) {
	b := newBench(t)
	b.commits(5)
	b.archived()
	slow := make(chan struct{})
	for name, fault := range map[string]objectstore.Fault{
		"fails":          {Sticky: true, Nth: 1, Kind: objectstore.FailForNow},
		"loses answers":  {Op: objectstore.OpCreate, Nth: 1, Kind: objectstore.FailAfter},
		"says it exists": {Op: objectstore.OpCreate, Nth: 1, Kind: objectstore.FailExists},
		"stores half":    {Op: objectstore.OpCreate, Nth: 1, Kind: objectstore.CreatePartial},
		"stores nothing": {Op: objectstore.OpCreate, Nth: 1, Kind: objectstore.CreateNothing},
		"breaks reads":   {Op: objectstore.OpRead, Nth: 1, Kind: objectstore.ReadShort, Bytes: 5},
		"lists late":     {Op: objectstore.OpList, Nth: 1, Kind: objectstore.ListLate, Prefix: b.lineage().String() + "/log"},
		"is slow":        {Op: objectstore.OpCreate, Nth: 1, Kind: objectstore.Slow, Until: slow},
	} {
		before := b.arch.Status().Archived
		rule := b.target.Inject(fault)
		b.commits(4)
		if fault.Kind == objectstore.ListLate { // a start that finds an older file writes the same records again
			b.archived()
			b.stop()
			b.archive()
			b.archived()
			b.target.Heal()
			b.whole()
			continue
		}
		for deadline := time.Now().Add(10 * time.Second); b.target.Fired(rule) == 0; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: the fault was not injected", name)
			}
		}
		if s := b.arch.Status(); fault.Sticky && s.Archived != before {
			t.Fatalf("%s: %+v", name, s)
		}
		if fault.Kind == objectstore.Slow {
			b.commits(4) // writers do not wait
			close(slow)
		}
		b.target.Heal()
		b.whole()
	}
}

// TestLogIsHeldUntilItIsArchived: while the target fails, checkpoints keep the segments, and a crash of the archiver changes nothing.
func TestLogIsHeldUntilItIsArchived(t *testing.T) {
	b := newBench(t)
	b.close()
	b.age, b.fileBytes = 0, 1<<20 // nothing but the archiver holds the log, and a file has several segments
	b.open()
	b.commits(20)
	b.archived()
	b.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Kind: objectstore.FailForGood})
	for range 4 {
		b.commits(150)
		check(t, b.store.Checkpoint(t.Context()))
	}
	b.close() // with a last checkpoint
	b.target.Heal()
	b.open()
	b.commits(5)
	b.whole()
	if s := b.arch.Status(); s.Breaks != 0 {
		t.Fatalf("the archive has a gap: %+v", s.Break)
	}
	check(t, b.store.Checkpoint(t.Context()))
	if oldest := b.store.Changes().OldestInLog(); oldest == 1 {
		t.Fatal("the log was never given back")
	}
}

// TestDamageOfTheLastRecordThatIsArchivedIsAGap: a start finds that the log cannot be read where the archive ends. The archive goes on
// after a gap, instead of trying again for ever, while the whole log is kept for it.
func TestDamageOfTheLastRecordThatIsArchivedIsAGap(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	b.stop()
	end := b.arch.Status().Archived
	b.commits(400) // several segments, which are not archived
	b.close()
	b.damageRecord(end)
	b.open()
	b.commits(5)
	b.archived()
	if s := b.arch.Status(); s.Breaks != 1 || s.Break.First <= end {
		t.Fatalf("the gap is not noted: %+v", s)
	}
}

// damageRecord flips a bit in the log's record of an epoch.
func (b *bench) damageRecord(e keys.Epoch) {
	b.t.Helper()
	fs := vfs.NewOS()
	segments, err := wal.Segments(fs, b.dir)
	check(b.t, err)
	for _, s := range segments {
		check(b.t, wal.ReadSegment(fs, s, func(r wal.Record) error {
			if r.Epoch != e || !r.HoldsEpoch() {
				return nil
			}
			f, err := fs.Open(s.File, vfs.ReadWrite)
			check(b.t, err)
			_, err = f.WriteAt([]byte{r.Body[0] ^ 1}, r.Offset+24)
			check(b.t, errors.Join(err, f.Close()))
			return nil
		}))
	}
}

// TestLogThatTheDeviceCannotReadIsAGap: while the archiver runs, and at its start. Otherwise the whole log would be kept for it for ever.
func TestLogThatTheDeviceCannotReadIsAGap(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running=%v", running), func(t *testing.T) {
			b := newBench(t)
			b.close()
			faulty := vfs.NewFaulty(vfs.NewOS())
			b.fs, b.age = faulty, 0
			b.open()
			b.commits(20)
			b.archived()
			end := b.arch.Status().Archived
			if !running {
				b.stop()
			}
			faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: filepath.Base(b.segmentOf(end))})
			b.commits(400) // several segments
			if !running {
				b.archive()
			}
			b.archived()
			if s := b.arch.Status(); s.Breaks != 1 || s.Break.First <= end {
				t.Fatalf("the gap is not noted: %+v", s)
			}
			check(t, b.store.Checkpoint(t.Context()))
			if oldest := b.store.Changes().OldestInLog(); oldest <= end {
				t.Fatalf("the log is kept from epoch %d on", oldest)
			}
		})
	}
}

// segmentOf is the file of the log's segment that has an epoch.
func (b *bench) segmentOf(e keys.Epoch) (file string) {
	b.t.Helper()
	segments, err := wal.Segments(vfs.NewOS(), b.dir)
	check(b.t, err)
	for _, s := range segments {
		if s.First <= e {
			file = s.File
		}
	}
	return file
}

// TestGapIsNeverCrossed: when the hold is dropped before the log is archived, what follows is not linked to what is before. Neither
// side is lost, and nothing between can be restored.
func TestGapIsNeverCrossed(t *testing.T) {
	b := newBench(t)
	b.close()
	b.age, b.yields = 0, true
	b.open()
	b.commits(20)
	b.archived()
	before, end := hash(b.now), b.arch.Status().Archived
	b.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Kind: objectstore.FailForGood})
	for b.store.Changes().OldestInLog() <= end+50 {
		b.commits(50)
		check(t, b.store.Checkpoint(t.Context()))
		if h := b.store.Changes().LogHolder(archive.HolderName); h != nil {
			h.Release() // as a full disk does
		}
	}
	b.target.Heal()
	b.commits(5)
	b.archived()
	if s := b.arch.Status(); s.Breaks == 0 || s.Break.First <= end {
		t.Fatalf("no gap was noticed: %+v", s)
	}
	last := b.arch.Status().Archived
	missing := new(archive.MissingError)
	for _, target := range []archive.Target{{}, {Epoch: last}, {Time: time.Now()}} {
		if _, _, err := b.replayed(archive.Point{}, target); !errors.As(err, &missing) || missing.From > b.arch.Status().Break.First {
			t.Fatalf("%v: %v", &target, err)
		}
	}
	if _, _, err := b.restore(archive.Target{Epoch: last}); !Unreachable(err) {
		t.Fatal(err)
	}
	got, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: end})
	check(t, err)
	if got != before {
		t.Fatal("what is before the gap is another state")
	}
	if _, _, err := b.replayed(archive.Point{Epoch: b.arch.Status().Break.First}, archive.Target{Epoch: last}); err != nil {
		t.Fatalf("from a base after the gap: %v", err)
	}
}

// TestGapWithoutAMissingEpochIsSeen: a server that ran without its archive has given up the last record that is archived, and no other one. The
// archive begins anew with the next epoch, because nothing tells that the two belong together, and says so, also after a restart.
func TestGapWithoutAMissingEpochIsSeen(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	b.close()
	end := b.arch.Status().Archived
	b.age = 0
	o := b.options(b.dir)
	o.Storage.ChangeLog = storage.ChangeLog{}
	s, err := mvcc.Open(o)
	check(t, err)
	b.store, b.stop = s, func() {}
	b.commits(3)
	check(t, s.Checkpoint(t.Context()))
	b.close()
	b.open()
	b.commits(3)
	b.archived()
	first := b.store.Changes().OldestInLog()
	if s := b.arch.Status(); s.Breaks != 1 || s.Break.First != end+1 || first != end+1 {
		t.Fatalf("the archive ended at epoch %d, and the log begins at epoch %d: %+v", end, first, s)
	}
	b.close()
	b.open()
	b.commits(1)
	b.archived()
	list, err := b.arch.Intervals(t.Context())
	check(t, err)
	if len(list) != 2 || list[0].Last != end || list[1].First != end+1 {
		t.Fatalf("the archive has the intervals %+v, and begins anew after epoch %d", list, end)
	}
	missing := new(archive.MissingError)
	if _, _, err := b.replayed(archive.Point{}, archive.Target{}); !errors.As(err, &missing) {
		t.Fatal(err)
	}
}

// TestBulkLoadThatIsNotKeptEndsTheChain: what a bulk load wrote is not in the log. If nothing has kept it until it was archived, no plan leads
// across it.
func TestBulkLoadThatIsNotKeptEndsTheChain(t *testing.T) {
	b := newBench(t)
	b.close()
	b.forgetLoads = true
	b.open()
	b.commits(10)
	b.archived()
	end := b.arch.Status().Archived
	load, err := b.store.BeginBulkLoad()
	check(t, err)
	check(t, load.Add([]byte("loaded"), []byte("value")))
	done, err := load.Commit(t.Context())
	check(t, err)
	check(t, load.Close())
	b.now["loaded"] = "value"
	b.commits(10)
	b.archived()
	missing := new(archive.MissingError)
	if _, _, err := b.replayed(archive.Point{}, archive.Target{}); !errors.As(err, &missing) || missing.From > done.Epoch || missing.Through < done.Epoch || missing.Latest.Epoch < end || !strings.Contains(err.Error(), "a bulk load is before it") {
		t.Fatalf("bulk load at epoch %d: %v", done.Epoch, err)
	}
	if _, _, err := b.replayed(archive.Point{Epoch: done.Epoch}, archive.Target{}); err != nil {
		t.Fatalf("from a base with the load: %v", err)
	}
	b.close()
	b.open()
	b.commits(3)
	b.archived()
	if _, _, err := b.replayed(archive.Point{Epoch: done.Epoch}, archive.Target{}); err != nil {
		t.Fatalf("after a restart: %v", err)
	}
}

// TestRestoreTakesTheNewestBackupBeforeTheTarget: with backups, states after a bulk load and after a gap can be restored, and a backup
// after the target is not used.
func TestRestoreTakesTheNewestBackupBeforeTheTarget(t *testing.T) {
	testseed.SkipUnderRace(t)
	b := newBench(t)
	b.commits(15)
	b.archived()
	early := b.arch.Status().Archived
	for round := range 2 {
		load, err := b.store.BeginBulkLoad()
		check(t, err)
		key := fmt.Sprintf("loaded %d", round)
		check(t, load.Add([]byte(key), []byte("value")))
		done, err := load.Commit(t.Context())
		check(t, errors.Join(err, load.Close()))
		b.now[key] = "value"
		b.states[done.Epoch] = hash(b.now)
		b.commits(5)
		m, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
		check(t, err)
		b.commits(15)
		b.archived()
		for _, at := range []keys.Epoch{keys.Epoch(m.State.Epoch), keys.Epoch(m.State.Epoch) + 7, b.arch.Status().Archived} {
			r, got, err := b.restore(archive.Target{Epoch: at})
			check(t, err)
			if got != b.state(at) || r.Base.ID != m.ID || r.Reached.Epoch != at {
				t.Fatalf("round %d: epoch %d is restored from %q as epoch %d with another state", round, at, r.Base.ID, r.Reached.Epoch)
			}
		}
	}
	if r, got, err := b.restore(archive.Target{Epoch: early - 3}); err != nil || got != b.state(early-3) || r.Base.ID != "" {
		t.Fatalf("an epoch before all backups: %v", err)
	}
}

// TestRestoreGoesBackToABackupThatIsWhole: if a part of the newest backup is damaged or missing, the one before it and the log lead to the same state.
// A drill fails, and so does a restore that has no other way.
func TestRestoreGoesBackToABackupThatIsWhole(t *testing.T) {
	b := newBench(t)
	b.commits(15)
	whole, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(15)
	base, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(15)
	m, err := backup.Create(t.Context(), b.store, b.target, backup.Options{Base: base.ID})
	check(t, err)
	b.commits(15)
	b.archived()
	at := b.arch.Status().Archived
	part := func(m *backup.Manifest) string { return b.lineage().String() + "/base/parts/" + m.Parts[0].SHA256 }
	for _, round := range []struct {
		name string
		do   func()
		from string
	}{
		{"all are whole", func() {}, m.ID},
		{"a part is damaged", func() {
			b.target.Inject(objectstore.Fault{Op: objectstore.OpRead, Prefix: part(m), Kind: objectstore.ReadFlipped, Bytes: 100, Sticky: true})
		}, base.ID},
		{"a part is missing", func() { check(t, b.target.Delete(t.Context(), part(base))) }, whole.ID},
		{"all are damaged, the archive has everything", func() { check(t, b.target.Delete(t.Context(), part(whole))) }, ""},
	} {
		round.do()
		r, got, err := b.restore(archive.Target{Epoch: at})
		check(t, err)
		if got != b.state(at) || r.Base.ID != round.from || r.Reached.Epoch != at {
			t.Fatalf("%s: epoch %d is restored from %q as epoch %d with another state", round.name, at, r.Base.ID, r.Reached.Epoch)
		}
		if _, err := b.drill(nil); (err != nil) != (round.from != m.ID) {
			t.Fatalf("%s: a drill: %v", round.name, err)
		}
	}
	check(t, b.target.Delete(t.Context(), b.objects()[0])) // the first commits
	if _, _, err := b.restore(archive.Target{Epoch: at}); !errors.Is(err, backup.ErrDamaged) || !strings.Contains(err.Error(), m.ID) {
		t.Fatalf("nothing is whole: %v", err)
	}
}

// TestFileOfAnotherHistoryIsNotJoined: a file with the right name, of the same lineage, whose link is another record, is not part of a
// plan, whatever its epochs are.
func TestFileOfAnotherHistoryIsNotJoined(t *testing.T) {
	store, err := objectstore.Open("file://"+t.TempDir(), objectstore.Options{})
	check(t, err)
	lineage := keys.Lineage{1}
	w := archive.NewWriter()
	create := func(h archive.Header, epochs ...keys.Epoch) archive.Info {
		w.Reset(h)
		for _, e := range epochs {
			check(t, w.Append(&archive.Record{Epoch: e}))
		}
		info, data := w.Finish()
		check(t, store.Create(t.Context(), lineage.String()+"/log/"+archive.FileName(info.First, info.Last.Epoch), objectstore.Bytes(data)))
		return info
	}
	first := create(archive.Header{Lineage: lineage, First: 1, Begin: archive.BeginsFirst, Level: 2}, 1, 2)
	other := first.Last
	other.CRC++
	create(archive.Header{Lineage: lineage, First: 3, Link: other, Level: 2}, 3, 4)
	missing := new(archive.MissingError)
	for _, target := range []archive.Target{{}, {Epoch: 4}} {
		if _, err := archive.NewPlan(t.Context(), store, lineage, archive.Point{}, target, ""); !errors.As(err, &missing) || missing.Latest.Epoch != 2 || !strings.Contains(err.Error(), "follows") {
			t.Fatalf("%v: %v", &target, err)
		}
	}
	create(archive.Header{Lineage: lineage, First: 3, Link: first.Last, Level: 2}, 3, 4, 5)
	if plan, err := archive.NewPlan(t.Context(), store, lineage, archive.Point{}, archive.Target{Epoch: 5}, ""); err != nil || len(plan.Files) != 2 {
		t.Fatalf("with the right file: %v", err)
	}
}

// TestEachLostOrDamagedFileIsNamed: a plan without one file, or with any class of its bytes damaged, is an error that says so. The
// history never ends earlier in silence.
func TestEachLostOrDamagedFileIsNamed(t *testing.T) {
	b := newBench(t)
	for len(b.objects()) < 4 {
		b.commits(5)
		b.archived()
	}
	stable := b.arch.Status().Archived
	b.close()
	for _, name := range b.objects() {
		r, err := b.target.Read(t.Context(), name, 0, -1)
		check(t, err)
		data, err := io.ReadAll(r)
		check(t, errors.Join(err, r.Close()))
		check(t, b.target.Delete(t.Context(), name))
		if _, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: stable}); !Unreachable(err) {
			t.Fatalf("without %s: %v", name, err)
		}
		for _, at := range []int{3, 9, 20, 35, 45, 61, 70, 78, 82, 90, 100, len(data) / 2, len(data) - 200, len(data) - 190, len(data) - 150, len(data) - 90, len(data) - 50, len(data) - 20, len(data) - 2} {
			spoiled := bytes.Clone(data)
			spoiled[at] ^= 0x10
			check(t, b.target.Create(t.Context(), name, objectstore.Bytes(spoiled)))
			_, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: stable})
			if !errors.Is(err, archive.ErrDamaged) && !errors.Is(err, archive.ErrNewerFormat) || !strings.Contains(err.Error(), path.Base(name)) {
				t.Fatalf("%s, byte %d of %d: %v", name, at, len(data), err)
			}
			check(t, b.target.Delete(t.Context(), name))
		}
		check(t, b.target.Create(t.Context(), name, objectstore.Bytes(data)))
	}
	got, _, err := b.replayed(archive.Point{}, archive.Target{Epoch: stable})
	check(t, err)
	if got != hash(b.now) {
		t.Fatal("the mended archive has another state")
	}
}

// TestTargetThatIsNotArchivedIsNotRestored: an epoch or a time after the end of the archive is an error, and nothing is left.
func TestTargetThatIsNotArchivedIsNotRestored(t *testing.T) {
	b := newBench(t)
	b.commits(10)
	b.archived()
	end := b.arch.Status().Archived
	for _, target := range []archive.Target{{Epoch: end + 1}, {Time: time.Now().Add(time.Hour)}} {
		missing := new(archive.MissingError)
		if _, _, err := b.restore(target); !errors.As(err, &missing) || missing.Latest.Epoch != end {
			t.Fatalf("%v: %v", &target, err)
		}
	}
	base := Base{Point: archive.Point{Epoch: end}, ID: "later"}
	if best, found := newest([]Base{base}, &archive.Target{Epoch: end - 1}); found {
		t.Fatalf("base %+v is after the target", best)
	}
	if err := noBase([]Base{base}, archive.Target{Epoch: 1}); !Unreachable(err) || !strings.Contains(err.Error(), fmt.Sprint(end)) {
		t.Fatal(err)
	}
}

// TestRestoredStoreIsAnotherOne: original and restored store both go on and are archived to the same place: each under its own
// lineage, and each archive refuses the files of the other.
func TestRestoredStoreIsAnotherOne(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	dir := filepath.Join(t.TempDir(), "fork")
	r, err := Run(t.Context(), Options{Store: b.target, Dir: dir, PageSize: 1024, Memory: 64 << 20})
	check(t, err)
	b.commits(20)
	b.whole()
	original, kept := b.lineage(), b.objects()
	fork := &bench{t: t, dir: dir, target: b.target, rng: b.rng, now: map[string]string{}, states: map[keys.Epoch]uint64{}}
	fork.open()
	fork.commits(20)
	fork.archived()
	first := fork.arch.Status().Archived
	fork.close()
	var theirs string
	check(t, b.target.List(t.Context(), r.NewLineage.String()+"/log/", func(o objectstore.Object) error {
		theirs = o.Name
		return nil
	}))
	if theirs == "" || first <= r.Reached.Epoch {
		t.Fatalf("the fork was not archived: %q, epoch %d", theirs, first)
	}
	if now := b.objects(); len(now) < len(kept) {
		t.Fatal("the fork has changed the archive of the original")
	}
	src, err := b.target.Read(t.Context(), theirs, 0, -1)
	check(t, err)
	data, err := io.ReadAll(src)
	check(t, errors.Join(err, src.Close()))
	b.stop()
	check(t, b.target.Create(t.Context(), original.String()+"/log/"+path.Base(theirs), objectstore.Bytes(data)))
	b.archive()
	b.refused("belongs to lineage " + r.NewLineage.String())
}

// refused waits until the archiver refuses to go on.
func (b *bench) refused(why string) {
	b.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		s := b.arch.Status()
		if s.Refused() && strings.Contains(s.Err.Error(), why) {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("not refused because of %q: %+v", why, s)
		}
	}
}

// TestCopyThatGoesOnByItselfIsRefused: an old image of the data directory lacks durable commits, and one that has gone on by itself has
// other ones. Neither may continue the archive.
func TestCopyThatGoesOnByItselfIsRefused(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	b.close()
	image := filepath.Join(t.TempDir(), "image")
	check(t, os.CopyFS(image, os.DirFS(b.dir)))
	b.open()
	b.commits(5)
	b.archived()
	b.close()
	end := b.objects()
	b.dir = image
	b.open()
	b.refused("ends at epoch")
	b.commits(30)
	b.refused("has gone on by itself")
	if now := b.objects(); len(now) != len(end) {
		t.Fatalf("%d files, %d before the copy", len(now), len(end))
	}
}

// TestHoldsAndTokensDoNotComeBack: the restored store has neither the holds nor the tokens of then, unless tokens are kept.
func TestHoldsAndTokensDoNotComeBack(t *testing.T) {
	b := newBench(t)
	x := b.store.OwnSession()
	w := &mvcc.Write{Durability: mvcc.DurabilitySync}
	w.SetOwn()
	w.Batch.SetRecord(keys.SpaceSystem, []byte{keys.SystemToken, 1, 2, 3}, []byte("token"))
	w.Batch.SetRecord(keys.SpaceSystem, []byte{keys.SystemHold, 0, 0, 0, 0, 0, 0, 0, 9}, make([]byte, 16))
	w.Batch.SetRecord(keys.SpaceSystem, []byte{keys.SystemHold}, make([]byte, 8)) // up to which epoch records of holds mean nothing: it is no hold
	epoch, err := x.Commit(t.Context(), w)
	check(t, err)
	check(t, b.store.Wait(t.Context(), epoch, mvcc.DurabilitySync))
	x.Close()
	b.archived()
	for _, keep := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "db")
		r, err := Run(t.Context(), Options{Store: b.target, Dir: dir, PageSize: 1024, Memory: 64 << 20, KeepTokens: keep})
		check(t, err)
		s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: dir, PageSize: 1024, MemoryBytes: 64 << 20}})
		check(t, err)
		found := map[byte]int{}
		x := s.OwnSession()
		check(t, x.ScanSystem(t.Context(), []byte{0}, nil, func(key, _ []byte, _ keys.Epoch) bool {
			found[key[0]]++
			return true
		}))
		x.Close()
		check(t, s.Close())
		want := 0
		if keep {
			want = 1
		}
		if found[keys.SystemToken] != want || found[keys.SystemHold] != 0 || r.Holds != 1 || r.Tokens != 1-want {
			t.Fatalf("keep %v: %v, report %+v", keep, found, r)
		}
	}
}
