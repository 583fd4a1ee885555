package mvcc

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
)

// TestExpirerWaitsForReservedEpochs: a key with a deadline is installed, and invisible, because a commit before it is not installed,
// when a pass of the expirer begins. The pass sets the next deadline to none, so it must see the key: nothing else will look for it.
func TestExpirerWaitsForReservedEpochs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustOpen(t, atLeisure())
		x, neighbour := mustSession(t, s), mustSession(t, s)
		defer x.Close()
		defer neighbour.Close()
		time.Sleep(time.Second)
		install := reserveOnly(t, neighbour, "neighbour")
		w := Write{Durability: DurabilityAsync}
		w.SetWithMetadata([]byte("k"), []byte("v"), &metadata.Fields{ExpiresAt: in(s, 100*time.Millisecond)})
		if _, err := x.Commit(context.Background(), &w); err != nil {
			t.Fatal(err)
		}
		for s.expirer.next.Load() != noDeadline { // until the pass has begun
			time.Sleep(10 * time.Millisecond)
		}
		synctest.Wait()
		install()
		if err := s.Wait(context.Background(), s.engine.Reserved(), DurabilityAsync); err != nil {
			t.Fatal(err)
		}
		if time.Sleep(2 * expirySleepMax); s.expirer.expired.Load() != 1 || len(dump(t, s)) != 1 {
			t.Errorf("%d keys have expired; the store has %v", s.expirer.expired.Load(), dump(t, s))
		}
	})
}

// reserveOnly stops a put after the reservation of its epoch, until it is called.
func reserveOnly(t *testing.T, x *Session, key string) (install func()) {
	t.Helper()
	ctx := context.Background()
	w := &Write{Durability: DurabilityAsync}
	w.Set([]byte(key), nil)
	if err := x.prepare(w); err != nil {
		t.Fatal(err)
	}
	if err := x.lock(ctx, w); err != nil {
		t.Fatal(err)
	}
	x.slot.Enter()
	epoch, err := x.reserve(ctx, w)
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := x.complete(ctx, w, epoch); err != nil {
			t.Error(err)
		}
		x.slot.Leave()
		x.unlock()
		w.Batch.ReleaseShared()
	}
}
