package mvcc

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/ablation"
)

// BenchmarkPutWithID commits random keys of 16 bytes with values of 100, with a request id and without.
func BenchmarkPutWithID(b *testing.B) {
	for _, ids := range []bool{false, true} {
		for _, writers := range []int{1, 2} {
			b.Run(fmt.Sprintf("ids=%v/writers=%d", ids, writers), func(b *testing.B) {
				s := mustOpen(b, benchOptions(b, ablation.Baseline{}, 256<<20))
				b.ReportAllocs()
				used := cpuTime(b)
				b.ResetTimer()
				var wg sync.WaitGroup
				for i := range writers {
					wg.Go(func() { benchIdentified(b, s, ids, i, b.N/writers) })
				}
				wg.Wait()
				b.ReportMetric(float64(cpuTime(b)-used)/float64(b.N), "user-ns/op")
			})
		}
	}
}

func benchIdentified(b *testing.B, s *Store, ids bool, seed, n int) {
	x := mustSession(b, s)
	defer x.Close()
	rng := rand.New(rand.NewPCG(1, uint64(seed)))
	key, value := make([]byte, 16), make([]byte, 100)
	var w Write
	var r Request
	for i := range n {
		binary.BigEndian.PutUint64(key, rng.Uint64())
		binary.BigEndian.PutUint64(key[8:], rng.Uint64())
		w.Reset()
		w.Durability = DurabilityAsync
		if ids {
			binary.BigEndian.PutUint64(r.ID[:], uint64(time.Now().UnixMilli())<<16|7<<12|rng.Uint64()&0xfff)
			binary.BigEndian.PutUint64(r.ID[8:], 0b10<<62|rng.Uint64()>>2)
			w.Identify(&r)
		}
		w.Set(key, value)
		epoch, err := x.Commit(b.Context(), &w)
		if err == nil && i%epochsAheadMax == 0 {
			err = s.Wait(b.Context(), epoch, DurabilityAsync)
		}
		if err != nil {
			b.Error(err)
			return
		}
	}
}

// cpuTime is the processor time of the process in user mode, which other load of the machine changes less than the time by the clock.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano())
}
