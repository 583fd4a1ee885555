package mvcc

import (
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestEveryWayOfPruningBoundsAHotKeyAndKeepsWhatASnapshotSees overwrites one key, in builds with the tag `ablation`
// under each of the baselines: without a snapshot the key's chain stays short, and an old snapshot goes on reading its
// value.
func TestEveryWayOfPruningBoundsAHotKeyAndKeepsWhatASnapshotSees(t *testing.T) {
	const overwrites = 2_000
	for _, c := range []struct {
		baseline ablation.Baseline
		versions int64 // left after the last write, at most; where nothing but a goroutine or a timer prunes, all of them
	}{
		{ablation.Baseline{}, 3 * overwrites},
		{ablation.Baseline{ScanPerWrite: true}, 2 * 64},
		{ablation.Baseline{Pruning: ablation.PruneByWriter}, 64},
		{ablation.Baseline{Pruning: ablation.PruneByWriter, ScanPerWrite: true}, 64},
		{ablation.Baseline{Pruning: ablation.PruneEveryWrite}, 3 * overwrites},
		{ablation.Baseline{Pruning: ablation.PruneEveryWrite, ScanPerWrite: true}, 2},
	} {
		if !ablation.Enabled && c.baseline != (ablation.Baseline{}) {
			continue
		}
		t.Run(fmt.Sprintf("%+v", c.baseline), func(t *testing.T) {
			o := tiny(vfs.NewMem())
			o.Storage.MemtableBytes, o.Storage.SegmentBytes = 8<<20, 8<<20
			o.GCInterval, o.Storage.Ablation = 0, mustSwitch(t, c.baseline)
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
			// What the writer knows of snapshots is late beside a load: a write after that prunes the chain.
			settle := func(last int) int64 {
				t.Helper()
				for until := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
					left := s.Stats().Storage.Generations[0].Versions
					if left <= c.versions || time.Now().After(until) {
						return left
					}
					if _, err := put(x, "hot", fmt.Sprint(last), DurabilityAsync); err != nil {
						t.Fatal(err)
					}
				}
			}
			overwrite(0)
			if left := settle(overwrites - 1); left > c.versions {
				t.Errorf("%d versions after %d overwrites, want at most %d", left, overwrites, c.versions)
			}

			reader := mustSession(t, s)
			defer reader.Close()
			if _, err := reader.OpenSnapshot(0); err != nil {
				t.Fatal(err)
			}
			overwrite(overwrites)
			if v, err := reader.Read(nil, []byte("hot")); err != nil || string(v.Data) != fmt.Sprint(overwrites-1) {
				t.Errorf("the old snapshot reads %q, %v", v.Data, err)
			}
			if got, want := get(t, s, "hot", 0), fmt.Sprint(2*overwrites-1); got != want {
				t.Errorf("the newest snapshot reads %s, want %s", got, want)
			}
			reader.CloseSnapshot()
			overwrite(2 * overwrites)
			if left := settle(3*overwrites - 1); left > c.versions {
				t.Errorf("%d versions once the snapshot has ended, want at most %d", left, c.versions)
			}
		})
	}
}
