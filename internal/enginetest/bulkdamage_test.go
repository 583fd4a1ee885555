package enginetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestDamagedPageOfARefusedBulkLoadIsNotRecorded damages the pages that a bulk load has written,
// before it merges the commits made meanwhile. The bulk load is refused. Its pages were never part
// of the tree and are not recorded as skipped pages: no other operation is refused, then or later.
func TestDamagedPageOfARefusedBulkLoadIsNotRecorded(t *testing.T) {
	const name = dataFile
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.CacheBytes = 16 * 8 << 10
	s := mustOpen(t, o)
	want := entriesFor("before", 2000, 1, rand.New(rand.NewPCG(1, 1)))
	mustLoad(t, s, want)
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	for k := range want {
		if err := l.Add([]byte(k), []byte("loaded"+strings.Repeat("l", 300))); err != nil {
			t.Fatal(err)
		}
	}
	met, goOn := make(chan struct{}), make(chan struct{})
	var wrote, stopped atomic.Bool
	fs.SetHook(func(op vfs.Op, file string) {
		switch {
		case file != name:
		case op == vfs.OpWrite:
			wrote.Store(true)
		case op == vfs.OpSyncData && wrote.Load() && !stopped.Swap(true):
			close(met)
			<-goOn
		}
	})
	done := make(chan error, 1)
	go func() {
		_, err := l.Commit(context.Background())
		done <- err
	}()
	<-met
	fs.SetHook(nil)
	x := mustSession(t, s)
	defer x.Close()
	for i := range 500 {
		k := fmt.Sprintf("key-%05d", i*4)
		want[k] = fmt.Sprint("beside ", i)
		if _, err := put(x, k, want[k], mvcc.DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	n := damageNewestPages(t, fs, name, s.Stats().Storage.PageSize)
	close(goOn)
	if err := <-done; !asDamage(err) {
		t.Fatalf("a bulk load with %d damaged pages: %v", n, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		if err := s.Damage(); err != nil {
			t.Errorf("round %d: the store reports damage: %v", round, err)
		}
		mustHold(t, s, want)
		for i := range 300 {
			k := fmt.Sprintf("key-%05d", i*5)
			want[k] = fmt.Sprint("later ", round, i)
			if _, err := put(x, k, want[k], mvcc.DurabilityAsync); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustHold(t, s, want)
		mustVerify(t, s)
	}
}

// damageNewestPages flips a bit in each page of the newest checkpoint, and returns the number of
// these pages.
func damageNewestPages(t *testing.T, fs vfs.FS, name string, pageSize int) (n int) {
	t.Helper()
	f, err := fs.Open(name, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	size, err := f.Size()
	if err != nil {
		t.Fatal(err)
	}
	newest, buf := uint64(0), make([]byte, pageSize)
	each := func(do func(id page.ID, h page.Header)) {
		for id := page.ID(2); int64(id+1)*int64(pageSize) <= size; id++ {
			if _, err := f.ReadAt(buf, int64(id)*int64(pageSize)); err != nil {
				t.Fatal(err)
			}
			if page.Check(buf, id) == nil {
				do(id, page.ReadHeader(buf))
			}
		}
	}
	each(func(_ page.ID, h page.Header) { newest = max(newest, h.Checkpoint) })
	each(func(id page.ID, h page.Header) {
		if h.Checkpoint != newest || h.Type == page.TypeSuperblock {
			return
		}
		n++
		buf[pageSize/2] ^= 1
		if _, err := f.WriteAt(buf, int64(id)*int64(pageSize)); err != nil {
			t.Fatal(err)
		}
	})
	return n
}

// TestBulkLoadSurvivesTheLossOfTheNewestSuperblock: the log does not contain a bulk load, so the
// second newest superblock must have it, too. If both copies of the newest superblock are lost, an
// acknowledged bulk load is still in the store, or the start is refused.
func TestBulkLoadSurvivesTheLossOfTheNewestSuperblock(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	s := mustOpen(t, o)
	mustPut(t, s, "before", "1")
	if _, err := load(s, map[string]string{"a": "loaded", "b": "loaded"}); err != nil {
		t.Fatal(err)
	}
	pageSize := s.Stats().Storage.PageSize
	left := fs.Crash(1, vfs.SurviveAll)
	damageNewestSuperblock(t, left, pageSize)
	o = tiny(left)
	s, err := mvcc.Open(o)
	if err != nil {
		if !asDamage(err) {
			t.Fatal(err)
		}
		return
	}
	defer func() { _ = s.Close() }()
	mustHold(t, s, map[string]string{"before": "1", "a": "loaded", "b": "loaded"})
}

// TestAStartThatCannotReadTheNewestSuperblockLosesNothing: a crash during a bulk load may leave it in the newest superblock alone. A start for which
// the device fails to read that, and which goes on without the load, would give out its epochs: the next start would not replay them.
func TestAStartThatCannotReadTheNewestSuperblockLosesNothing(t *testing.T) {
	refused := 0
	for n := int64(1); ; n++ {
		fs := vfs.NewMem()
		s := mustOpen(t, tiny(fs))
		mustPut(t, s, "before", "1")
		mustCheckpoint(t, s)
		fs.CrashAt(fs.Mutations() + n)
		_, loaded := load(s, map[string]string{"a": "loaded", "b": "loaded"})
		left, pageSize := fs.Crash(1, vfs.SurviveNone), s.Stats().Storage.PageSize
		_ = s.Close()
		faulty := vfs.NewFaulty(left)
		o := tiny(faulty)
		o.Storage.StartPatience = time.Millisecond
		var rules []*vfs.Injected
		for _, offset := range newestSuperblock(t, left, pageSize) {
			rules = append(rules, faulty.Inject(vfs.Rule{Op: vfs.OpRead, Fault: vfs.Unreadable, Bytes: int(offset)}))
		}
		s, err := mvcc.Open(o)
		for _, r := range rules {
			r.Remove()
		}
		if err != nil {
			if refused++; !errors.Is(err, pager.ErrSuperblockUnreadable) {
				t.Fatalf("%d writes: %v", n, err)
			}
			s = mustOpen(t, o)
		}
		mustPut(t, s, "after", "2")
		left = left.Crash(1, vfs.SurviveNone)
		_ = s.Close()
		s = mustOpen(t, tiny(left))
		want := map[string]string{"before": "1", "after": "2"}
		if loaded == nil {
			want["a"], want["b"] = "loaded", "loaded"
		}
		mustHold(t, s, want)
		mustClose(t, s)
		if loaded == nil {
			break
		}
	}
	if refused == 0 {
		t.Error("no start was refused")
	}
}

// damageNewestSuperblock turns a bit in the newest superblock and in its copy.
func damageNewestSuperblock(t *testing.T, fs vfs.FS, pageSize int) {
	t.Helper()
	for _, offset := range newestSuperblock(t, fs, pageSize) {
		flip(t, fs, offset)
	}
}

// newestSuperblock finds a byte of the newest superblock and one of its copy.
func newestSuperblock(t *testing.T, fs vfs.FS, pageSize int) (at []int64) {
	t.Helper()
	file, newest := readFile(t, fs, dataFile), uint64(0)
	for id := 0; (id+1)*pageSize <= len(file); id++ {
		p := file[id*pageSize : (id+1)*pageSize]
		h := page.ReadHeader(p)
		if page.Check(p, page.ID(id)) != nil || h.Type != page.TypeSuperblock || h.Checkpoint < newest {
			continue
		}
		if h.Checkpoint > newest {
			newest, at = h.Checkpoint, nil
		}
		at = append(at, int64(id*pageSize+100))
	}
	if len(at) < 2 {
		t.Fatalf("superblock of checkpoint %d is at %v alone", newest, at)
	}
	return at
}
