package lease

import (
	"fmt"
	"runtime"
	"sync/atomic"
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
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var ran atomic.Int64
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			default:
				ran.Add(1)
				runtime.Gosched()
			}
		}
	}()
	found, _, _, err := h.Keys(t.Context(), 1, nil, n)
	got := ran.Load()
	close(stop)
	<-ended
	if err != nil || len(found) != n || got < n/keysPerTurn/2 {
		t.Errorf("%d keys, %v; others ran %d times, want %d", len(found), err, got, n/keysPerTurn)
	}
}
