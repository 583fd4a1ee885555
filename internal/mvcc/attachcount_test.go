package mvcc

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// withRoom is the guard of leases that have room for everything, or of those that admit refuses.
func withRoom(admit func(lease uint64, keys int) error) LeaseGuard {
	g := LeaseGuard{Admit: admit, Room: func(uint64) int { return 0 }}
	if admit == nil {
		g.Admit, g.Room = func(uint64, int) error { return nil }, func(uint64) int { return math.MaxInt }
	}
	return g
}

// attachments counts those of a lease.
func attachments(t *testing.T, s *Store, lease uint64) (n int) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	lower := keys.AppendOwned(nil, keys.SystemAttachment, lease, nil)
	upper := keys.AppendOwned(nil, keys.SystemAttachment, lease+1, nil)
	if err := x.ScanSystem(t.Context(), lower, upper, func([]byte, []byte, keys.Epoch) bool { n++; return true }); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestAttachmentsOfAFullLeaseAreCountedWithoutLatches: the cache has room for few of the pages that have them. Also if each key names another lease
// than the one before.
func TestAttachmentsOfAFullLeaseAreCountedWithoutLatches(t *testing.T) {
	testseed.SkipUnderRace(t)
	const count = 4000
	for _, leases := range []int{1, 2} {
		t.Run(fmt.Sprint(leases), func(t *testing.T) {
			s := mustOpen(t, smallCache(vfs.NewMem()))
			s.GuardLeases(withRoom(nil))
			x := mustSession(t, s)
			defer x.Close()
			put := func(from, to int) {
				t.Helper()
				w := Write{Durability: DurabilityAsync}
				for i := from; i < to; i++ {
					w.SetWithMetadata(fmt.Appendf(nil, "key%06d %0200d", i, i), nil, &metadata.Fields{Lease: uint64(1 + i%leases)})
				}
				if _, err := x.Commit(t.Context(), &w); err != nil {
					t.Fatal(err)
				}
			}
			for i := 0; i < count; i += 500 {
				put(i, i+500)
			}
			mustCheckpoint(t, s)
			var first, again int
			s.GuardLeases(withRoom(func(_ uint64, keys int) error {
				if first == again {
					first++
					return fmt.Errorf("%d keys: %w", keys, ErrLeaseFull)
				}
				if again++; keys != 0 && again <= count {
					t.Errorf("%d keys are attached", keys)
				}
				return nil
			}))
			before, latched := uint64(0), false
			x.Permit(func() error { // the latches are held
				if !latched {
					latched = true
					before, _ = x.reader.TakeReads()
				}
				return nil
			})
			x.reader.TakeReads()
			put(0, count)
			if n, _ := x.reader.TakeReads(); n > 16 || before < 100 || first == 0 || first != again {
				t.Errorf("%d reads of the device while the latches are held, and %d before; refused %d times, admitted %d times", n, before, first, again)
			}
		})
	}
}

// TestAttachmentsAreCountedExactly although others attach keys to the leases between the count and the latches.
func TestAttachmentsAreCountedExactly(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	var leases [2]struct { // each of the latch of its lease
		admitted int
		refused  bool
	}
	s.GuardLeases(withRoom(func(lease uint64, keys int) error {
		of := &leases[lease-1]
		if of.refused = !of.refused; of.refused {
			return ErrLeaseFull
		}
		of.admitted += keys
		return nil
	}))
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(worker)))
			x, err := s.Session()
			if err != nil {
				t.Error(err)
				return
			}
			defer x.Close()
			for range 100 {
				w := Write{Durability: DurabilityAsync}
				for _, i := range r.Perm(5000)[:readBeforeMin+r.IntN(8)] {
					w.SetWithMetadata(fmt.Append(nil, "key", i), nil, &metadata.Fields{Lease: uint64(1 + i%2)})
				}
				if _, err := x.Commit(context.Background(), &w); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	for i, of := range leases {
		if there := attachments(t, s, uint64(1+i)); of.admitted != there {
			t.Errorf("%d attachments were admitted to lease %d, and there are %d", of.admitted, 1+i, there)
		}
	}
}
