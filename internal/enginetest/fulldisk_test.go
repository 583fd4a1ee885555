package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// reserving is tiny with a reserve of disk space.
func reserving(fs vfs.FS) mvcc.Options {
	o := tiny(fs)
	o.Storage.DiskReserve = storage.DiskReserveDerived
	return o
}

const fullDiskBytes = 4 << 20

func numbered(i int) string { return fmt.Sprintf("k%05d", i) }

// fillUntilRefused puts from key first on until the store refuses, adds to want what it holds, and
// returns the key that was refused.
func fillUntilRefused(t *testing.T, s *mvcc.Store, want map[string]string, first int) (refused int) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	value := strings.Repeat("v", 1000)
	for i := first; ; i++ {
		_, err := put(x, numbered(i), value, mvcc.DurabilityAsync)
		if _, short := errors.AsType[*storage.ShortageError](err); short {
			return i
		}
		if err != nil || i > 4*fullDiskBytes/len(value) {
			t.Fatalf("put %d on a disk of %d bytes: %v", i, fullDiskBytes, err)
		}
		want[numbered(i)] = value
	}
}

// fillDisk puts until the store refuses although everything is merged and nothing more can be
// released. A refusal while something is in memory may end with the next checkpoint, without any
// deletion.
func fillDisk(t *testing.T, s *mvcc.Store, want map[string]string) *storage.ShortageError {
	t.Helper()
	for i := 0; ; {
		i = fillUntilRefused(t, s, want, i)
		for range 3 { // the next one releases what the last one freed
			if err := s.Checkpoint(t.Context()); err != nil && !errors.Is(err, vfs.ErrNoSpace) {
				t.Fatal(err)
			}
		}
		if short := s.Shortage(); short != nil {
			return short
		}
	}
}

func mustDelete(t *testing.T, s *mvcc.Store, key string) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	w := mvcc.Write{}
	w.Delete([]byte(key))
	if _, err := commitAndWait(x, &w); err != nil {
		st := s.Stats().Storage
		t.Fatalf("a deletion on a full disk: %v; pages %+v, generations %+v, checkpoints %v, reserve %d", err, st.Pages, st.Generations, s.CheckpointErr(), st.Disk.Reserve)
	}
}

func mustDeleteRange(t *testing.T, s *mvcc.Store, want map[string]string, lower, upper string) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	d, err := x.DeleteRange(context.Background(), mvcc.RangeDelete{Lower: []byte(lower), Upper: []byte(upper)})
	if err == nil {
		err = s.Wait(context.Background(), d.Epoch, mvcc.DurabilitySync)
	}
	if err != nil {
		t.Fatalf("a range deletion on a full disk: %v", err)
	}
	for key := range want {
		if key >= lower && key < upper {
			delete(want, key)
		}
	}
}

// awaitSpace puts until that is accepted again and the shortage is over. It may end and begin again
// while the deletions are being merged.
func awaitSpace(t *testing.T, s *mvcc.Store, key string) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		_, err := put(x, key, "v", mvcc.DurabilitySync)
		if err == nil && s.Shortage() == nil {
			return
		}
		if err != nil && !errors.Is(err, vfs.ErrNoSpace) || time.Now().After(deadline) {
			t.Fatalf("after the deletions: %v, shortage %v, checkpoints %v, pages %+v", err, s.Shortage(), s.CheckpointErr(), s.Stats().Storage.Pages)
		}
	}
}

// TestFullDiskTakesDeletionsAndEndsByItself is the promise of the reserve: when ordinary writes are
// refused because the disk is full, deletions and checkpoints go on, the pages that they free are
// used again, and the refusal ends without anybody making space elsewhere. More than once, and
// after restarts on the full disk.
func TestFullDiskTakesDeletionsAndEndsByItself(t *testing.T) {
	testseed.SkipUnderRace(t)
	fs := vfs.NewMem()
	fs.SetCapacity(fullDiskBytes)
	o := reserving(fs)
	start := time.Now()
	s := mustOpen(t, o)
	want := map[string]string{}
	for round := range 3 {
		if short := fillDisk(t, s, want); short.Since.Before(start) || short.Since.After(time.Now()) || !errors.Is(short, vfs.ErrNoSpace) {
			t.Fatalf("round %d: writes are refused, and the shortage is %v", round, short)
		}
		for i := range 40 { // one of every few leaves: pages are written before any are free
			mustDelete(t, s, numbered(i*17))
			delete(want, numbered(i*17))
		}
		mustHold(t, s, want)
		if round == 1 {
			mustClose(t, s)
			s = mustOpen(t, o)
			mustHold(t, s, want)
		}
		mustDeleteRange(t, s, want, numbered(100+round), numbered(1500))
		awaitSpace(t, s, "later")
		want["later"] = "v"
		mustHold(t, s, want)
	}
	mustClose(t, s)
	mustHold(t, mustOpen(t, o), want)
}

