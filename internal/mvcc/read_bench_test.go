package mvcc

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// benchTree opens a store with n random keys of 16 bytes and values of 100, all in the tree and in the cache.
func benchTree(b *testing.B, n int) (*Store, []byte) {
	o := Options{Storage: storage.Options{Dir: b.TempDir(), FS: vfs.NewOS(), MemoryBytes: 2 << 30}}
	s := mustOpen(b, o)
	x := mustSession(b, s)
	defer x.Close()
	rng := rand.New(rand.NewPCG(1, 1))
	list := make([]byte, 16*n)
	value := make([]byte, 100)
	var w Write
	for i := range n {
		key := list[i*16 : i*16+16]
		binary.BigEndian.PutUint64(key, rng.Uint64())
		binary.BigEndian.PutUint64(key[8:], rng.Uint64())
		w.Reset()
		w.Durability = DurabilityAsync
		w.Set(key, value)
		if _, err := x.Commit(context.Background(), &w); err != nil {
			b.Fatal(err)
		}
	}
	if err := s.Checkpoint(b.Context()); err != nil {
		b.Fatal(err)
	}
	if got := countPrefix(b, x, "", ""); got != n {
		b.Fatalf("%d of %d keys", got, n)
	}
	return s, list
}

// BenchmarkGetTree reads random keys through the whole read path with an empty memtable, value copied out.
func BenchmarkGetTree(b *testing.B) {
	const n = 500_000
	s, list := benchTree(b, n)
	for _, readers := range []int{1, 2} {
		b.Run(fmt.Sprintf("readers=%d", readers), func(b *testing.B) {
			b.ReportAllocs()
			var wg sync.WaitGroup
			for r := range readers {
				wg.Go(func() {
					x := mustSession(b, s)
					defer x.Close()
					rng := rand.New(rand.NewPCG(2, uint64(r)))
					var buf []byte
					for range b.N / readers {
						i := rng.IntN(n)
						v, err := x.Get(buf[:0], list[i*16:i*16+16], 0)
						if err != nil || !v.Found {
							b.Error("missing", err)
							return
						}
						buf = v.Data
					}
				})
			}
			wg.Wait()
		})
	}
}

// BenchmarkScanTree scans 100 entries from random keys, keys and values copied out.
func BenchmarkScanTree(b *testing.B) {
	const n = 500_000
	s, list := benchTree(b, n)
	x := mustSession(b, s)
	defer x.Close()
	rng := rand.New(rand.NewPCG(2, 2))
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		i := rng.IntN(n)
		if _, err := x.OpenSnapshot(0); err != nil {
			b.Fatal(err)
		}
		c, err := x.Scan(ScanOptions{Lower: list[i*16 : i*16+16]})
		if err != nil {
			b.Fatal(err)
		}
		for k := 0; k < 100 && c.Next(); k++ {
			buf = append(append(buf[:0], c.Key()...), c.Value()...)
		}
		c.Close()
		x.CloseSnapshot()
	}
}
