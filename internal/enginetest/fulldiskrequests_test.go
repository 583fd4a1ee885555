package enginetest

import (
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// idNumber is an id of a request of now.
func idNumber(i int) (id mvcc.RequestID) {
	binary.BigEndian.PutUint64(id[:], uint64(time.Now().UnixMilli())<<16)
	binary.BigEndian.PutUint64(id[8:], uint64(i))
	id[6], id[8] = 0x70, 0x80
	return id
}

// TestFencesTakeNothingOfTheReserveOfAFullDisk: a record that says that a request is cancelled frees nothing. What is known of a request is told.
func TestFencesTakeNothingOfTheReserveOfAFullDisk(t *testing.T) {
	fs := vfs.NewMem()
	fs.SetCapacity(fullDiskBytes)
	s := mustOpen(t, reserving(fs))
	x := mustSession(t, s)
	defer x.Close()
	fence := func(i int) (mvcc.OutcomeState, error) {
		known, _, err := x.Fence(t.Context(), &mvcc.Request{ID: idNumber(i)}, mvcc.DurabilityAsync)
		return known.State, err
	}
	earlier := mvcc.Request{ID: idNumber(0)}
	if _, _, err := x.Fence(t.Context(), &earlier, mvcc.DurabilityAsync); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	if fillDisk(t, s, want) == nil {
		t.Fatal("there is no shortage")
	}
	n := 1
	var err error
	for ; n < 50_000 && err == nil; n++ {
		_, err = fence(n)
	}
	t.Log(n, "fences, then", err)
	if !errors.As(err, new(*storage.ShortageError)) {
		t.Error(err)
	}
	if known, _, err := x.Fence(t.Context(), &earlier, mvcc.DurabilityAsync); err != nil || known.State != mvcc.OutcomeCancelled {
		t.Errorf("of a request that was cancelled before: %v, %v", known, err)
	}
	for key := range want {
		mustDelete(t, s, key)
		delete(want, key)
	}
	awaitSpace(t, s, "later")
	if known, err := fence(n); err != nil || known != mvcc.OutcomeCancelled {
		t.Errorf("after the shortage: %v, %v", known, err)
	}
	want["later"] = "v"
	mustHold(t, s, want)
}
