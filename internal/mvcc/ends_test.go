package mvcc

import (
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWhatEndsIsThrottledApart: commits that end what clients have left have a part of their own of what merges take in (storage.Engine.Throttle), and
// those of clients do not.
func TestWhatEndsIsThrottledApart(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	for _, c := range []struct {
		origin batch.Origin
		ends   bool
	}{
		{batch.OriginExpiry, true}, {batch.OriginClient, false}, {batch.OriginLease, true}, {batch.OriginRestore, false}, {batch.OriginCleanup, true},
	} {
		w := &Write{Durability: DurabilityAsync, Origin: c.origin}
		w.Set([]byte("k"), []byte("v"))
		if _, err := commitAndWait(x, w); err != nil {
			t.Fatal(err)
		}
		if got := x.committing.writer.Ends; got != c.ends {
			t.Errorf("origin %d: %v", c.origin, got)
		}
	}
}

// TestTheExpirerIsThrottledApart: with the share of two clients among very many it would delete less than they write, for ever.
func TestTheExpirerIsThrottledApart(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	putWith(t, x, "k", "v", metadata.Fields{ExpiresAt: 1})
	x.Close()
	for s.Stats().Expiry.Expired == 0 {
		time.Sleep(time.Millisecond)
	}
	mustClose(t, s)
	apart := false
	for _, worker := range s.expirer.sessions {
		apart = apart || worker.committing.writer.Ends
	}
	if !apart {
		t.Error("its commits are throttled as those of clients")
	}
}
