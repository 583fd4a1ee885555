package lease

import (
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAWalkOverTheKeysOfALeaseLetsOthersRun: each of them is read, and there may be a million.
func TestAWalkOverTheKeysOfALeaseLetsOthersRun(t *testing.T) {
	testseed.SkipUnderRace(t)
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer func() { h.stop() }()
	h.mustGrant(1, time.Hour)
	const n = 4000
	for i := range n / 100 {
		if err := h.write(func(w *mvcc.Write) {
			for j := range 100 {
				w.SetWithMetadata(fmt.Appendf(nil, "k%06d", 100*i+j), nil, &metadata.Fields{Lease: 1})
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	var found [][]byte
	var err error
	got := testseed.TurnsBeside(func() { found, _, _, err = h.Keys(t.Context(), 1, nil, n) })
	if err != nil || len(found) != n || got < n/keysPerTurn/2 {
		t.Errorf("%d keys, %v; others ran %d times, want %d", len(found), err, got, n/keysPerTurn)
	}
}
