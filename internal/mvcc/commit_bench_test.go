package mvcc

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

func benchOptions(b *testing.B, serial bool, segment int64) Options {
	return Options{Storage: storage.Options{
		Dir: b.TempDir(), FS: vfs.NewOS(), MemoryBytes: 4 << 30, CacheBytes: 1 << 20, MemtableBytes: segment, SegmentBytes: segment,
		SerialAppend: serial,
	}}
}

// BenchmarkPut commits random keys of 16 bytes with values of 100: where=async/append=lockfree/writers=1 ...
func BenchmarkPut(b *testing.B) {
	for _, d := range []struct {
		name       string
		durability Durability
	}{{"async", DurabilityAsync}, {"sync", DurabilitySync}} {
		for _, serial := range []bool{false, true} {
			for _, writers := range []int{1, 2, 4, 8, 64} {
				b.Run(fmt.Sprintf("durability=%s/serial=%v/writers=%d", d.name, serial, writers), func(b *testing.B) {
					s := mustOpen(b, benchOptions(b, serial, 64<<20))
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
