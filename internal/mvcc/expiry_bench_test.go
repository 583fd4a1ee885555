package mvcc

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

func expiryBenchStore(b *testing.B) *Store {
	s, err := Open(Options{
		Storage:    storage.Options{Dir: b.TempDir() + "/db", FS: vfs.NewOS(), MemoryBytes: 1 << 30},
		Durability: DurabilityAsync,
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := s.Close(); err != nil {
			b.Error(err)
		}
	})
	return s
}

// BenchmarkPutWithDeadline puts random keys of a million with one session. Most keys have a version with a deadline already,
// so that its queue entry is replaced.
func BenchmarkPutWithDeadline(b *testing.B) {
	for _, deadline := range []string{"no", "fresh", "replaced"} {
		b.Run("deadline="+deadline, func(b *testing.B) {
			s := expiryBenchStore(b)
			x := mustSession(b, s)
			defer x.Close()
			w, key, value := &Write{Durability: DurabilityAsync}, make([]byte, 16), make([]byte, 100)
			f := metadata.Fields{ExpiresAt: far}
			commit := func() {
				w.Reset()
				if deadline == "no" {
					w.Set(key, value)
				} else {
					f.ExpiresAt++
					w.SetWithMetadata(key, value, &f)
				}
				if _, err := x.Commit(context.Background(), w); err != nil {
					b.Fatal(err)
				}
			}
			const keys = 100_000
			for i := range uint64(keys) {
				binary.BigEndian.PutUint64(key, i)
				commit()
			}
			n := uint64(0)
			b.ReportAllocs()
			for b.Loop() {
				if n++; deadline == "fresh" {
					binary.BigEndian.PutUint64(key, keys+n)
				} else {
					binary.BigEndian.PutUint64(key, rand.Uint64N(keys))
				}
				commit()
			}
		})
	}
}

// BenchmarkBurst is a million keys that are due in one second, while one session puts others. It reports keys expired in a
// second, and the 99th percentile of the puts before and during the burst.
func BenchmarkBurst(b *testing.B) {
	const keys = 1_000_000
	for b.Loop() {
		s := expiryBenchStore(b)
		x := mustSession(b, s)
		w, key, value := &Write{Durability: DurabilityAsync}, make([]byte, 16), make([]byte, 100)
		due := in(s, 25*time.Second)
		for i := range uint64(keys) {
			w.Reset()
			binary.BigEndian.PutUint64(key, i*0x9E3779B97F4A7C15)
			w.SetWithMetadata(key, value, &metadata.Fields{ExpiresAt: due + i/1000})
			if _, err := x.Commit(context.Background(), w); err != nil {
				b.Fatal(err)
			}
		}
		if s.expirer.now() > due {
			b.Fatal("the keys were due before all were written")
		}
		var quiet, busy []time.Duration
		put := func() time.Duration {
			start := time.Now()
			w.Reset()
			binary.BigEndian.PutUint64(key, rand.Uint64())
			w.Set(key, value)
			if _, err := x.Commit(context.Background(), w); err != nil {
				b.Fatal(err)
			}
			d := time.Since(start)
			time.Sleep(50 * time.Microsecond)
			return d
		}
		for s.expirer.now() < due {
			if due-s.expirer.now() < 5000 {
				quiet = append(quiet, put())
			} else {
				time.Sleep(10 * time.Millisecond)
			}
		}
		start, lag := time.Now(), time.Duration(0)
		for s.expirer.expired.Load() < keys-uint64(expiryBatchMax*expiryCommitsLate) {
			busy = append(busy, put())
			lag = max(lag, s.expirer.lag())
		}
		took := time.Since(start)
		slices.Sort(quiet)
		slices.Sort(busy)
		b.ReportMetric(keys/took.Seconds(), "expiries/s")
		b.ReportMetric(float64(quiet[len(quiet)*99/100].Microseconds()), "quiet-p99-µs")
		b.ReportMetric(float64(busy[len(busy)*99/100].Microseconds()), "busy-p99-µs")
		b.ReportMetric(lag.Seconds(), "lag-s")
		b.ReportMetric(float64(keys)/float64(s.expirer.commits.Load()), "keys/commit")
		x.Close()
	}
}
