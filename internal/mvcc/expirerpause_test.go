//go:build invariants

package mvcc

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
)

// TestDeadlineAfterASlowCommitIsNotOverlooked: a pass that begins while the entry is installed and not visible waits for it.
func TestDeadlineAfterASlowCommitIsNotOverlooked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustOpen(t, atLeisure())
		slow, x := mustSession(t, s), mustSession(t, s)
		defer slow.Close()
		defer x.Close()
		time.Sleep(time.Second) // the expirer rests
		reserved, release := make(chan struct{}), make(chan struct{})
		slow.committing.atStep = func(step commitStep) {
			if step == stepReserved {
				close(reserved)
				<-release
			}
		}
		var writer sync.WaitGroup
		writer.Go(func() {
			w := &Write{Durability: DurabilityAsync}
			w.Set([]byte("slow"), nil)
			if _, err := slow.Commit(context.Background(), w); err != nil {
				t.Error(err)
			}
		})
		<-reserved
		w := &Write{Durability: DurabilityAsync}
		w.SetWithMetadata([]byte("due"), nil, &metadata.Fields{ExpiresAt: in(s, -1)})
		e, err := x.Commit(context.Background(), w)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) // the pass has begun
		close(release)
		writer.Wait()
		slow.committing.atStep = nil
		if err := s.Wait(context.Background(), e, DurabilityAsync); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1100 * time.Millisecond)
		if get(t, s, "due", 0) != "-" || s.expirer.next.Load() != noDeadline {
			t.Errorf("the key is there, and the expirer waits for %d", s.expirer.next.Load())
		}
	})
}
