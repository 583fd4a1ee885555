package page

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// randomEntries makes entries in leaf order for a page of the given size, until it is full.
func randomEntries(rng *rand.Rand, size int) []Entry {
	alphabet := 1 + rng.IntN(256)
	prefix := bytes.Repeat([]byte{'p'}, rng.IntN(20))
	seen := map[string]bool{}
	var all [][]byte
	for range 400 {
		k := slices.Clone(prefix)
		for range rng.IntN(12) {
			k = append(k, byte(rng.IntN(alphabet)))
		}
		if len(k) > 0 && !seen[string(k)] {
			seen[string(k)] = true
			all = append(all, k)
		}
	}
	slices.SortFunc(all, bytes.Compare)
	var out []Entry
	var sum LeafSize
	for _, k := range all[rng.IntN(len(all)):] {
		epoch := keys.Epoch(50)
		for v := 0; v == 0 || rng.IntN(4) == 0; v++ {
			epoch -= keys.Epoch(1 + rng.IntN(3))
			e := Entry{Key: k, Trailer: keys.MakeTrailer(epoch, keys.KindSet), Same: v > 0, Value: make([]byte, rng.IntN(30))}
			switch rng.IntN(8) {
			case 0:
				e.Trailer, e.Value = keys.MakeTrailer(epoch, keys.KindDelete), nil
			case 1:
				e.Large, e.Value = true, make([]byte, RefSize)
			}
			if sum.With(&e) > Payload(size) {
				return out
			}
			sum.Add(&e)
			out = append(out, e)
		}
	}
	return out
}

// TestLeafAnswersAsItsEntriesDo compares every read of random leaves with a walk over their entries.
func TestLeafAnswersAsItsEntriesDo(t *testing.T) {
	for seed := range uint64(120) {
		rng := rand.New(rand.NewPCG(seed, 1))
		size := []int{512, 4096, 65536}[seed%3]
		entries := randomEntries(rng, size)
		p := make([]byte, size)
		newest := BuildLeaf(p, 7, entries)
		SetID(p, 9)
		if err := errors.Join(Check(p, 9), Verify(p)); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if h := ReadHeader(p); h != (Header{Type: TypeLeaf, ID: 9, Checkpoint: 7, Newest: newest}) {
			t.Fatalf("seed %d: header %+v", seed, h)
		}
		checkLeaf(t, fmt.Sprintf("seed %d", seed), p, entries, rng)
	}
}

func checkLeaf(t *testing.T, name string, p Leaf, entries []Entry, rng *rand.Rand) {
	t.Helper()
	v := p.Layout()
	if v.Count() != len(entries) {
		t.Fatalf("%s: count %d, want %d", name, v.Count(), len(entries))
	}
	for i, e := range entries {
		_, tr, value, large := v.At(i)
		key := append(slices.Clone(v.Prefix()), v.Suffix(i)...)
		if !bytes.Equal(key, e.Key) || tr != e.Trailer || !bytes.Equal(value, e.Value) || large != e.Large || v.Same(i) != (i > 0 && e.Same) {
			t.Fatalf("%s: entry %d differs", name, i)
		}
		probes := [][]byte{e.Key, append(slices.Clone(e.Key), 0), e.Key[:len(e.Key)-1]}
		for _, k := range probes {
			want := slices.IndexFunc(entries, func(x Entry) bool { return bytes.Compare(x.Key, k) >= 0 })
			if want < 0 {
				want = len(entries)
			}
			if got := p.Search(k); got != want {
				t.Fatalf("%s: Search(%q) = %d, want %d", name, k, got, want)
			}
			at := keys.Epoch(rng.IntN(52))
			w := slices.IndexFunc(entries, func(x Entry) bool { return bytes.Equal(x.Key, k) && x.Trailer.Epoch() <= at })
			tr, value, large, ok := p.Find(k, Fingerprint(k), at)
			if ok != (w >= 0) || ok && (tr != entries[w].Trailer || !bytes.Equal(value, entries[w].Value) || large != entries[w].Large) {
				t.Fatalf("%s: Find(%q, %d) = %v, want entry %d", name, k, at, ok, w)
			}
		}
	}
}

// TestInnerRoutesToTheLastSeparatorNotGreater compares Search with a walk over the separators.
func TestInnerRoutesToTheLastSeparatorNotGreater(t *testing.T) {
	for seed := range uint64(120) {
		rng := rand.New(rand.NewPCG(seed, 2))
		size := []int{512, 4096, 65536}[seed%3]
		var children []Child
		var sum InnerSize
		for i, e := range append([]Entry{{Trailer: NoTrailer}}, randomEntries(rng, size)...) {
			c := Child{Separator: Separator{Key: e.Key, Trailer: NoTrailer}, ID: ID(i + 2), Newest: keys.Epoch(rng.IntN(9))}
			if e.Same {
				c.Trailer = e.Trailer
			}
			if sum.With(&c) > Payload(size) {
				break
			}
			sum.Add(&c)
			children = append(children, c)
		}
		p := Inner(make([]byte, size))
		BuildInner(p, 7, 3, children)
		SetID(p, 9)
		if err := errors.Join(Check(p, 9), Verify(p)); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for i, c := range children {
			if p.Child(i) != c.ID || p.Newest(i) != c.Newest {
				t.Fatalf("seed %d: child %d differs", seed, i)
			}
			if i > 0 && p.Separator(nil, i).Compare(c.Key, c.Trailer) != 0 {
				t.Fatalf("seed %d: separator %d is %v, want %v", seed, i, p.Separator(nil, i), c.Separator)
			}
			for _, tr := range []keys.Trailer{NoTrailer, c.Trailer, c.Trailer - 1, keys.MakeTrailer(25, 255), 0} {
				want := 0
				for j, d := range children {
					if j > 0 && d.Compare(c.Key, tr) <= 0 {
						want = j
					}
				}
				if got := p.Search(c.Key, tr); got != want {
					t.Fatalf("seed %d: Search(%q, %v) = %d, want %d", seed, c.Key, tr, got, want)
				}
			}
		}
	}
}
