package cache

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// BenchmarkHit is what a page in memory costs: look-up, warmth and slot. 100k resident pages, visited at random.
func BenchmarkHit(b *testing.B) {
	const pages = 100_000
	for _, policy := range []Policy{TwoBand, LRU} {
		b.Run(fmt.Sprintf("policy=%d", policy), func(b *testing.B) {
			r := newRig(b, pages+1000, policy)
			order := make([]ID, 1<<16)
			random := rand.New(rand.NewPCG(1, 1))
			for i := range order {
				order[i] = ID(random.Uint32N(pages) + 1)
			}
			for range 10 {
				for id := range ID(pages) {
					r.get(b, id+1, Default)
				}
			}
			loads := r.disk.loads.Load()
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				s := r.registry.Slot()
				defer s.Free()
				for i := 0; pb.Next(); i++ {
					s.Enter()
					if _, err := r.Page(order[i&(1<<16-1)], Default); err != nil {
						panic(err)
					}
					s.Leave()
				}
			})
			if r.disk.loads.Load() != loads {
				b.Fatal("missed")
			}
		})
	}
}
