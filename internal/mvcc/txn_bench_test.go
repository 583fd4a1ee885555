package mvcc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/ablation"
)

// BenchmarkTxn runs transactions of one get or put on one of four keys, retried until they commit, durability off.
func BenchmarkTxn(b *testing.B) {
	for _, mix := range []struct {
		name  string
		reads int // percent
	}{{"read-heavy", 90}, {"write-heavy", 10}} {
		for _, goroutines := range []int{1, 2, 4, 8} {
			b.Run(fmt.Sprintf("mix=%s/goroutines=%d", mix.name, goroutines), func(b *testing.B) {
				o := benchOptions(b, ablation.Baseline{}, 64<<20)
				s := mustOpen(b, o)
				for i := range 4 {
					mustPut(b, s, fmt.Sprintf("key-%d", i), "0123456789abcdef")
				}
				b.ReportAllocs()
				b.ResetTimer()
				var wg sync.WaitGroup
				for g := range goroutines {
					wg.Go(func() { runTxns(b, s, uint64(g), mix.reads, b.N/goroutines) })
				}
				wg.Wait()
				b.ReportMetric(float64(s.Stats().Conflicts)/float64(b.N), "aborts/op")
			})
		}
	}
}

func runTxns(b *testing.B, s *Store, seed uint64, reads, n int) {
	x, err := s.Session()
	if err != nil {
		b.Error(err)
		return
	}
	defer x.Close()
	rng := rand.New(rand.NewPCG(seed, 1))
	keys := [4][]byte{[]byte("key-0"), []byte("key-1"), []byte("key-2"), []byte("key-3")}
	value, buf := []byte("0123456789abcdef"), []byte(nil)
	conflict := new(ConflictError)
	for range n {
		r := rng.Uint32()
		key, read := keys[r&3], int(r>>8%100) < reads
		for {
			t, err := x.Begin(TxnOptions{Isolation: IsolationSnapshot, Durability: DurabilityAsync})
			if err != nil {
				b.Error(err)
				return
			}
			if read {
				var v Value
				v, err = t.Get(buf[:0], key)
				buf = v.Data
			} else {
				err = t.Set(key, value)
			}
			if err == nil {
				_, err = t.Commit(context.Background())
			}
			if err == nil {
				break
			}
			if !errors.As(err, &conflict) {
				b.Error(err)
				return
			}
		}
	}
}
