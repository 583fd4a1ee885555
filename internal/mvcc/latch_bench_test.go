package mvcc

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/ablation"
)

// BenchmarkLatches takes the latches of random keys, notes an epoch under them and releases them, as a commit does.
func BenchmarkLatches(b *testing.B) {
	for _, n := range []int{1, 4, 100} {
		b.Run(fmt.Sprintf("keys=%d", n), func(b *testing.B) {
			l, w, ctx := newLatches(ablation.Switches{}), newWaiter(), context.Background()
			var set latchSet
			rng, key := rand.New(rand.NewPCG(1, 2)), make([]byte, 16)
			for b.Loop() {
				set.reset()
				for range n {
					binary.BigEndian.PutUint64(key, rng.Uint64())
					set.add(l, key)
				}
				if err := l.lock(ctx, &set, w); err != nil {
					b.Fatal(err)
				}
				l.wrote(&set, l.newest(&set)+1)
				l.unlock(&set)
			}
		})
	}
}
