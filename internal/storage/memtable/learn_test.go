package memtable

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/epochkv/epochkv/internal/testseed"
)

// shapes are kinds of keys that applications have.
var shapes = map[string]func(r *rand.Rand, i int) []byte{
	"random bytes": func(r *rand.Rand, _ int) []byte {
		k := make([]byte, 16)
		binary.BigEndian.PutUint64(k, r.Uint64())
		binary.BigEndian.PutUint64(k[8:], r.Uint64())
		return k
	},
	"decimal":           func(r *rand.Rand, _ int) []byte { return fmt.Appendf(nil, "%016d", r.IntN(10_000_000)) },
	"ascending decimal": func(_ *rand.Rand, i int) []byte { return fmt.Appendf(nil, "%016d", 123_456_789+i) },
	"decimal, no zeros": func(r *rand.Rand, _ int) []byte { return fmt.Appendf(nil, "user%d", r.IntN(10_000_000)) },
	"table and column":  func(r *rand.Rand, _ int) []byte { return fmt.Appendf(nil, "table/%011d/column", r.IntN(10_000_000)) },
	"uuid": func(r *rand.Rand, _ int) []byte {
		return fmt.Appendf(nil, "%08x-%04x-%04x", r.Uint32(), r.Uint32()>>16, r.Uint32()>>16)
	},
	"five tables": func(r *rand.Rand, _ int) []byte {
		table := []string{"accounts", "branches", "history", "tellers", "table"}[r.IntN(5)]
		return fmt.Appendf(nil, "%s/%011d/column", table, r.IntN(2_000_000))
	},
	"tenants": func(r *rand.Rand, _ int) []byte {
		return fmt.Appendf(nil, "tenant/%04d/object/%012d", r.IntN(200), r.IntN(100_000))
	},
	"deep tables": func(r *rand.Rand, _ int) []byte {
		table := []string{"app/orders/by-customer/", "app/orders/by-date/", "app/users/", "blobs/"}[r.IntN(4)]
		return binary.BigEndian.AppendUint64([]byte(table), r.Uint64())
	},
	"counter": func(_ *rand.Rand, i int) []byte { return binary.BigEndian.AppendUint64([]byte("seq"), uint64(1<<40+i)) },
}

// shaped makes n different keys of a shape, in order.
func shaped(name string, seed uint64, n int) [][]byte {
	r := rand.New(rand.NewPCG(seed, 1))
	out := make([][]byte, n)
	for i := range out {
		out[i] = append([]byte{1}, shapes[name](r, i)...)
	}
	slices.SortFunc(out, bytes.Compare)
	return slices.CompactFunc(out, bytes.Equal)
}

// every takes every n-th key.
func every(all [][]byte, n int) (out [][]byte) {
	for i := 0; i < len(all); i += n {
		out = append(out, all[i])
	}
	return out
}

// distinct is the part of the keys whose head is not that of the key before. It fails if heads are not in order.
func distinct(t *testing.T, h *Heads, all [][]byte) float64 {
	t.Helper()
	n, last := 0, uint32(0)
	for i, k := range all {
		head := h.of(k)
		if head < last {
			t.Fatalf("key %q has head %#x, after %q with %#x", k, head, all[i-1], last)
		}
		if head != last {
			n++
		}
		last = head
	}
	return float64(n) / float64(len(all))
}

// TestLearnedHeadsTellKeysApart, both the keys that they were learned from and the next ones of that shape.
func TestLearnedHeadsTellKeysApart(t *testing.T) {
	testseed.SkipUnderRace(t)
	for name := range shapes {
		t.Run(name, func(t *testing.T) {
			old, next := shaped(name, 1, 50_000), shaped(name, 2, 50_000)
			if name == "ascending decimal" || name == "counter" {
				next = shaped(name, 1, 100_000)[50_000:]
			}
			h := learnHeads(every(old, 50), len(old), nil)
			plain := distinct(t, plainHeads([]byte{1}, nil), next)
			learned := distinct(t, h, next)
			t.Logf("%d groups; different heads: %.2f of the keys, with plain heads %.2f", len(h.groups), learned, plain)
			if learned < 0.8 {
				t.Errorf("%.2f of the keys have a head of their own; with plain heads %.2f", learned, plain)
			}
		})
	}
}

