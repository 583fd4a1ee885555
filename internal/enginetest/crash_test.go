package enginetest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	iofs "io/fs"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

var crashSeed = flag.Uint64("crash.seed", 0, "seed of the crash tests; 0 draws one")

// crashTestSeed is the seed of one run, and tells how to run it again.
func crashTestSeed(t *testing.T) uint64 {
	t.Helper()
	seed := *crashSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("replay with: go test ./internal/enginetest -run '^%s$' -crash.seed %d", t.Name(), seed)
	return seed
}

// ledger is what a client was told, in the order of its writes.
type ledger struct {
	tried []map[string]string // each commit's sets; "" deletes
	acked int                 // commits [0, acked) were acknowledged as SYNC
}

// state is the content after the first n commits.
func (l *ledger) state(n int) map[string]string {
	all := make(map[string]string)
	for _, sets := range l.tried[:n] {
		for k, v := range sets {
			if v == "" {
				delete(all, k)
			} else {
				all[k] = v
			}
		}
	}
	return all
}

// work commits from one client until the file system crashes or the script ends: single puts, batches, deletions, SYNC and
// ASYNC, with values that rotate the tiny segments.
func (l *ledger) work(s *mvcc.Store, rng *rand.Rand, commits int) error {
	x, err := openSession(s)
	if err != nil {
		return err
	}
	defer x.Close()
	for range commits {
		sets := make(map[string]string)
		for range 1 + rng.IntN(4)*rng.IntN(4) {
			k := fmt.Sprintf("key-%02d", rng.IntN(40))
			sets[k] = ""
			if rng.IntN(5) > 0 {
				sets[k] = fmt.Sprintf("%d-%s", len(l.tried), strings.Repeat("v", rng.IntN(3000)))
			}
		}
		w := mvcc.Write{Durability: mvcc.DurabilitySync}
		if rng.IntN(3) == 0 {
			w.Durability = mvcc.DurabilityAsync
		}
		for k, v := range sets {
			if v == "" {
				w.Delete([]byte(k))
			} else {
				w.Set([]byte(k), []byte(v))
			}
		}
		l.tried = append(l.tried, sets)
		if _, err := commitAndWait(x, &w); err != nil {
			return err
		}
		if w.Durability == mvcc.DurabilitySync {
			l.acked = len(l.tried)
		}
	}
	return nil
}

// check reopens what a crash left and finds a state between what was acknowledged and what was tried, at a commit boundary.
func (l *ledger) check(t *testing.T, fs vfs.FS) int {
	t.Helper()
	s, err := mvcc.Open(tiny(fs))
	if err != nil {
		t.Fatalf("reopen: %v", err)
	}
	defer mustClose(t, s)
	got := dump(t, s)
	n := int(s.Recovery().Epoch) // one client: epoch n is commit n
	if n < l.acked || n > len(l.tried) {
		t.Fatalf("%d commits survived; %d were acknowledged, %d tried", n, l.acked, len(l.tried))
	}
	if err := equalMaps(l.state(n), got); err != nil {
		t.Fatalf("after %d of %d commits (%d acknowledged): %v", n, len(l.tried), l.acked, err)
	}
	return n
}

// crashScript opens a store on fs, works, and closes it; it returns early when fs crashes.
func crashScript(l *ledger, fs *vfs.Mem, seed uint64) error {
	o := tiny(fs)
	o.SyncInterval = time.Hour // the script alone decides what is synced, so that operation k is the same one each time
	s, err := mvcc.Open(o)
	if err != nil {
		return err
	}
	err = l.work(s, rand.New(rand.NewPCG(seed, 1)), 40)
	return errors.Join(err, s.Close())
}

// TestAcknowledgedCommitsSurviveACrashAtEveryOperation cuts the power at each mutating file operation of a script, keeps
// nothing, everything, or a random part of what was not synced, and reopens; then again with the power cut during recovery.
func TestAcknowledgedCommitsSurviveACrashAtEveryOperation(t *testing.T) {
	seed := crashTestSeed(t)
	whole := vfs.NewMem()
	if err := crashScript(new(ledger), whole, seed); err != nil {
		t.Fatal(err)
	}
	ops := whole.Mutations()
	if ops < 50 {
		t.Fatalf("the script has only %d operations", ops)
	}
	step := int64(exhaustiveStep)
	if testing.Short() {
		step = 7
	}
	for k := int64(1); k <= ops; k += step {
		fs, l := vfs.NewMem(), new(ledger)
		fs.CrashAt(k)
		_ = crashScript(l, fs, seed) // how the script noticed is not the point; what is left is
		for _, keep := range []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll} {
			left := fs.Crash(seed+uint64(k), keep)
			crashAgainWhileRecovering(t, l, left, k)
			l.check(t, left)
			if t.Failed() {
				t.Fatalf("seed %d, crash at operation %d of %d, keep %d", seed, k, ops, keep)
			}
		}
	}
}

