package storage

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// TestRecordWithoutMemoryForItIsRefused: a large record that a fresh memtable cannot take either gets an error, and not rotation after
// rotation; when there is memory again it is taken. The same is true of a small one.
func TestRecordWithoutMemoryForItIsRefused(t *testing.T) {
	b := newBench(t)
	defer func() {
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	b.put(0, 10, 100)
	errNone := errors.New("no memory")
	limit, refusing := uint64(0), true
	b.engine.options.Obtain = func(bytes uint64) error {
		if refusing && bytes > limit {
			return errNone
		}
		return nil
	}
	var w batch.Builder
	w.Set(keys.SpaceUser, []byte("large"), []byte(strings.Repeat("v", 1<<20)))
	body, err := w.Finish()
	if err != nil {
		t.Fatal(err)
	}
	for _, limit = range []uint64{0, 256 << 10} { // not even an empty table; a table, and not the record
		before := b.engine.counters.rotations.Load()
		for range 3 {
			if _, err := b.engine.Reserve(&b.writer, body); !errors.Is(err, ErrRotating) {
				t.Fatal(err)
			}
			reserved, err := b.engine.AdvanceGeneration(context.Background(), &b.writer, body, keys.MaxEpoch)
			if reserved || !errors.Is(err, ErrMemoryFull) || !errors.Is(err, errNone) {
				t.Fatalf("reserved %v, %v, want an error for the client that says why", reserved, err)
			}
		}
		if n := b.engine.counters.rotations.Load() - before; n != 0 {
			t.Errorf("%d rotations for a record that was refused", n)
		}
	}
	refusing = false
	b.commit(&w)
	b.put(10, 20, 100)
	b.checkpoint()
}

// TestManyWritersAtOnceMakeAMemtableNoLarger: all of them find it nearly empty, while the first one waits for memory from the system.
func TestManyWritersAtOnceMakeAMemtableNoLarger(t *testing.T) {
	const size = 256 << 10
	var slow atomic.Bool
	o := Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: size, SegmentBytes: size}
	o.Obtain = func(uint64) error {
		if slow.CompareAndSwap(true, false) {
			time.Sleep(50 * time.Millisecond)
		}
		return nil
	}
	b := openBench(t, o)
	slow.Store(true)
	var writers sync.WaitGroup
	largest := 0
	for i := range 8 {
		var builder batch.Builder
		builder.Set(keys.SpaceUser, []byte{byte(i)}, make([]byte, 100<<10))
		body, err := builder.Finish()
		if err != nil {
			t.Fatal(err)
		}
		largest = memtable.MaxSize(body)
		writers.Go(func() {
			w := new(Writer)
			_, err := b.engine.Reserve(w, body)
			switch {
			case err == nil:
				b.engine.NoOp(w)
			case !errors.Is(err, ErrRotating):
				t.Error(err)
			}
		})
	}
	writers.Wait()
	if got := b.engine.view.Load().active.mem.Bytes(); got > size+largest {
		t.Errorf("the memtable has %d KiB", got>>10)
	}
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}
