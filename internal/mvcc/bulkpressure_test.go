package mvcc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestNoCommitIsRefusedForABulkLoad slows the device down while a bulk load stores its large
// values, for longer than writers wait for memory. Meanwhile writers fill memory many times. The
// bulk load is cancelled without an effect, and no writer is refused.
func TestNoCommitIsRefusedForABulkLoad(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.MemoryBytes, o.Storage.StallMax = 2<<20, 2*time.Second
	s := mustOpen(t, o)
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2000 {
		if err := l.Add(fmt.Appendf(nil, "load-%05d", i), make([]byte, 20_000)); err != nil {
			t.Fatal(err)
		}
	}
	var slow, stop atomic.Bool
	slow.Store(true)
	fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpWrite && strings.HasSuffix(name, ".ekv") && slow.Load() {
			time.Sleep(50 * time.Millisecond)
		}
	})
	var writers sync.WaitGroup
	var refused atomic.Int64
	for g := range 8 {
		x := mustSession(t, s)
		writers.Go(func() {
			defer x.Close()
			for i := 0; !stop.Load(); i++ {
				_, err := put(x, fmt.Sprintf("k-%d-%d", g, i%5000), strings.Repeat("w", 4000), DurabilityAsync)
				if errors.Is(err, ErrMemoryFull) {
					refused.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
	}
	_, err = l.Commit(t.Context())
	slow.Store(false)
	if err != nil && !errors.Is(err, storage.ErrBulkLoadYielded) {
		t.Errorf("the bulk load: %v", err)
	}
	time.Sleep(50 * time.Millisecond)
	stop.Store(true)
	s.StopThrottling()
	writers.Wait()
	if n := refused.Load(); n > 0 {
		t.Errorf("%d commits were refused while a bulk load was built", n)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	noSpoolsLeft(t, fs)
	mustClose(t, s)
}

// TestContextEndsTheWaitForARunningBulkLoad: the context ends the wait of a verification and of a
// checkpoint for a bulk load.
func TestContextEndsTheWaitForARunningBulkLoad(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	mustPut(t, s, "a", "1")
	l := mustBeginLoad(t, s)
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	met, goOn := make(chan struct{}), make(chan struct{})
	var stopped atomic.Bool
	fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpWrite && strings.HasSuffix(name, ".ekv") && !stopped.Swap(true) {
			close(met)
			<-goOn
		}
	})
	loaded := make(chan error, 1)
	go func() {
		_, err := l.Commit(context.Background())
		loaded <- err
	}()
	<-met
	looked := make(chan error, 3)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	go func() {
		_, err := s.Verify(ctx, inspect.VerifyOptions{})
		looked <- err
	}()
	go func() {
		_, err := s.Space(ctx, inspect.SpaceOptions{})
		looked <- err
	}()
	go func() { looked <- s.Checkpoint(ctx) }()
	late := time.After(10 * time.Second)
	for range cap(looked) {
		select {
		case err := <-looked:
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("during a bulk load: %v", err)
			}
		case <-late:
			t.Error("a call waits for the bulk load although its context has ended")
		}
	}
	close(goOn)
	if err := <-loaded; err != nil {
		t.Fatal(err)
	}
	fs.SetHook(nil)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	mustHold(t, s, map[string]string{"a": "1", "k": "loaded"})
}

// TestBulkLoadLeavesEpochsToCommits: a bulk load near the largest epoch is refused, and changes
// nothing.
func TestBulkLoadLeavesEpochsToCommits(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	s.watermark.jumpTo(keys.MaxEpoch - 10)
	if _, err := load(s, map[string]string{"a": "1"}); !errors.Is(err, storage.ErrEpochsUsedUp) {
		t.Errorf("a bulk load at epoch %d: %v", s.Visible(), err)
	}
	if got := get(t, s, "a", 0); got != "-" {
		t.Errorf("a is %q", got)
	}
}

// mustBeginLoad begins a bulk load of one key.
func mustBeginLoad(t *testing.T, s *Store) *BulkLoad {
	t.Helper()
	l, err := s.BeginBulkLoad()
	if err == nil {
		err = l.Add([]byte("k"), []byte("loaded"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestABulkLoadYieldsToADeletionOnAFullDisk: the deletion waits for a log segment that only a checkpoint gives back, and holds a latch. The bulk load, which
// waits for all latches, would prevent the checkpoint until the deletion is refused.
func TestABulkLoadYieldsToADeletionOnAFullDisk(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.DiskReserve, o.Storage.StallMax = 4<<20, 2*time.Second
	s := mustOpen(t, o)
	l := mustBeginLoad(t, s)
	built, allocate := make(chan struct{}), make(chan struct{})
	var met atomic.Bool
	var stuck atomic.Uint64 // once the reserve is used up: how many waits for a segment show that one more has begun
	fs.SetHook(func(op vfs.Op, name string) {
		switch {
		case op == vfs.OpSyncData && strings.HasSuffix(name, ".ekv") && !met.Swap(true):
			close(built)
		case op == vfs.OpPreallocate && strings.HasSuffix(name, ".log") && stuck.Load() > 0:
			<-allocate
		}
	})
	s.bulk.turn <- struct{}{}
	loaded, deleted := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := l.Commit(context.Background())
		loaded <- err
	}()
	<-built
	time.Sleep(10 * time.Millisecond) // now the bulk load waits for its turn
	fs.SetCapacity(fileBytes(t, fs))
	x := mustSession(t, s)
	defer x.Close()
	go func() {
		var failed error
		for i := 0; i < 300 && failed == nil; i++ {
			w := Write{Durability: DurabilityAsync}
			w.Delete(fmt.Appendf(nil, "%01000d", i))
			_, failed = x.Commit(context.Background(), &w)
			if names, _ := fs.List("db/wal"); !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, "reserve-") }) {
				stuck.CompareAndSwap(0, 1+s.Stats().Storage.Log.Stalls)
			}
		}
		deleted <- failed
	}()
	for len(deleted) == 0 && (stuck.Load() == 0 || s.Stats().Storage.Log.Stalls < stuck.Load()) {
		time.Sleep(time.Millisecond)
	}
	<-s.bulk.turn
	time.Sleep(10 * time.Millisecond) // now it waits for the latch of the deletion
	close(allocate)
	if err := <-deleted; err != nil {
		t.Error(err)
	}
	if err := <-loaded; !errors.Is(err, storage.ErrBulkLoadYielded) {
		t.Errorf("the bulk load: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	mustHold(t, s, map[string]string{})
}

// TestABulkLoadYieldsUntilItsCommitPause: until then to a writer that finds no memory. What waits from then on, as a checkpoint does for the next memtable,
// waits for the bulk load itself, which the device lets wait.
func TestABulkLoadYieldsUntilItsCommitPause(t *testing.T) {
	for inPause, want := range map[bool]error{false: storage.ErrBulkLoadYielded, true: nil} {
		fs := vfs.NewMem()
		o := tiny(fs)
		o.Storage.MemoryBytes, o.Storage.StallMax = 4<<20, 400*time.Millisecond
		s := mustOpen(t, o)
		l := mustBeginLoad(t, s)
		var pausing bool // like waited, of the goroutine of Commit
		var waited error
		l.Permit(func() error {
			pausing = true
			return nil
		})
		begun := false
		fs.SetHook(func(op vfs.Op, name string) {
			switch {
			case !strings.HasSuffix(name, ".ekv") || begun:
			case inPause && pausing && op == vfs.OpWrite:
				begun = true
				waited = s.engine.Rotate(context.Background())
			case !inPause && op == vfs.OpSyncData:
				begun = true
				waited = fillMemory(t, s)
			}
		})
		if _, err := l.Commit(context.Background()); !errors.Is(err, want) || waited == nil {
			t.Errorf("in the pause %v: %v after %v", inPause, err, waited)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

// fillMemory gives most memory to the cache, and writes until there is none for the next memtable.
func fillMemory(t *testing.T, s *Store) (err error) {
	t.Helper()
	_, err = s.ResizeCache(0)
	if size, ok := errors.AsType[*storage.CacheSizeError](err); ok {
		_, err = s.ResizeCache(size.Max)
	}
	if err != nil {
		t.Error(err)
	}
	x := mustSession(t, s)
	defer x.Close()
	for i := 0; err == nil && i < 10; i++ {
		_, err = put(x, fmt.Sprint(i), strings.Repeat("w", 60_000), DurabilityAsync)
	}
	return err
}
