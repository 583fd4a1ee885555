package enginetest

import (
	"context"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestScansOfLargeValuesLeaveTheHotSet: of values of 1,200 bytes three have a page of 4 KiB, beside the tree. A scan visits it three times, and leaves what
// gets have read in the cache, as it leaves leaves.
func TestScansOfLargeValuesLeaveTheHotSet(t *testing.T) {
	const count, hot = 20_000, 60 // 27 MB of pages, 26 times the cache
	o := mvcc.Options{Storage: storage.Options{
		Dir: "db", FS: vfs.NewMem(), PageSize: 4096, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 4 << 20, SegmentBytes: 4 << 20,
	}}
	s := mustOpen(t, o)
	x := mustSession(t, s)
	for i := 0; i < count; {
		var w mvcc.Write
		for range 1000 {
			w.Set(coldKey(i), fmt.Appendf(nil, "%01200d", i))
			i++
		}
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	s = mustOpen(t, o)
	x = mustSession(t, s)
	misses := func() uint64 { return s.Stats().Storage.Cache.Misses }
	getHot := func() (missed uint64) {
		before := misses()
		for i := range hot {
			key := i * (count / hot) // each in a page of its own
			if v, err := x.Get(nil, coldKey(key), s.Visible()); err != nil || string(v.Data) != fmt.Sprintf("%01200d", key) {
				t.Fatalf("key %d: %.20q, %v", key, v.Data, err)
			}
		}
		return misses() - before
	}
	cold := getHot()
	for range 4 {
		getHot()
	}
	if missed := getHot(); cold < hot || missed > 0 {
		t.Fatalf("%d pages are read at first, and %d later", cold, missed)
	}
	for range 2 {
		if _, err := x.OpenSnapshot(0); err != nil {
			t.Fatal(err)
		}
		c, err := x.Scan(mvcc.ScanOptions{})
		if err != nil {
			t.Fatal(err)
		}
		entries := 0
		for c.Next() {
			entries++
		}
		if c.Err() != nil || entries != count {
			t.Fatalf("%d entries, %v", entries, c.Err())
		}
		c.Close()
		x.CloseSnapshot()
	}
	if missed := getHot(); missed > hot/20 {
		t.Errorf("%d of %d values are read again after scans", missed, hot)
	}
}
