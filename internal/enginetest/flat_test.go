package enginetest

import (
	"context"
	"runtime"
	"strconv"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestReadOnlyTransactionsLeaveMemoryFlat: a hundred thousand of them, over memtable and tree, take no memory that stays, no slot, and
// nothing in the store.
func TestReadOnlyTransactionsLeaveMemoryFlat(t *testing.T) {
	const transactions, count = 100_000, 200
	s := mustOpen(t, tiny(vfs.NewMem()))
	for i := range count {
		if i == count/2 {
			if err := s.Checkpoint(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		mustPut(t, s, strconv.Itoa(i), "value")
	}
	x := mustSession(t, s)
	defer x.Close()
	var value, key []byte
	read := func(n int) {
		for i := range n {
			isolation := mvcc.IsolationSnapshot + mvcc.Isolation(i%2)
			tx, err := x.Begin(mvcc.TxnOptions{Isolation: isolation, ReadOnly: true})
			if err != nil {
				t.Fatal(err)
			}
			key = strconv.AppendInt(key[:0], int64(i%count), 10)
			v, err := tx.Get(value[:0], key)
			if err != nil || !v.Found {
				t.Fatalf("%s: found %v, %v", key, v.Found, err)
			}
			value = v.Data
			if _, err := tx.Commit(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
	}
	read(count) // pages and buffers come in
	before := s.Stats()
	var mem, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&mem)
	read(transactions)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(mem.HeapAlloc); grown > 1<<20 {
		t.Errorf("the heap has grown by %d bytes", grown)
	}
	got := s.Stats()
	if got.Visible != before.Visible || got.Storage.Memory.Memtables != before.Storage.Memory.Memtables || got.Storage.Memory.CacheUsed != before.Storage.Memory.CacheUsed {
		t.Errorf("the store has changed: visible %d -> %d, memtables %d -> %d, cache %d -> %d", before.Visible, got.Visible,
			before.Storage.Memory.Memtables, got.Storage.Memory.Memtables, before.Storage.Memory.CacheUsed, got.Storage.Memory.CacheUsed)
	}
	if got.Snapshots.Slots != before.Snapshots.Slots || got.Snapshots.Snapshots != 0 || got.Snapshots.Leases != 0 {
		t.Errorf("snapshots are left: %+v", got.Snapshots)
	}
}
