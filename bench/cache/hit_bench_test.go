package cache

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/maypok86/otter/v2"
	"golang.org/x/sys/unix"

	"epochkv/internal/cache"
	"epochkv/internal/pin"
)

const resident = 100_000

// cpuPer reports the processor time of each operation, which other work on the machine disturbs less than the clock.
func cpuPer(b *testing.B) func() {
	used := func() int64 {
		var u unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
		return u.Utime.Nano() + u.Stime.Nano()
	}
	start := used()
	return func() { b.ReportMetric(float64(used()-start)/float64(b.N), "cpu-ns/op") }
}

// BenchmarkHit is what finding a page in memory costs by 1, 2, 8 and 24 readers: 100k resident pages, visited in random order.
func BenchmarkHit(b *testing.B) {
	order := make([]uint64, 1<<16)
	random := rand.New(rand.NewPCG(1, 1))
	for i := range order {
		order[i] = random.Uint64N(resident)
	}
	for _, readers := range []int{1, 2, 8, 24} {
		b.Run(fmt.Sprintf("arm=otter/readers=%d", readers), func(b *testing.B) { hitOtter(b, order, readers) })
		for name, policy := range map[string]cache.Policy{"twoband": cache.TwoBand, "lru": cache.LRU} {
			b.Run(fmt.Sprintf("arm=%s/readers=%d", name, readers), func(b *testing.B) { hitOurs(b, order, readers, policy) })
		}
	}
}

// share runs b.N operations by so many readers.
func share(b *testing.B, readers int, run func(reader, n int)) {
	runtime.GC()
	b.ResetTimer()
	defer cpuPer(b)()
	var wg sync.WaitGroup
	for g := range readers {
		wg.Go(func() { run(g, b.N/readers) })
	}
	wg.Wait()
}

func hitOtter(b *testing.B, order []uint64, readers int) {
	c := otter.Must(&otter.Options[uint64, []byte]{MaximumSize: resident * 2})
	for id := range uint64(resident) {
		c.Set(id, make([]byte, 8))
	}
	share(b, readers, func(reader, n int) {
		for i := range n {
			if _, ok := c.GetIfPresent(order[(i+reader*7919)&(1<<16-1)]); !ok {
				panic("missed")
			}
		}
	})
}

func hitOurs(b *testing.B, order []uint64, readers int, policy cache.Policy) {
	visible := new(atomic.Uint64)
	registry := pin.NewRegistry(visible)
	c, err := cache.New(cache.Config{
		Bytes: (resident + 1000) * 64, PageSize: 64, Registry: registry, Policy: policy,
		Load: func(cache.ID, []byte) error { return nil },
	})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	warm := registry.Slot()
	for range 10 {
		for id := range cache.ID(resident) {
			warm.Enter()
			_, _ = c.Page(id+1, cache.Default)
			warm.Leave()
		}
	}
	misses := c.Stats().Misses
	share(b, readers, func(reader, n int) {
		s := registry.Slot()
		defer s.Free()
		hits := new(pin.Counter)
		for i := range n {
			s.Enter()
			if _, err := c.Visit(cache.ID(order[(i+reader*7919)&(1<<16-1)]+1), cache.Default, hits); err != nil {
				panic(err)
			}
			s.Leave()
		}
	})
	if c.Stats().Misses != misses {
		b.Fatal("missed")
	}
}
