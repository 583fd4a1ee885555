package enginetest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestHotKeyDoesNotGrowTheMemtable overwrites one key many times, without and with an old snapshot
// open.
func TestHotKeyDoesNotGrowTheMemtable(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, held := range []bool{false, true} {
		t.Run(fmt.Sprintf("snapshot=%v", held), func(t *testing.T) {
			o := tiny(vfs.NewMem())
			o.Storage.MemtableBytes, o.Storage.SegmentBytes = 64<<20, 64<<20
			o.GCInterval = 0
			s := mustOpen(t, o)
			mustPut(t, s, "hot", "first")
			before := s.Stats().Storage.Memory.Memtables // the index, laid out for a full table
			reader := mustSession(t, s)
			defer reader.Close()
			if held {
				if _, err := reader.OpenSnapshot(0); err != nil {
					t.Fatal(err)
				}
			}
			x := mustSession(t, s)
			defer x.Close()
			var w mvcc.Write
			value := make([]byte, 100)
			for range 300_000 / thinned {
				w.Reset()
				w.Durability = mvcc.DurabilityAsync
				w.Set([]byte("hot"), value)
				if _, err := x.Commit(context.Background(), &w); err != nil {
					t.Fatal(err)
				}
			}
			st := s.Stats().Storage
			if st.Rotations != 0 || st.Pruning.Pruned == 0 {
				t.Fatalf("%d rotations, %+v: the test tests nothing", st.Rotations, st.Pruning)
			}
			if grown := st.Memory.Memtables - before; grown > 8<<20 {
				t.Errorf("the memtable grew by %d bytes with one key; %+v", grown, st.Pruning)
			}
			if held {
				if v, err := reader.Read(nil, []byte("hot")); err != nil || string(v.Data) != "first" {
					t.Errorf("the old snapshot reads %q, %v", v.Data, err)
				}
				reader.CloseSnapshot()
			}
			if err := waitFor(func() bool { return s.Stats().Storage.Generations[0].Versions <= 2*64 }); err != nil {
				t.Errorf("after the last collection: %+v", s.Stats().Storage.Generations[0])
			}
		})
	}
}

func waitFor(ok func() bool) error {
	for until := time.Now().Add(3 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			return fmt.Errorf("not within three seconds")
		}
	}
	return nil
}
