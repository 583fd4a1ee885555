package page

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// damagedNode is an inner node with separators of both kinds.
func damagedNode(size int) []byte {
	p := make([]byte, size)
	children := []Child{{ID: 7, Newest: 9}}
	for i := range 12 {
		s := Separator{Key: []byte{1, 'k', byte('a' + i)}, Trailer: NoTrailer}
		if i%3 == 0 {
			s.Trailer = 1<<20 | 1
		}
		children = append(children, Child{Separator: s, ID: ID(100 + 3*i), Newest: 9, DeadVersions: DeadRatio(i)})
	}
	BuildInner(p, 5, 1, children)
	SetID(p, 42)
	return p
}

// TestOneWrongBitIsCorrected: any bit of a page. Two wrong bits are left as they are.
func TestOneWrongBitIsCorrected(t *testing.T) {
	for _, size := range []int{512, 8192} {
		clean := damagedNode(size)
		for bit := 0; bit < 8*size; bit += size*size/(512*512) + 2 {
			p := bytes.Clone(clean)
			p[bit/8] ^= 1 << (bit % 8)
			if !CorrectBit(p, 42) || !bytes.Equal(p, clean) {
				t.Fatalf("bit %d of %d bytes is not corrected", bit, size)
			}
			other := (bit + 8*size/3) % (8 * size)
			p[bit/8] ^= 1 << (bit % 8)
			p[other/8] ^= 1 << (other % 8)
			if damaged := bytes.Clone(p); CorrectBit(p, 42) || !bytes.Equal(p, damaged) {
				t.Fatalf("bits %d and %d of %d bytes were corrected", bit, other, size)
			}
		}
	}
}

// TestRemainsOfAnyBytesAreRead: garbage ends no process, and an intact page is read as it is.
func TestRemainsOfAnyBytesAreRead(t *testing.T) {
	clean, rng := damagedNode(512), rand.New(rand.NewPCG(1, 2))
	r, ok := InnerRemains(clean, 42)
	if !ok || r.Level != 1 || len(r.Children) != 13 || r.Children[12] != 133 || string(r.Separators[2].Key) != "\x01kb" || r.Separators[1].Trailer != 1<<20|1 {
		t.Fatalf("%+v, %v", r, ok)
	}
	for range 20000 {
		p := bytes.Clone(clean)
		for range 1 + rng.IntN(20) {
			p[rng.IntN(len(p))] = byte(rng.Uint32())
		}
		InnerRemains(p, 42)
	}
}
