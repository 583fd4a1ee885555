package page

import (
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// BenchmarkVerify is what a page costs when it enters the cache, in addition to its checksum.
func BenchmarkVerify(b *testing.B) {
	p := make([]byte, SizeDefault)
	var sum LeafSize
	var entries []Entry
	for i := 0; ; i++ {
		e := Entry{Key: fmt.Appendf(nil, "\x10%08x%08d", i*7919, i), Value: make([]byte, 100), Trailer: keys.MakeTrailer(1, keys.KindSet)}
		if sum.With(&e) > Payload(len(p)) {
			break
		}
		sum.Add(&e)
		entries = append(entries, e)
	}
	b.Run("what=build", func(b *testing.B) {
		for range b.N {
			BuildLeaf(p, 1, entries)
		}
	})
	SetID(p, 5)
	b.Run("what=checksum", func(b *testing.B) {
		for range b.N {
			if Check(p, 5) != nil {
				b.Fatal("damaged")
			}
		}
	})
	b.Run("what=contents", func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			if Verify(p) != nil {
				b.Fatal("malformed")
			}
		}
	})
}
