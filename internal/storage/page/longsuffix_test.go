package page

import (
	"bytes"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestLongestSuffixesReadBack: suffixes that need bit 14 of the length, next to values and references, followed
// by further versions.
func TestLongestSuffixesReadBack(t *testing.T) {
	for _, size := range []int{SizeMax / 2, SizeMax} {
		for short := range 4 {
			n := KeySizeMax(size) - short
			var entries []Entry
			for i, first := range []byte{'a', 'b', 'c'} {
				key := append([]byte{first}, bytes.Repeat([]byte{'x'}, n-1)...)
				entries = append(entries,
					Entry{Key: key, Trailer: keys.MakeTrailer(9, keys.KindSet), Value: make([]byte, RefSize), Large: i == 1},
					Entry{Key: key, Trailer: keys.MakeTrailer(8, keys.KindSet), Value: []byte("old"), Same: true})
			}
			p := make([]byte, size)
			BuildLeaf(p, 1, entries)
			SetID(p, 7)
			if err := errors.Join(Check(p, 7), Verify(p)); err != nil {
				t.Fatalf("keys of %d bytes in pages of %d: %v", n, size, err)
			}
			v := Leaf(p).Layout()
			for i := range entries {
				e := &entries[i]
				suffix, trailer, value, large := v.At(i)
				if e.Same != v.Same(i) || e.Same != (len(suffix) == 0) || large != e.Large || trailer != e.Trailer || !bytes.Equal(value, e.Value) ||
					!bytes.Equal(v.Suffix(i), e.Key) {
					t.Fatalf("entry %d: suffix of %d bytes, %v, %d bytes of value, large %v", i, len(suffix), trailer, len(value), large)
				}
				got, value, large, ok := Leaf(p).Find(e.Key, Fingerprint(e.Key), e.Trailer.Epoch())
				if !ok || got != e.Trailer || large != e.Large || !bytes.Equal(value, e.Value) {
					t.Fatalf("entry %d is not found: %v, %v", i, ok, got)
				}
				if got := Leaf(p).Search(e.Key); got != i&^1 {
					t.Fatalf("entry %d: a seek ends at %d", i, got)
				}
			}
		}
	}
}
