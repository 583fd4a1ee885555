package lease

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestNewLeasesTakeNothingOfTheReserveOfAFullDisk: it is kept for deletions. Leases that exist live on.
func TestNewLeasesTakeNothingOfTheReserveOfAFullDisk(t *testing.T) {
	fs := vfs.NewMem()
	fs.SetCapacity(4 << 20)
	so := storeOptions(fs)
	so.Storage.PageSize, so.Storage.DiskReserve, so.Storage.StallMax = 512, storage.DiskReserveDerived, time.Second
	so.Storage.MemtableBytes, so.Storage.SegmentBytes, so.Storage.CheckpointBytes = 32<<10, 32<<10, 64<<10
	so.SyncInterval = time.Millisecond
	h, err := tryOpenStore(t, so, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer h.stop()
	h.mustGrant(1, time.Hour)
	key := func(i int) string { return fmt.Sprintf("k%05d", i) }
	n := 0
	for h.store.Shortage() == nil {
		for ; err == nil; n++ {
			err = h.put(key(n), strings.Repeat("v", 1000), 0)
		}
		if short := new(storage.ShortageError); !errors.As(err, &short) {
			t.Fatal(err)
		}
		for range 3 { // the next one releases what the last one freed
			if err = h.store.Checkpoint(t.Context()); err != nil && !errors.Is(err, vfs.ErrNoSpace) {
				t.Fatal(err)
			}
		}
		err = nil
	}
	granted := 0
	for ; granted < 20_000; granted++ {
		if _, _, err = h.Grant(t.Context(), 0, time.Hour, strings.Repeat("o", OwnerBytesMax)); err != nil {
			break
		}
	}
	t.Log(n, "keys,", granted, "leases, then", err)
	if short := new(storage.ShortageError); !errors.As(err, &short) {
		t.Error(err)
	}
	if _, err := h.KeepAlive(t.Context(), 1); err != nil {
		t.Error(err)
	}
	for i := range n {
		err := h.write(func(w *mvcc.Write) { w.Delete([]byte(key(i))) })
		for deadline := time.Now().Add(5 * time.Second); err != nil && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
			err = h.write(func(w *mvcc.Write) { w.Delete([]byte(key(i))) })
		}
		if err != nil {
			t.Fatalf("deletion %d: %v", i, err)
		}
	}
}
