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

// BenchmarkPut commits random keys of 16 bytes with values of 100.
func BenchmarkPut(b *testing.B) {
	for _, d := range []struct {
		name       string
		durability Durability
	}{{"async", DurabilityAsync}, {"sync", DurabilitySync}} {
		for _, baseline := range baselines() {
			for _, writers := range []int{1, 2, 4, 8, 64} {
				b.Run(fmt.Sprintf("durability=%s/onemutex=%v/writers=%d", d.name, baseline.OneMutex, writers), func(b *testing.B) {
					s := mustOpen(b, benchOptions(b, baseline, 64<<20))
					b.ReportAllocs()
					b.ResetTimer()
					var wg sync.WaitGroup
					for i := range writers {
						wg.Go(func() {
							x := mustSession(b, s)
							defer x.Close()
							rng := rand.New(rand.NewPCG(1, uint64(i)))
							key, value := make([]byte, 16), make([]byte, 100)
							w := Write{Durability: d.durability}
							for range b.N / writers {
								binary.BigEndian.PutUint64(key, rng.Uint64())
								binary.BigEndian.PutUint64(key[8:], rng.Uint64())
								w.Reset()
								w.Durability = d.durability
								w.Set(key, value)
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
	}
}
