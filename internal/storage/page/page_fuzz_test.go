package page

import (
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// exercise calls every accessor of a page, with keys from the page and near them.
func exercise(p []byte, probe []byte) {
	if IsTree(p, 0) {
		l := Leaf(p)
		v := l.Layout()
		for i := range v.Count() {
			s, t, _, _ := v.At(i)
			_, _, _, _ = v.Suffix(i), v.Trailer(i), v.Same(i), l.Used()
			key := append(append([]byte(nil), v.Prefix()...), s...)
			_ = l.Search(key)
			_, _, _, _ = l.Find(key, Fingerprint(key), t.Epoch())
			_, _, _, _ = l.Find(key, Fingerprint(key), 0)
		}
		_, _, _, _ = l.Find(probe, Fingerprint(probe), keys.MaxEpoch)
		_, _ = l.Search(probe), l.Used()
		_, _ = l.DeadVersionRatio(false), l.DeadVersionRatio(true)
		return
	}
	n := Inner(p)
	for i := range n.Count() {
		_, _, _ = n.Child(i), n.Newest(i), n.DeadVersions(i)
		if i > 0 {
			s := n.Separator(nil, i)
			_ = n.Search(s.Key, s.Trailer)
		}
	}
	_, _ = n.Search(probe, NoTrailer), n.DeadVersionRatio()
}

// FuzzVerify feeds arbitrary bytes: either Verify refuses them, or every accessor stays inside the page.
func FuzzVerify(f *testing.F) {
	rng := rand.New(rand.NewPCG(5, 5))
	for range 4 {
		p := make([]byte, 512)
		BuildLeaf(p, 1, randomEntries(rng, 512))
		f.Add(p, []byte("pp"))
	}
	p := make([]byte, 512)
	BuildInner(p, 1, 1, []Child{{ID: 2}, {ID: 3, Separator: Separator{Key: []byte("m"), Trailer: 900}}, {ID: 4, Separator: Separator{Key: []byte("mm"), Trailer: NoTrailer}}})
	f.Add(p, []byte("m"))
	f.Fuzz(func(_ *testing.T, p, probe []byte) {
		full := make([]byte, SizeMin)
		copy(full, p)
		if Verify(full) == nil {
			exercise(full, probe)
		}
	})
}

// TestEveryFlippedBitIsRefusedOrHarmless flips each bit of intact pages, and makes the checksum right again, so
// that only Verify can keep the damage from the accessors.
func TestEveryFlippedBitIsRefusedOrHarmless(t *testing.T) {
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 6))
		p := make([]byte, 512)
		BuildLeaf(p, 1, randomEntries(rng, 512))
		if seed == 0 {
			BuildInner(p, 1, 1, []Child{{ID: 2}, {ID: 3, Separator: Separator{Key: []byte("mabc"), Trailer: 900}}, {ID: 4, Separator: Separator{Key: []byte("mm"), Trailer: NoTrailer}}})
		}
		SetID(p, 2)
		for bit := range 8 * len(p) {
			p[bit/8] ^= 1 << (bit % 8)
			if Check(p, 2) == nil {
				t.Fatalf("seed %d: flipped bit %d passes the checksum", seed, bit)
			}
			if Verify(p) == nil {
				exercise(p, []byte("pm"))
			}
			p[bit/8] ^= 1 << (bit % 8)
		}
	}
}