// TestDeletionsOfOneKeyInEachLeafAreMergedOnAFullDisk: a memtable of small deletions falls on far
// more leaves than there are free pages. No shortage is known when they are accepted, and all of
// them are merged nevertheless.
func TestDeletionsOfOneKeyInEachLeafAreMergedOnAFullDisk(t *testing.T) {
	fs := vfs.NewMem()
	fs.SetCapacity(fullDiskBytes)
	o := reserving(fs)
	s := mustOpen(t, o)
	want := map[string]string{}
	_ = fillDisk(t, s, want)
	mustDeleteRange(t, s, want, numbered(0), numbered(200))
	awaitSpace(t, s, "later")
	want["later"] = "v"
	x := mustSession(t, s)
	defer x.Close()
	pages := s.Stats().Storage.Pages
	for i := 200; i < len(want)+200; i += 7 {
		w := mvcc.Write{Durability: mvcc.DurabilityAsync}
		w.Delete([]byte(numbered(i)))
		if _, err := x.Commit(t.Context(), &w); err != nil {
			t.Fatalf("deletion of %s: %v", numbered(i), err)
		}
		delete(want, numbered(i))
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatalf("%d leaves with %d free pages of %d: %v", pages.Live, pages.Free, pages.FileBytes/int64(pages.PageSize), err)
	}
	mustHold(t, s, want)
	mustClose(t, s)
	mustHold(t, mustOpen(t, o), want)
}

// TestOldLogFilesAreGivenUpOnAFullDisk: a checkpoint frees many segments, whose files the log keeps. When the disk is full, their space
// is worth more than that.
func TestOldLogFilesAreGivenUpOnAFullDisk(t *testing.T) {
	fs := vfs.NewMem()
	o := reserving(fs)
	o.Storage.DiskReserve = 1 << 20
	o.Storage.CheckpointBytes = 64 << 20 // no checkpoint before the first one here
	s := mustOpen(t, o)
	want := map[string]string{}
	fillSmall(t, s, want, 8000, strings.Repeat("v", 100))
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := logBytes(t, fs)
	fs.LeaveFree(0)
	x := mustSession(t, s)
	defer x.Close()
	for i := range 120 { // sixty of them have room without the old files
		key := fmt.Sprintf("new%05d", i)
		want[key] = strings.Repeat("w", 1000)
		if _, err := put(x, key, want[key], mvcc.DurabilitySync); err != nil {
			t.Fatalf("put %d: %v; %d bytes of log, %d before", i, err, logBytes(t, fs), before)
		}
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustHold(t, s, want)
	mustClose(t, s)
}

// logBytes is the size of all files of the log.
func logBytes(t *testing.T, fs *vfs.Mem) (sum int64) {
	t.Helper()
	names, err := fs.List("db/wal")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		size, err := fs.Size("db/wal/" + name)
		if err != nil {
			t.Fatal(err)
		}
		sum += size
	}
	return sum
}

