package mvcc

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/storage"
)

// BenchmarkBulkLoad loads a million keys of 16 bytes with values of 100 into an empty store, intake, sort, merge and syncs included.
func BenchmarkBulkLoad(b *testing.B) {
	const n = 1_000_000
	for _, order := range []string{"sorted", "random"} {
		b.Run("order="+order, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				s, err := Open(Options{Storage: storage.Options{Dir: b.TempDir(), MemoryBytes: 1 << 30}})
				if err != nil {
					b.Fatal(err)
				}
				rng := rand.New(rand.NewPCG(1, 1))
				key, value := make([]byte, 16), make([]byte, 100)
				b.StartTimer()
				l, err := s.BeginBulkLoad()
				if err != nil {
					b.Fatal(err)
				}
				for i := range uint64(n) {
					binary.BigEndian.PutUint64(key, i)
					if order == "random" {
						binary.BigEndian.PutUint64(key, rng.Uint64())
					}
					binary.LittleEndian.PutUint64(value, i)
					if err := l.Add(key, value); err != nil {
						b.Fatal(err)
					}
				}
				if _, err := l.Commit(context.Background()); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := l.Close(); err != nil {
					b.Fatal(err)
				}
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(n*float64(b.N)/b.Elapsed().Seconds(), "keys/s")
		})
	}
}
