package cache

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// BenchmarkHit measures the cost of a page in memory: look-up, usage count and slot. It has 100k
// resident pages, visited at random.
func BenchmarkHit(b *testing.B) {
	const pages = 100_000
	r := newRig(b, pages+1000)
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
		visitor := new(Visitor) // each reader has its own
		for i := 0; pb.Next(); i++ {
			s.Enter()
			if _, err := r.Visit(order[i&(1<<16-1)], Default, visitor); err != nil {
				panic(err)
			}
			s.Leave()
		}
	})
	if r.disk.loads.Load() != loads {
		b.Fatal("missed")
	}
}

// BenchmarkMiss reads pages of which the cache holds few: one in eleven is found. The pages come
// from a file that the operating system has in memory, so that the cost of the cache (a victim, its
// retirement, a flight, the table) is not hidden by a device. The arm without a cache is a plain
// pread.
func BenchmarkMiss(b *testing.B) {
	const frames, pages, pageSize = 2048, 11 * 2048, 8192
	file, err := os.Create(filepath.Join(b.TempDir(), "pages"))
	if err != nil {
		b.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(pages * pageSize); err != nil {
		b.Fatal(err)
	}
	load := func(id ID, buf []byte) error { _, err := file.ReadAt(buf, int64(id-1)*pageSize); return err }
	registry := newRegistry()
	for _, name := range []string{"none", "usage count"} {
		c, err := New(Config{Bytes: frames * pageSize, PageSize: pageSize, Registry: registry, Read: load})
		if err != nil {
			b.Fatal(err)
		}
		for _, readers := range []int{1, 2, 8} {
			b.Run(fmt.Sprintf("cache=%s/readers=%d", name, readers), func(b *testing.B) {
				before := c.Stats()
				var wg sync.WaitGroup
				for g := range readers {
					wg.Go(func() {
						s := registry.Slot()
						defer s.Free()
						buf := make([]byte, pageSize)
						random := rand.New(rand.NewPCG(1, uint64(g)))
						for range b.N / readers {
							id := ID(random.Uint32N(pages) + 1)
							if name == "none" {
								_ = load(id, buf)
								continue
							}
							s.Enter()
							if _, err := c.Page(id, Default); err != nil {
								panic(err)
							}
							s.Leave()
						}
					})
				}
				wg.Wait()
				after := c.Stats()
				b.ReportMetric(float64(after.Examined-before.Examined)/float64(max(1, after.Evicted-before.Evicted)), "visits/victim")
				b.ReportMetric(float64(after.Uncached-before.Uncached)/float64(b.N)*100, "uncached%")
			})
		}
		_ = c.Close()
	}
}
