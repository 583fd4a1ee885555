package mvcc

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

func benchOptions(b *testing.B, baseline ablation.Baseline, segment int64) Options {
	b.Helper()
	return Options{Storage: storage.Options{
		Dir: b.TempDir(), FS: vfs.NewOS(), MemoryBytes: 4 << 30, CacheBytes: 1 << 20, MemtableBytes: segment, SegmentBytes: segment,
		Ablation: mustSwitch(b, baseline),
	}}
}

func mustSwitch(tb testing.TB, baseline ablation.Baseline) ablation.Switches {
	tb.Helper()
	switches, err := ablation.New(baseline)
	if err != nil {
		tb.Fatal(err)
	}
	return switches
}

// baselines are EpochKV itself and, in a build with the tag `ablation`, the same under one latch.
func baselines() []ablation.Baseline {
	if ablation.Enabled {
		return []ablation.Baseline{{}, {OneMutex: true}}
	}
	return []ablation.Baseline{{}}
}

// benchGroups are how many commits of a writer share one wait: with more than one it runs ahead of visible.
var benchGroups = []int{1, epochsAheadMax}

// BenchmarkPut commits random keys of 16 bytes with values of 100.
func BenchmarkPut(b *testing.B) {
	for _, d := range []struct {
		name       string
		durability Durability
	}{{"async", DurabilityAsync}, {"sync", DurabilitySync}} {
		for _, baseline := range baselines() {
			for _, writers := range []int{1, 2, 4, 8, 64} {
				for _, group := range benchGroups {
					b.Run(fmt.Sprintf("durability=%s/onemutex=%v/writers=%d/group=%d", d.name, baseline.OneMutex, writers, group), func(b *testing.B) {
						s := mustOpen(b, benchOptions(b, baseline, 64<<20))
						b.ReportAllocs()
						b.ResetTimer()
						var wg sync.WaitGroup
						for i := range writers {
							wg.Go(func() { benchPuts(b, s, d.durability, i, b.N/writers, group) })
						}
						wg.Wait()
					})
				}
			}
		}
	}
}

// benchPuts is one writer, which waits for its commits in groups.
func benchPuts(b *testing.B, s *Store, d Durability, seed, n, group int) {
	x := mustSession(b, s)
	defer x.Close()
	rng := rand.New(rand.NewPCG(1, uint64(seed)))
	key, value := make([]byte, 16), make([]byte, 100)
	var w Write
	for i := range n {
		binary.BigEndian.PutUint64(key, rng.Uint64())
		binary.BigEndian.PutUint64(key[8:], rng.Uint64())
		w.Reset()
		w.Durability = d
		w.Set(key, value)
		epoch, err := x.Commit(b.Context(), &w)
		if err == nil && (i%group == group-1 || i == n-1) {
			err = s.Wait(b.Context(), epoch, d)
		}
		if err != nil {
			b.Error(err)
			return
		}
	}
}

// BenchmarkBatch commits batches of 100 random keys of 16 bytes with values of 100; counted per batch.
func BenchmarkBatch(b *testing.B) {
	const pairs = 100
	for _, writers := range []int{1, 2, 8} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			s := mustOpen(b, benchOptions(b, ablation.Baseline{}, 64<<20))
			b.ReportAllocs()
			b.ResetTimer()
			var wg sync.WaitGroup
			for i := range writers {
				wg.Go(func() {
					x := mustSession(b, s)
					defer x.Close()
					rng := rand.New(rand.NewPCG(1, uint64(i)))
					key, value := make([]byte, 16), make([]byte, 100)
					var w Write
					for range b.N / writers {
						w.Reset()
						w.Durability = DurabilityAsync
						for range pairs {
							binary.BigEndian.PutUint64(key, rng.Uint64())
							w.Set(key, value)
						}
						if _, err := commitAndWait(x, &w); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
