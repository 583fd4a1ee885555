package storage

import (
	"context"
	"encoding/binary"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestALoadOfManyLargeValuesKeepsLittleOfEach: what a bulk load keeps in memory of each large value until it ends is not
// much more than its entry of the indirection table, which stays there in any case: 31 bytes, of which some are for the load
// as a whole. Before the batch wrote the table in between they were 46.
func TestALoadOfManyLargeValuesKeepsLittleOfEach(t *testing.T) {
	testseed.SkipUnderRace(t)
	const pageSize, count = 512, 200_000
	e, _, err := Open(t.Context(), Options{Dir: t.TempDir(), MemoryBytes: 64 << 20, PageSize: pageSize}, pin.NewRegistry(new(atomic.Uint64)))
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	l, err := e.NewBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	value := make([]byte, page.InlineMax(pageSize)+1)
	for i := range uint64(count) {
		if err := l.Add(keys.Append(nil, keys.SpaceUser, binary.BigEndian.AppendUint64(nil, i)), value); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	x := &measuring{Context: t.Context(), at: count - 1000}
	before := heapBytes()
	if err := e.BuildBulkLoad(x, l, GCWatermarks{Snapshots: []keys.Epoch{0}}); err != nil {
		t.Fatal(err)
	}
	e.CancelBulkLoad(l)
	if grown := x.bytes - before; x.bytes == 0 || grown > 38*count {
		t.Errorf("%d bytes for %d values", grown, count)
	}
}

// measuring measures the heap when it is asked for the time at: a bulk load asks its context before each large value.
type measuring struct {
	context.Context
	asked atomic.Int64
	at    int64
	bytes int64
}

func (m *measuring) Err() error {
	if m.asked.Add(1) == m.at {
		m.bytes = heapBytes()
	}
	return m.Context.Err()
}

func heapBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what pools had, too
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
