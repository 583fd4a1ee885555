package keys

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestKeysAreSortedHoweverAlikeTheyAre sorts keys with long common beginnings, keys that are beginnings of others, keys that
// differ in a zero byte only, equal ones, and more than a word can number.
func TestKeysAreSortedHoweverAlikeTheyAre(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	shapes := map[string]func(i int) []byte{
		"one":      func(int) []byte { return []byte("only") },
		"zeros":    func(i int) []byte { return make([]byte, i%20) },
		"numbered": func(i int) []byte { return fmt.Appendf(nil, "a rather long beginning/%06d", i*7919%1000) },
		"nested":   func(i int) []byte { return bytes.Repeat([]byte("ab"), i%50) },
		"random":   func(int) []byte { return fmt.Appendf(nil, "%x", rng.Uint64()) },
	}
	for name, shape := range shapes {
		for _, n := range []int{1, 2, 100, 3000, 1 << indexBits, 1<<indexBits + 1} {
			list := make([][]byte, n)
			for i := range list {
				list[i] = shape(i)
			}
			var s Sorter
			order := s.Sort(n, func(i int) []byte { return list[i] })
			if !slices.IsSortedFunc(order, func(i, j uint64) int { return bytes.Compare(list[i], list[j]) }) {
				t.Errorf("%s, %d keys: not in order", name, n)
			}
			seen := make([]bool, n)
			for _, index := range order {
				if seen[index] {
					t.Fatalf("%s, %d keys: index %d comes twice", name, n, index)
				}
				seen[index] = true
			}
			if len(order) != n {
				t.Errorf("%s: %d indexes of %d", name, len(order), n)
			}
		}
	}
}