// TestWhatWasAcceptedBeforeOthersFilledTheDiskIsMerged: values that fall on every other leaf need
// far more pages, while they are merged, than their size tells, and the disk is full before they
// are.
func TestWhatWasAcceptedBeforeOthersFilledTheDiskIsMerged(t *testing.T) {
	testseed.SkipUnderRace(t)
	fs := vfs.NewMem()
	o := reserving(fs)
	o.Storage.CheckpointBytes = 64 << 20 // no checkpoint before the end
	s := mustOpen(t, o)
	want := map[string]string{}
	const keys, perLeaf = 40000, 65
	fillSmall(t, s, want, keys, strings.Repeat("v", 100))
	x := mustSession(t, s)
	defer x.Close()
	for i := 0; i < keys; i += 2 * perLeaf {
		want[numbered(i)] = strings.Repeat("w", 900)
		if _, err := put(x, numbered(i), want[numbered(i)], mvcc.DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	fs.LeaveFree(0)
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatalf("%v; pages %+v", err, s.Stats().Storage.Pages)
	}
	mustHold(t, s, want)
	mustDelete(t, s, numbered(1))
	mustDeleteRange(t, s, want, numbered(0), numbered(keys/2))
	awaitSpace(t, s, "later")
	want["later"] = "v"
	mustClose(t, s)
	mustHold(t, mustOpen(t, o), want)
}

// TestDeletionsDuringASnapshotLeavePagesForThoseAfterIt: while a snapshot sees what is deleted,
// deletions take space and free nothing. On a full disk they take pages until those are left that
// deletions need once the snapshot has ended.
func TestDeletionsDuringASnapshotLeavePagesForThoseAfterIt(t *testing.T) {
	testseed.SkipUnderRace(t)
	fs := vfs.NewMem()
	o := reserving(fs)
	s := mustOpen(t, o)
	want := map[string]string{}
	const keys = 60000
	fillSmall(t, s, want, keys, "v")
	reader := mustSession(t, s)
	defer reader.Close()
	if _, err := reader.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	fs.LeaveFree(0)
	full := false
	for i := 0; i < keys-1000 && !full; i += 1000 {
		mustDeleteRange(t, s, want, numbered(i), numbered(i+1000))
		err := s.Checkpoint(t.Context())
		if full = errors.Is(err, vfs.ErrNoSpace); err != nil && !full {
			t.Fatal(err)
		}
	}
	if p := s.Stats().Storage.Pages; !full || p.Free+p.Pending < 16 { // the collector may not have come to some of them
		t.Fatalf("the test needs refused deletions and free pages: %v, pages %+v", full, p)
	}
	reader.CloseSnapshot()
	mustDelete(t, s, numbered(keys-1))
	delete(want, numbered(keys-1))
	awaitSpace(t, s, "later")
	want["later"] = "v"
	mustHold(t, s, want)
	mustClose(t, s)
	mustHold(t, mustOpen(t, o), want)
}

// fillSmall puts so many keys with one value, and has them merged.
func fillSmall(t *testing.T, s *mvcc.Store, want map[string]string, keys int, value string) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	w := mvcc.Write{Durability: mvcc.DurabilityAsync}
	for i := range keys {
		w.Set([]byte(numbered(i)), []byte(value))
		want[numbered(i)] = value
		if i%200 < 199 && i < keys-1 {
			continue
		}
		if _, err := x.Commit(t.Context(), &w); err != nil {
			t.Fatal(err)
		}
		w.Reset()
		w.Durability = mvcc.DurabilityAsync
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestWritersDoNotOutrunTheReserve: while the data file takes its time to grow, no more is accepted
// than the free pages suffice for. It may not be able to grow at all, and then what was accepted
// could not be merged.
func TestWritersDoNotOutrunTheReserve(t *testing.T) {
	fs := vfs.NewMem()
	o := reserving(fs)
	o.Storage.CheckpointBytes, o.Storage.DiskReserve = 64<<20, 1<<20 // no checkpoint before the end
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	grow := make(chan struct{})
	fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpPreallocate && name == "db/data.ekv" {
			<-grow
		}
	})
	defer close(grow)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	w, accepted := mvcc.Write{Durability: mvcc.DurabilityAsync}, int64(0)
	reserve := s.Stats().Storage.Disk.Reserve
	for i := 0; accepted < 4*reserve; i++ {
		w.Reset()
		w.Set([]byte(numbered(i)), make([]byte, 1000))
		if _, err := x.Commit(ctx, &w); err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			return
		}
		accepted += 1000
	}
	t.Errorf("%d bytes were accepted with a reserve of %d", accepted, reserve)
}

// TestKillOnAFullDiskAnywhereLeavesAStoreThatStarts crashes at each operation of deletions,
// checkpoints and restarts on a full disk, again and again on what the crash before left. Each time
// the store starts, reads what was durable, and takes deletions until there is space.
func TestKillOnAFullDiskAnywhereLeavesAStoreThatStarts(t *testing.T) {
	full := vfs.NewMem()
	full.SetCapacity(fullDiskBytes)
	filled := map[string]string{}
	s := mustOpen(t, reserving(full))
	_ = fillDisk(t, s, filled)
	if err := s.AwaitDurable(context.Background(), s.Visible()); err != nil {
		t.Fatal(err)
	}
	disk := full.Crash(1, vfs.SurviveAll)
	_ = s.Close()
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			fs, want := disk.Crash(seed, vfs.SurviveAll), maps.Clone(filled)
			r := killedStore{want: want}
			for kill := range 40 {
				r.run(t, fs, int64(1+(kill*7+int(seed)*3)%60), kill%2 == 0)
				fs = fs.Crash(seed+uint64(kill), []vfs.Survival{vfs.SurviveAll, vfs.SurviveNone, vfs.SurviveSome}[kill%3])
				if kill%4 == 0 {
					verifyFiles(t, reserving(fs))
				}
			}
			s := mustOpen(t, reserving(fs))
			r.compare(t, s)
			mustDeleteRange(t, s, want, numbered(0), numbered(1500))
			awaitSpace(t, s, "later")
			want["later"] = "v"
			mustHold(t, s, want)
			mustClose(t, s)
			mustHold(t, mustOpen(t, reserving(fs)), want)
		})
	}
}

