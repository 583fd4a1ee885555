package pin

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestAnOwnerOfLeasesEndsNoneOfOthers: whatever an owner leases, and whether it does so before or after another one.
func TestAnOwnerOfLeasesEndsNoneOfOthers(t *testing.T) {
	const most, own, floods = 4096, 10, 100_000
	for name, first := range map[string]bool{"before": true, "after": false} {
		t.Run(name, func(t *testing.T) {
			r, _ := newTestRegistry(1)
			now := time.Now()
			add := func(e keys.Epoch, owner string) {
				now = now.Add(time.Microsecond)
				r.AddLease(e, owner, now.Add(time.Minute), most)
			}
			for e := range keys.Epoch(own) {
				if first {
					add(e, "flood")
				}
				add(e, "victim")
			}
			for e := range keys.Epoch(own) {
				add(e, "flood")
			}
			for e := range keys.Epoch(floods) {
				add(own+e, "flood")
			}
			for e := range keys.Epoch(own) {
				if r.leases.epochs[e] == nil {
					t.Errorf("epoch %d is leased no more", e)
				}
			}
			if n := len(r.Leases()); n != most {
				t.Errorf("%d leases, want %d", n, most)
			}
			add(own+floods, "newcomer")
			if r.leases.epochs[own+floods] == nil || r.leases.owners["newcomer"] == nil {
				t.Error("a newcomer has no place")
			}
			r.AdvanceLowWatermark(nil, forever, now.Add(2*time.Minute))
			checkNoLeases(t, r)
		})
	}
}

// TestLeasesOfOneEpochAreBounded: each owner has a part of the lease.
func TestLeasesOfOneEpochAreBounded(t *testing.T) {
	const most = 5
	r, _ := newTestRegistry(1)
	now := time.Now()
	for i := range 10 * most * partsPerLease {
		r.AddLease(7, fmt.Sprint(i), now.Add(time.Duration(i)*time.Second), most)
	}
	if n := len(r.leases.parts); n != most*partsPerLease {
		t.Errorf("%d parts, want %d", n, most*partsPerLease)
	}
	leases := r.Leases()
	if len(leases) != 1 || !leases[0].Until.Equal(now.Add((10*most*partsPerLease-1)*time.Second)) {
		t.Fatalf("%v, want one lease, for as long as its part that ends last", leases)
	}
	if ended, ok := r.EndLease(leases[0].ID); !ok || ended != leases[0] {
		t.Errorf("ended %v, %v; want %v", ended, ok, leases[0])
	}
	if _, ok := r.EndLease(leases[0].ID); ok {
		t.Error("it ends a second time")
	}
	checkNoLeases(t, r)
}

func checkNoLeases(t *testing.T, r *Registry) {
	t.Helper()
	if l := &r.leases; len(l.epochs)+len(l.parts)+len(l.owners)+len(l.most) != 0 {
		t.Errorf("in the end %d epochs, %d parts, %d owners, %d of them in order", len(l.epochs), len(l.parts), len(l.owners), len(l.most))
	}
}

// leaseModel is leases without an order: each question walks over all parts.
type leaseModel map[partKey]time.Time

func (m leaseModel) add(e keys.Epoch, owner string, until time.Time, leasesMax int) {
	key := partKey{e, owner}
	if old, ok := m[key]; ok {
		if until.After(old) {
			m[key] = until
		}
		return
	}
	for {
		epochs := m.epochs()
		_, leased := epochs[e]
		if len(m) < partsPerLease*leasesMax && (leased || len(epochs) < leasesMax) {
			break
		}
		delete(m, m.victim(owner))
	}
	m[key] = until
}

// epochs are the leased epochs, each with the end of its lease.
func (m leaseModel) epochs() map[keys.Epoch]time.Time {
	epochs := map[keys.Epoch]time.Time{}
	for key, until := range m {
		if until.After(epochs[key.epoch]) {
			epochs[key.epoch] = until
		}
	}
	return epochs
}

func (m leaseModel) victim(newcomer string) (victim partKey) {
	counts := map[string]int{}
	for key := range m {
		counts[key.owner]++
	}
	most := 0
	for _, n := range counts {
		most = max(most, n)
	}
	own := counts[newcomer] > 0 && counts[newcomer]+1 >= most
	var first time.Time
	for key, until := range m {
		if own && key.owner == newcomer || !own && counts[key.owner] == most {
			if first.IsZero() || until.Before(first) {
				victim, first = key, until
			}
		}
	}
	return victim
}

func (m leaseModel) end(ended func(key partKey, until time.Time) bool) {
	for key, until := range m {
		if ended(key, until) {
			delete(m, key)
		}
	}
}

func TestLeasesAreThoseOfAModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(testseed.Base(t), 0)) //nolint:gosec // a test
	for range 20 {
		r, _ := newTestRegistry(1)
		m, most, owners := leaseModel{}, 1+rng.IntN(12), 1+rng.IntN(12)
		start := time.Now()
		for i := range 500 {
			now := start.Add(time.Duration(i) * time.Second)
			switch rng.IntN(40) {
			case 0:
				r.AdvanceLowWatermark(nil, forever, now)
				m.end(func(_ partKey, until time.Time) bool { return now.After(until) })
			case 1:
				for _, lease := range r.Leases()[:min(1, len(r.Leases()))] {
					r.EndLease(lease.ID)
					m.end(func(key partKey, _ time.Time) bool { return key.epoch == lease.Epoch })
				}
			default:
				e, owner := keys.Epoch(rng.IntN(2*most)), fmt.Sprint(min(rng.IntN(owners), rng.IntN(owners)))
				until := now.Add(time.Duration(rng.IntN(100))*time.Second + time.Duration(i)) // no two are the same
				r.AddLease(e, owner, until, most)
				m.add(e, owner, until, most)
			}
			compareLeases(t, r, m)
		}
		r.AdvanceLowWatermark(nil, forever, start.Add(time.Hour))
		checkNoLeases(t, r)
	}
}

func compareLeases(t *testing.T, r *Registry, m leaseModel) {
	t.Helper()
	counts := map[string]int{}
	for key, until := range m {
		counts[key.owner]++
		if p := r.leases.parts[key]; p == nil || !p.until.Equal(until) {
			t.Fatalf("part %v, want %v until %v", p, key, until)
		}
	}
	if len(r.leases.parts) != len(m) || len(r.leases.owners) != len(counts) || len(r.leases.most) != len(counts) {
		t.Fatalf("%d parts of %d owners, want %d of %d", len(r.leases.parts), len(r.leases.owners), len(m), len(counts))
	}
	for owner, n := range counts {
		if got := len(r.leases.owners[owner].parts); got != n {
			t.Fatalf("owner %s has %d parts, want %d", owner, got, n)
		}
	}
	epochs := m.epochs()
	for _, lease := range r.Leases() {
		if !lease.Until.Equal(epochs[lease.Epoch]) {
			t.Fatalf("lease %v, want until %v", lease, epochs[lease.Epoch])
		}
	}
	if n := len(r.Leases()); n != len(epochs) {
		t.Fatalf("%d leases, want %d", n, len(epochs))
	}
}

// BenchmarkAddLease is what the end of a scan with a token costs while one client has all leases.
func BenchmarkAddLease(b *testing.B) {
	const most = 4096
	r, _ := newTestRegistry(1)
	now := time.Now()
	for i := range b.N + most {
		if i == most {
			b.ResetTimer()
		}
		r.AddLease(keys.Epoch(i), "client", now.Add(time.Duration(i)), most)
	}
}
