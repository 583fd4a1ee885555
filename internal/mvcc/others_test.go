package mvcc

import (
	"context"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWalksOverManyKeysLetOthersRun between two guards, however much of what they read is in memory.
func TestWalksOverManyKeysLetOthersRun(t *testing.T) {
	testseed.SkipUnderRace(t)
	const n = 60_000
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.Storage.CheckpointBytes, o.Storage.MemoryBytes = 64<<20, 64<<20, 1<<30, 1<<30
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	putMany(t, x, n, func(w *Write, key []byte) { w.Set(key, []byte("value")) })
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	defer x.CloseSnapshot()
	var list [][]byte
	for i := range n {
		list = append(list, fmt.Appendf(nil, "key-%07d", i))
	}
	scan := func(page int) (guards int) {
		c, err := x.Scan(ScanOptions{KeysOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		count := 0
		for c.Next() {
			if count++; count%page == 0 {
				c.Pause()
			}
		}
		if count != n || c.Err() != nil {
			t.Fatalf("%d keys, %v", count, c.Err())
		}
		return c.guardEntries
	}
	for name, walk := range map[string]func() int{
		"scan":  func() int { return scan(2 * n) },
		"pages": func() int { scan(100); return n / 100 },
		"conditions": func() int {
			var w Write
			for _, key := range list {
				w.Conditions = append(w.Conditions, Condition{Kind: KeyPresent, Key: key})
			}
			out, err := x.Execute(t.Context(), &Execution{Write: &w, Operate: func(context.Context, *Txn, bool) error { return nil }})
			if err != nil || !out.Holds {
				t.Fatalf("%+v, %v", out, err)
			}
			return n / conditionsPerTurn
		},
		"list": func() int {
			if err := x.ReadAll(t.Context(), list, func(int, Value) error { return nil }); err != nil {
				t.Fatal(err)
			}
			return x.buffers.batch.guardEntries / windowsPerTurn
		},
		"difference": func() int {
			d, err := x.Difference(DifferenceOptions{KeysOnly: true, Context: t.Context()})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			count := 0
			for d.Next() {
				count++
			}
			if count != n || d.Err() != nil {
				t.Fatalf("%d keys, %v", count, d.Err())
			}
			return n / stepsPerTurn
		},
	} {
		t.Run(name, func(t *testing.T) {
			turns := 0
			got := testseed.TurnsBeside(func() { turns = walk() })
			if turns < n/stepsPerGuard || got < int64(turns)/2 {
				t.Errorf("others ran %d times during a walk in %d turns", got, turns)
			}
		})
	}
}
