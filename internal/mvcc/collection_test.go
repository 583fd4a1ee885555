package mvcc

import (
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestEveryWayOfCollectingBoundsAHotKeyAndKeepsWhatASnapshotSees overwrites one key under each of the alternatives: without a
// snapshot its chain stays short, and an old snapshot goes on reading its value.
func TestEveryWayOfCollectingBoundsAHotKeyAndKeepsWhatASnapshotSees(t *testing.T) {
	const overwrites = 2_000
	for _, c := range []struct {
		collection Collection
		horizon    HorizonRule
		versions   int64 // left right behind the last write, at most; where a goroutine or a timer may be late, all of them
	}{
		{CollectBackground, HorizonCached, 3 * overwrites},
		{CollectBackground, HorizonScanned, 2 * 64},
		{CollectByWriter, HorizonCached, 64},
		{CollectByWriter, HorizonScanned, 64},
		{CollectEveryWrite, HorizonCached, 3 * overwrites},
		{CollectEveryWrite, HorizonScanned, 2},
	} {
		t.Run(fmt.Sprintf("collection=%d/horizon=%d", c.collection, c.horizon), func(t *testing.T) {
			o := tiny(vfs.NewMem())
			o.Storage.MemtableBytes, o.Storage.SegmentBytes = 8<<20, 8<<20
			o.GCInterval, o.Collection, o.Horizon = 0, c.collection, c.horizon
			s := mustOpen(t, o)
			x := mustSession(t, s)
			defer x.Close()
			overwrite := func(from int) {
				t.Helper()
				for i := range overwrites {
					if _, err := put(x, "hot", fmt.Sprint(from+i), DurabilityAsync); err != nil {
						t.Fatal(err)
					}
				}
			}
			overwrite(0)
			if left := s.Stats().Storage.Generations[0].Versions; left > c.versions {
				t.Errorf("%d versions after %d overwrites, want at most %d", left, overwrites, c.versions)
			}

			reader := mustSession(t, s)
			defer reader.Close()
			if _, err := reader.View(0); err != nil {
				t.Fatal(err)
			}
			overwrite(overwrites)
			if v, err := reader.Read(nil, []byte("hot")); err != nil || string(v.Data) != fmt.Sprint(overwrites-1) {
				t.Errorf("the old snapshot reads %q, %v", v.Data, err)
			}
			if got, want := get(t, s, "hot", 0), fmt.Sprint(2*overwrites-1); got != want {
				t.Errorf("the newest snapshot reads %s, want %s", got, want)
			}
			reader.Done()
			overwrite(2 * overwrites)
			if left := s.Stats().Storage.Generations[0].Versions; left > c.versions {
				t.Errorf("%d versions once the snapshot has ended, want at most %d", left, c.versions)
			}
		})
	}
}