// crashAgainWhileRecovering opens copies of a crashed disk and cuts the power at an operation of the recovery.
func crashAgainWhileRecovering(t *testing.T, l *ledger, left *vfs.Mem, k int64) {
	t.Helper()
	disk := left.Crash(0, vfs.SurviveAll)
	*left = *disk.Crash(0, vfs.SurviveAll) // a fresh copy: Crash ends the one it is called on
	again := disk.Crash(1, vfs.SurviveAll)
	again.CrashAt(1 + k%9)
	s, err := mvcc.Open(tiny(again))
	if err == nil {
		_ = s.Close()
	}
	l.check(t, again.Crash(uint64(k), vfs.SurviveSome))
}

func TestTornTailIsCutAndReported(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	mustPut(t, s, "a", "1")
	x := mustSession(t, s)
	w := mvcc.Write{Durability: mvcc.DurabilitySync}
	w.Set([]byte("b"), bytes.Repeat([]byte("torn"), 100))
	epoch, err := x.Commit(context.Background(), &w)
	if err = errors.Join(err, s.Wait(context.Background(), epoch, mvcc.DurabilitySync)); err != nil {
		t.Fatal(err)
	}
	x.Close()
	left := fs.Crash(1, vfs.SurviveNone)
	file, at := tear(t, left, []byte("torntorn"))
	s2 := mustOpen(t, tiny(left))
	if got := dump(t, s2); len(got) != 1 || got["a"] != "1" {
		t.Fatalf("%v", got)
	}
	r := s2.Recovery()
	if r.Epoch != 1 || r.TornFile != file || r.TornAt <= 0 || r.TornAt >= at || r.TornSize <= at-r.TornAt {
		t.Fatalf("%s was torn at %d; reported: %+v", file, at, r)
	}
	const mark = 32 // which names the next segment
	size, err := left.Size(file)
	if errors.Is(err, iofs.ErrNotExist) { // a checkpoint in the background has merged it meanwhile
		size, err = r.TornAt+mark, nil
	}
	if err != nil || size != r.TornAt+mark {
		t.Fatalf("the file has %d bytes after a cut at %d: %v", size, r.TornAt, err)
	}
	s3 := mustOpen(t, tiny(left.Crash(1, vfs.SurviveNone)))
	if got, r := dump(t, s3), s3.Recovery(); r.TornFile != "" || len(got) != 1 || got["a"] != "1" {
		t.Fatalf("after the cut: %v, %+v", got, r)
	}
}

