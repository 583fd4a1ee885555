package storage

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestMissingKeysAreSortedHoweverAlikeTheyAre sorts keys with long common beginnings, keys that are beginnings of others, keys that
// differ in a zero byte only, equal ones, and more than a word can number.
func TestMissingKeysAreSortedHoweverAlikeTheyAre(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	shapes := map[string]func(i int) []byte{
		"one":      func(int) []byte { return []byte("only") },
		"zeros":    func(i int) []byte { return make([]byte, i%20) },
		"numbered": func(i int) []byte { return fmt.Appendf(nil, "a rather long beginning/%06d", i*7919%1000) },
		"nested":   func(i int) []byte { return bytes.Repeat([]byte("ab"), i%50) },
		"random":   func(int) []byte { return fmt.Appendf(nil, "%x", rng.Uint64()) },
	}
	for name, shape := range shapes {
		for _, n := range []int{1, 2, 100, 1<<placeBits + 1} {
			var f Finder
			for i := range n {
				f.missing = append(f.missing, shape(i))
			}
			f.sort()
			if !slices.IsSortedFunc(f.sorted, bytes.Compare) {
				t.Errorf("%s, %d keys: not in order", name, n)
			}
			seen := make([]bool, n)
			for i, place := range f.order {
				if seen[place] || !bytes.Equal(f.sorted[i], f.missing[place]) {
					t.Fatalf("%s, %d keys: place %d stands for %q", name, n, place, f.sorted[i])
				}
				seen[place] = true
			}
		}
	}
}