// TestHeadsOrderAsKeys, whatever they were learned from: keys of other shapes, and keys made to be between.
func TestHeadsOrderAsKeys(t *testing.T) {
	var all [][]byte
	for name := range shapes {
		all = append(all, shaped(name, 3, 500)...)
	}
	for _, k := range slices.Clone(all) {
		for _, n := range []int{1, 2, 5, 8, 9, 10, len(k) - 1} {
			all = append(all, k[:min(n, len(k))], append(slices.Clone(k[:min(n, len(k))]), 0xff), append(slices.Clone(k[:min(n, len(k))]), 0))
		}
	}
	all = append(all, []byte{}, []byte{0}, []byte{2}, bytes.Repeat([]byte{0xff}, 20), bytes.Repeat([]byte{0}, 20))
	slices.SortFunc(all, bytes.Compare)
	for name := range shapes {
		distinct(t, learnHeads(every(shaped(name, 1, 5000), 5), 5000, nil), all)
	}
	distinct(t, learnHeads(every(all, 7), len(all), nil), all)
}

// TestHeadsOfAnySampleOrderAsKeys: the sample and the keys are drawn from few bytes and few prefixes, so that prefixes
// nest, words tie and places overflow.
func TestHeadsOfAnySampleOrderAsKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string) [][]byte {
			n := rapid.IntRange(2, 200).Draw(t, label)
			out := make([][]byte, n)
			for i := range out {
				prefix := rapid.SampledFrom([]string{"", "a", "aaaaaaaaaaaa", "aaaaaaaaaaaab", "b0000", "b0009", "\x00\x00\x00", "\xff\xff"}).Draw(t, "prefix")
				out[i] = []byte(prefix + string(rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, '/', '0', '1', '9', ':', 'a', 'z', 0xfe, 0xff}), 0, 12).Draw(t, "rest")))
			}
			slices.SortFunc(out, bytes.Compare)
			return slices.CompactFunc(out, bytes.Equal)
		}
		sample, probes := draw("sample"), draw("probes")
		h := learnHeads(sample, rapid.IntRange(1, 1_000_000).Draw(t, "population"), nil)
		probes = append(probes, sample...)
		slices.SortFunc(probes, bytes.Compare)
		last := uint32(0)
		for i, k := range probes {
			head := h.of(k)
			if head < last {
				t.Fatalf("key %q has head %#x, after %q with %#x; learned from %q", k, head, probes[i-1], last, sample)
			}
			last = head
		}
	})
}

// TestExpectedKeysHaveHeadsOfTheirOwn, whatever the heads were learned from: those of the keys to come after the sample.
func TestExpectedKeysHaveHeadsOfTheirOwn(t *testing.T) {
	whole := ByteRange{Most: 255}
	e := &Expected{Prefix: []byte{1, 'q', 7, 0}, Bytes: []ByteRange{{Least: 5, Most: 6}, whole, whole, whole, {Least: 0x70, Most: 0x7f}, whole}}
	rnd := rand.New(rand.NewPCG(1, 2))
	at := func(i int) []byte { // one each four milliseconds, and random bits
		k := binary.BigEndian.AppendUint64([]byte{1, 'q', 7, 0}, uint64(5<<24|i*4)<<32|7<<28|rnd.Uint64()&(1<<28-1))
		return binary.BigEndian.AppendUint64(k, rnd.Uint64())
	}
	var old, next, others [][]byte
	for i := range 20_000 {
		old, next = append(old, at(i)), append(next, at(1_000_000+i))
		others = append(others, binary.BigEndian.AppendUint64([]byte{2}, rnd.Uint64()))
	}
	for i := range 100 {
		others = append(others, []byte{1, 'a', byte(i)}, []byte{1, 't', byte(i)}, []byte{1, 'q', 7}, []byte{1, 'q', 8, byte(i)})
	}
	slices.SortFunc(others, bytes.Compare)
	slices.SortFunc(old, bytes.Compare)
	slices.SortFunc(next, bytes.Compare)
	both := append(slices.Clone(others), old...)
	slices.SortFunc(both, bytes.Compare)
	for name, h := range map[string]*Heads{
		"plain": plainHeads([]byte{2}, e), "learned without": learnHeads(every(others, 20), len(others), e),
		"learned with": learnHeads(every(both, 20), len(both), e), "learned from them alone": learnHeads(every(old, 20), len(old), e),
	} {
		if apart := distinct(t, h, next); apart < 0.9 {
			t.Errorf("%s: %.2f of the expected keys have a head of their own", name, apart)
		}
		all := append(slices.Clone(both), next...)
		slices.SortFunc(all, bytes.Compare)
		distinct(t, h, all) // are in order
	}
	if apart := distinct(t, learnHeads(every(both, 20), len(both), e), others); apart < 0.9 {
		t.Errorf("%.2f of the other keys have a head of their own", apart)
	}
}