// tear overwrites with zeros what comes after content in the log's file that has it, as if a crash had come between its sectors.
func tear(t *testing.T, fs *vfs.Mem, content []byte) (file string, at int64) {
	t.Helper()
	names, err := fs.List("db/wal")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		name = "db/wal/" + name
		f, err := fs.Open(name, vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		size, err := f.Size()
		if err != nil {
			t.Fatal(err)
		}
		all := make([]byte, size)
		if _, err := f.ReadAt(all, 0); err != nil {
			t.Fatal(err)
		}
		i := bytes.Index(all, content)
		if i >= 0 {
			file, at = name, int64(i+len(content))
			_, err = f.WriteAt(make([]byte, size-at), at)
		}
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if file == "" {
		t.Fatal("no file of the log has the record")
	}
	return file, at
}

func TestSecondServerIsKeptOut(t *testing.T) {
	fs := vfs.NewMem()
	mustOpen(t, tiny(fs))
	if _, err := mvcc.Open(tiny(fs)); !errors.Is(err, vfs.ErrLocked) {
		t.Fatalf("second open: %v", err)
	}
}

// TestFailedSyncIsFinal: after an fdatasync failed, waiting commits fail, no later write is accepted, reads go on, and a restart
// brings back what was acknowledged.
func TestFailedSyncIsFinal(t *testing.T) {
	disk := vfs.NewMem()
	fs := vfs.NewFaulty(disk)
	s := mustOpen(t, tiny(fs))
	mustPut(t, s, "a", "1")
	rule := fs.Inject(vfs.Rule{Op: vfs.OpSyncData | vfs.OpSync, Name: "*.log", Nth: 1})
	x := mustSession(t, s)
	defer x.Close()
	if _, err := put(x, "b", "2", mvcc.DurabilitySync); !errors.Is(err, mvcc.ErrFailed) {
		t.Fatalf("put over a failing sync: %v", err)
	}
	if rule.Fired() == 0 {
		t.Fatal("the fault was never met")
	}
	if _, err := put(x, "c", "3", mvcc.DurabilityAsync); !errors.Is(err, mvcc.ErrFailed) {
		t.Fatalf("put after the failure: %v", err)
	}
	if s.Err() == nil {
		t.Fatal("the store claims to be well")
	}
	if got := get(t, s, "a", 0); got != "1" {
		t.Fatalf("a = %q: reads must go on", got)
	}
	_ = s.Close()
	s = mustOpen(t, tiny(disk.Crash(1, vfs.SurviveNone)))
	if got := dump(t, s); got["a"] != "1" || len(got) != 1 {
		t.Fatalf("after the restart: %v", got)
	}
}

// TestFullDiskRefusesWritesAndRecovers: without room for the next segment writes fail with ErrNoSpace and change nothing; with
// room again they go on, in the same process.
func TestFullDiskRefusesWritesAndRecovers(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	x := mustSession(t, s)
	defer x.Close()
	fs.SetCapacity(1 << 20)
	want := make(map[string]string)
	var full error
	for i := 0; i < 4000 && full == nil; i++ {
		k, v := fmt.Sprintf("k%04d", i), strings.Repeat("v", 1000)
		if _, full = put(x, k, v, mvcc.DurabilitySync); full == nil {
			want[k] = v
		}
	}
	if !errors.Is(full, vfs.ErrNoSpace) {
		t.Fatalf("a full disk answered %v", full)
	}
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Fatal(err)
	}
	fs.SetCapacity(0)
	deadline := time.Now().Add(5 * time.Second)
	for {
		_, err := put(x, "later", "v", mvcc.DurabilitySync)
		if err == nil {
			break
		}
		if !errors.Is(err, vfs.ErrNoSpace) || time.Now().After(deadline) {
			t.Fatalf("with room again: %v", err)
		}
		time.Sleep(time.Millisecond)
	}
	want["later"] = "v"
	mustClose(t, s)
	if err := equalMaps(want, dump(t, mustOpen(t, tiny(fs)))); err != nil {
		t.Fatal(err)
	}
}

// TestFullMemoryRefusesWrites: while checkpoints cannot make room, immutable generations fill the
// budget; then writers get the reason, and continue once there is room.
func TestFullMemoryRefusesWrites(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	o := tiny(fs)
	o.Storage.MemoryBytes = 4 << 20
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	full := fs.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "data.ekv", Err: syscall.ENOSPC})
	want := make(map[string]string)
	for i := 0; ; i++ {
		k, v := fmt.Sprintf("k%05d", i), strings.Repeat("v", 500)
		_, err := put(x, k, v, mvcc.DurabilityAsync)
		if errors.Is(err, vfs.ErrNoSpace) {
			break
		}
		if err != nil || i > 100000 {
			t.Fatalf("put %d: %v", i, err)
		}
		want[k] = v
	}
	if used := s.Stats().Storage.Memory.Memtables; used > o.Storage.MemoryBytes {
		t.Fatalf("%d bytes of memtables in a budget of %d", used, o.Storage.MemoryBytes)
	}
	if full.Fired() == 0 {
		t.Fatal("the fault was never met")
	}
	full.Remove()
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Fatal(err)
	}
	if err := waitFor(func() bool { _, err := put(x, "later", "v", mvcc.DurabilitySync); return err == nil }); err != nil {
		t.Fatalf("with room again: %v", err)
	}
	want["later"] = "v"
	mustClose(t, s)
	if err := equalMaps(want, dump(t, mustOpen(t, o))); err != nil {
		t.Fatal(err)
	}
}

// TestTreeIsNeverAheadOfTheLog: the log's durable epoch, which every record carries and replies wait for, covers what checkpoints
// have made durable.
func TestTreeIsNeverAheadOfTheLog(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.SyncInterval = time.Hour
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	e, err := put(x, "k", "v", mvcc.DurabilityAsync)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	if tree := s.Stats().Storage.Tree.Epoch; tree < e || s.Durable() < tree {
		t.Fatalf("commit %d, tree at %d, log durable through %d", e, tree, s.Durable())
	}
}