// TestKillBetweenTheStepsOfAMergeLosesNothing crashes at each operation of a start that merges, in
// steps, far more deletions than there are free pages. The superblock of a step must not say that
// the log is not needed any more.
func TestKillBetweenTheStepsOfAMergeLosesNothing(t *testing.T) {
	full := vfs.NewMem()
	full.SetCapacity(fullDiskBytes)
	o := reserving(full)
	o.CheckpointInterval = time.Hour
	want := map[string]string{}
	s := mustOpen(t, o)
	_ = fillDisk(t, s, want)
	mustDeleteRange(t, s, want, numbered(0), numbered(200))
	awaitSpace(t, s, "later")
	want["later"] = "v"
	x := mustSession(t, s)
	for i, n := 200, len(want); i < n; i += 7 {
		w := mvcc.Write{Durability: mvcc.DurabilityAsync}
		w.Delete([]byte(numbered(i)))
		if _, err := x.Commit(t.Context(), &w); err != nil {
			t.Fatal(err)
		}
		delete(want, numbered(i))
	}
	x.Close()
	if err := s.AwaitDurable(t.Context(), s.Visible()); err != nil {
		t.Fatal(err)
	}
	disk := full.Crash(1, vfs.SurviveAll)
	_ = s.Close()
	for kill, done := int64(1), false; !done; kill += 7 * thinned {
		fs := disk.Crash(uint64(kill), vfs.SurviveAll)
		fs.CrashAt(fs.Mutations() + kill)
		done = mergedBeforeCrash(t, fs)
		fs = fs.Crash(uint64(kill), []vfs.Survival{vfs.SurviveAll, vfs.SurviveNone, vfs.SurviveSome}[kill%3])
		verifyFiles(t, reserving(fs))
		s := mustOpen(t, reserving(fs))
		mustHold(t, s, want)
		mustClose(t, s)
	}
}

// mergedBeforeCrash opens a store and merges everything, and reports whether the file system has
// crashed meanwhile.
func mergedBeforeCrash(t *testing.T, fs *vfs.Mem) bool {
	t.Helper()
	s, err := mvcc.Open(reserving(fs))
	if err == nil {
		err = s.Checkpoint(t.Context())
		_ = s.Close()
	}
	if err != nil && !fs.Crashed() {
		t.Fatal(err)
	}
	return !fs.Crashed()
}

// killedStore is what a store on a full disk should hold after some kills.
type killedStore struct {
	want  map[string]string
	maybe []string // keys whose deletions were under way
}

// run opens the store and deletes key after key, each with SYNC, until the file system crashes:
// after that many operations of opening and deleting, or of deleting alone, in which case what it
// found is compared before.
func (r *killedStore) run(t *testing.T, fs *vfs.Mem, after int64, opening bool) {
	t.Helper()
	if opening {
		fs.CrashAt(fs.Mutations() + after)
	}
	s, err := mvcc.Open(reserving(fs))
	if err != nil {
		if !fs.Crashed() {
			t.Fatalf("the store does not start on the full disk: %v", err)
		}
		return
	}
	defer func() { _ = s.Close() }() // the file system has crashed
	if !opening {
		r.compare(t, s)
		fs.CrashAt(fs.Mutations() + after)
	}
	x := mustSession(t, s)
	defer x.Close()
	for key := range r.want {
		w := mvcc.Write{Durability: mvcc.DurabilitySync}
		w.Delete([]byte(key))
		_, err := commitAndWait(x, &w)
		if err == nil {
			delete(r.want, key)
			continue
		}
		if !fs.Crashed() {
			names, _ := fs.List("db/wal")
			st := s.Stats().Storage
			t.Fatalf("a deletion on a full disk: %v; log %v, shortage %v, checkpoints %v, generations %+v, log %+v", err, names, s.Shortage(), s.CheckpointErr(), st.Generations, st.Log.Segments)
		}
		r.maybe = append(r.maybe, key)
		return
	}
}

// compare checks that the store holds what it should. Deletions that were under way may have been
// durable or not.
func (r *killedStore) compare(t *testing.T, s *mvcc.Store) {
	t.Helper()
	for _, key := range r.maybe {
		if get(t, s, key, 0) == "-" {
			delete(r.want, key)
		}
	}
	r.maybe = nil
	mustHold(t, s, r.want)
}
