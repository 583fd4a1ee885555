package mvcc

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestLargestBatchReachesTheDisk is the promise of the limits on batches and values: what may be configured can be put, checkpointed, and read
// after a restart. The whole batch is one value, so that this is the largest value, too.
func TestLargestBatchReachesTheDisk(t *testing.T) {
	testseed.SkipUnderRace(t)
	o := Options{
		Storage:    storage.Options{Dir: t.TempDir() + "/db", FS: vfs.NewOS(), MemoryBytes: 2 << 30, MemtableBytes: 1 << 20, SegmentBytes: 1 << 20},
		Durability: DurabilityAsync,
		Limits:     Limits{BatchOps: 1, BatchBytes: storage.BatchBytesMax(1), ValueBytes: storage.BatchBytesMax(1)},
	}
	s := mustOpen(t, o)
	value := bytes.Repeat([]byte("0123456789abcdef"), o.Limits.BatchBytes/16+1)
	key, n := []byte("k"), o.Limits.BatchBytes-1
	x := mustSession(t, s)
	w := new(Write)
	w.Set(key, value[:n])
	if over := w.Batch.Size() - o.Limits.BatchBytes; over > 0 { // what the encoding adds counts
		n -= over
		w.Reset()
		w.Set(key, value[:n])
	}
	if _, err := commitAndWait(x, w); err != nil {
		t.Fatal(err)
	}
	check := func(s *Store) {
		t.Helper()
		x := mustSession(t, s)
		defer x.Close()
		v, err := x.Get(nil, key, 0)
		if err != nil || !bytes.Equal(v.Data, value[:n]) {
			t.Fatalf("%d bytes of %d, %v", len(v.Data), n, err)
		}
	}
	check(s)
	w.Reset()
	w.Set(key, append(value[:n:n], make([]byte, o.Limits.BatchBytes-n+1)...))
	var limit *LimitError
	if _, err := x.Commit(context.Background(), w); !errors.As(err, &limit) {
		t.Fatalf("one byte more than the limit: %v", err)
	}
	x.Close()
	w.Reset()
	runtime.GC()
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	check(mustOpen(t, o))
}

func TestLimitsThatARecordCannotHoldAreRefused(t *testing.T) {
	for name, adjust := range map[string]func(*Limits){
		"batch":             func(l *Limits) { l.BatchOps, l.BatchBytes = 1000, storage.BatchBytesMax(1000)+1 },
		"batch of many":     func(l *Limits) { l.BatchOps, l.BatchBytes = 1<<24, storage.BatchBytesMax(1) },
		"value above batch": func(l *Limits) { l.BatchBytes, l.ValueBytes = 1000, 1001 },
	} {
		o := tiny(vfs.NewMem())
		adjust(&o.Limits)
		var limit *LimitError
		if s, err := Open(o); !errors.As(err, &limit) {
			t.Errorf("%s: %v", name, err)
			if err == nil {
				_ = s.Close()
			}
		}
	}
}
