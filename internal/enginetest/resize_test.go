package enginetest

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCacheIsResizedUnderReaders shrinks and grows the page cache while readers verify what they read.
func TestCacheIsResizedUnderReaders(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	var w mvcc.Write
	for i := range 2000 {
		w.Set(fmt.Appendf(nil, "k%04d", i), []byte(strings.Repeat(fmt.Sprint(i), 50)))
	}
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	x.Close()
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for r := range 2 {
		wg.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			for i := r; ; i = (i + 7) % 2000 {
				select {
				case <-stop:
					return
				default:
				}
				v, err := x.Get(nil, fmt.Appendf(nil, "k%04d", i), 0)
				if err != nil || string(v.Data) != strings.Repeat(fmt.Sprint(i), 50) {
					t.Errorf("k%04d = %q, %v", i, clip(string(v.Data)), err)
					return
				}
			}
		})
	}
	for _, size := range []int64{256 << 10, 4 << 20, 128 << 10, 1 << 20} {
		for range 20 {
			if _, err := s.ResizeCache(size); err != nil {
				t.Fatal(err)
			}
			if got := s.Stats().Storage.Memory.Cache; got != size {
				t.Fatalf("resized to %d, now %d", size, got)
			}
		}
	}
	close(stop)
	wg.Wait()
	bad := new(storage.CacheSizeError)
	for _, size := range []int64{0, 4096, 1 << 40} {
		if _, err := s.ResizeCache(size); !errors.As(err, &bad) {
			t.Errorf("size %d: %v", size, err)
		}
	}
}

// TestACacheMayKeepItsSize: also if large memtables leave less than nothing of the budget.
func TestACacheMayKeepItsSize(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes = o.Storage.MemoryBytes
	s := mustOpen(t, o)
	size := s.Stats().Storage.Memory.Cache
	if _, err := s.ResizeCache(size); err != nil {
		t.Error(err)
	}
	_, err := s.ResizeCache(1 << 40)
	if bad, ok := errors.AsType[*storage.CacheSizeError](err); !ok || bad.Max != size {
		t.Errorf("with %d bytes: %v", size, err)
	}
}

// TestResizesAtTheSameTimeEndWithOneSize: the budget counts the size that the cache has.
func TestResizesAtTheSameTimeEndWithOneSize(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	for range 1000 {
		var wg sync.WaitGroup
		for _, size := range []int64{256 << 10, 1 << 20} {
			wg.Go(func() {
				if _, err := s.ResizeCache(size); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		stats := s.Stats().Storage
		if has := int64(stats.Cache.Frames) * int64(stats.PageSize); has != stats.Memory.Cache {
			t.Fatalf("the cache has %d bytes, and the budget counts %d", has, stats.Memory.Cache)
		}
	}
}
