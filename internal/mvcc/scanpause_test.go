package mvcc

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestScanPassesInvisibleLeavesAfterAKeyInMemory: a scan ends, though a key that is only in a memtable comes before more leaves
// without a visible key than the scan enters at once. The key is shown if the snapshot sees it.
func TestScanPassesInvisibleLeavesAfterAKeyInMemory(t *testing.T) {
	for _, reverse := range []bool{false, true} {
		s := mustOpen(t, tiny(vfs.NewMem()))
		before, between, after := mustSession(t, s), mustSession(t, s), mustSession(t, s)
		defer before.Close()
		defer between.Close()
		defer after.Close()
		mustPut(t, s, "a", "first")
		mustPut(t, s, "z", "last")
		mustSnapshot(t, before)
		w := Write{Durability: DurabilityAsync}
		for i := range 4000 { // about 40 leaves of which the other snapshots see nothing
			w.Set(fmt.Appendf(nil, "k%04d", i), make([]byte, 64))
		}
		if _, err := commitAndWait(after, &w); err != nil {
			t.Fatal(err)
		}
		mustSnapshot(t, between) // keeps them
		mustCheckpoint(t, s)
		if _, err := after.DeleteRange(context.Background(), RangeDelete{Lower: []byte("k"), Upper: []byte("l")}); err != nil {
			t.Fatal(err)
		}
		mustCheckpoint(t, s)
		for _, key := range []string{"j", "l", "k0000", "k3999"} {
			mustPut(t, s, key, "new")
		}
		mustSnapshot(t, after)
		for x, want := range map[*Session]int{before: 2, after: 6} {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			c, err := x.Scan(ScanOptions{Reverse: reverse, Context: ctx})
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for c.Next() {
				n++
			}
			if c.Err() != nil || n != want || c.guardEntries > 20 {
				t.Errorf("reverse %v at %d: %d keys in %d guards, %v; want %d", reverse, x.at, n, c.guardEntries, c.Err(), want)
			}
			c.Close()
			cancel()
		}
	}
}
