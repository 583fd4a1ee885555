package storage

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// filled spools n entries drawn by key, with chunks so small that runs of several tiers come up, beside a map of what must come out.
func filled(t *testing.T, s *spool, n int, key func(i int) string, rng *rand.Rand) map[string]string {
	t.Helper()
	want := map[string]string{}
	for i := range n {
		k, v := key(i), fmt.Sprintf("%d-%s", i, strings.Repeat("v", rng.IntN(40)))
		if rng.IntN(50) == 0 {
			v += strings.Repeat("L", 400) // more than a page of 512 bytes keeps in a leaf
		}
		want[k] = v
		if err := s.add([]byte(k), []byte(v)); err != nil {
			t.Fatal(err)
		}
	}
	return want
}

func spoolKeys(rng *rand.Rand) map[string]func(i int) string {
	return map[string]func(i int) string{
		"ascending":  func(i int) string { return fmt.Sprintf("key%08d", i) },
		"descending": func(i int) string { return fmt.Sprintf("key%08d", 1<<20-i) },
		"random":     func(int) string { return fmt.Sprintf("%d", rng.IntN(2500)) },
		"one key":    func(int) string { return "k" },
		"nearly":     func(i int) string { return fmt.Sprintf("key%08d", i^rng.IntN(8)) },
		"prefixes":   func(int) string { return strings.Repeat("a", 1+rng.IntN(20)) },
	}
}

// TestSpoolSortsWhateverComesIn checks that the last value of each key comes out, in key order, and that nothing is left behind.
func TestSpoolSortsWhateverComesIn(t *testing.T) {
	const seed = 11
	for name, key := range spoolKeys(rand.New(rand.NewPCG(seed, 0))) {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			fs := vfs.NewMem()
			s := newSpool(fs, "db", 512, 600)
			if err := fs.MkdirAll("db"); err != nil {
				t.Fatal(err)
			}
			want := filled(t, s, 6000, key, rng)
			r, err := s.finish(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if r.count != uint64(len(want)) {
				t.Fatalf("%d entries, want %d", r.count, len(want))
			}
			var places [][]byte
			r, err = s.place(context.Background(), func(v []byte) (page.Ref, error) {
				places = append(places, bytes.Clone(v))
				return page.Ref{byte(len(places)), byte(len(places) >> 8)}, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			checkRun(t, r, want, places)
			if err := s.close(); err != nil {
				t.Fatal(err)
			}
			if left, err := fs.List("db"); err != nil || len(left) > 0 {
				t.Fatalf("left: %v, %v", left, err)
			}
		})
	}
}

func checkRun(t *testing.T, r *run, want map[string]string, places [][]byte) {
	t.Helper()
	order := slices.Sorted(maps.Keys(want))
	c := r.cursor()
	for i, k := range order {
		if !c.next() || string(c.key) != k {
			t.Fatalf("entry %d is %q, want %q, %v", i, c.key, k, c.err)
		}
		value := string(c.value)
		if c.placed {
			n := int(c.value[0]) | int(c.value[1])<<8
			value = string(places[n-1])
		} else if len(value) > page.InlineMax(512) {
			t.Fatalf("the value of %q was not placed", k)
		}
		if value != want[k] {
			t.Fatalf("%q = %.40q, want %.40q", k, value, want[k])
		}
	}
	if c.next() || c.err != nil {
		t.Fatalf("one more: %q, %v", c.key, c.err)
	}
	// Seeking finds the same, in any order.
	rng := rand.New(rand.NewPCG(5, 5))
	for range 300 {
		k := order[rng.IntN(len(order))]
		target := k[:len(k)-rng.IntN(2)]
		if target == "" {
			target = k
		}
		i, _ := slices.BinarySearch(order, target)
		if c.seekGE([]byte(target)); !c.valid || string(c.key) != order[i] {
			t.Fatalf("seek %q found %q (valid %v), want %q", target, c.key, c.valid, order[i])
		}
	}
	if c.seekGE([]byte("\xff")); c.valid || c.err != nil {
		t.Fatalf("behind the end: %q, %v", c.key, c.err)
	}
}

// TestDamagedRunEndsTheLoad checks that a temporary file that does not read back as it was written is never loaded.
func TestDamagedRunEndsTheLoad(t *testing.T) {
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	s := newSpool(fs, "db", 512, 4096)
	filled(t, s, 500, func(i int) string { return fmt.Sprintf("%06d", i) }, rand.New(rand.NewPCG(1, 1)))
	r, err := s.finish(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	size, err := r.file.Size()
	if err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	for at := int64(0); at < size; at += 7 {
		if _, err := r.file.ReadAt(b[:], at); err != nil {
			t.Fatal(err)
		}
		flipped := [1]byte{b[0] ^ 0x10}
		if _, err := r.file.WriteAt(flipped[:], at); err != nil {
			t.Fatal(err)
		}
		in, n := newLoadInput(r, 1, newMemInput(nil)), 0
		for e := (btree.Entry{}); in.Next(&e); {
			n++
		}
		if in.Err() == nil {
			t.Fatalf("byte %d flipped: %d entries and no error", at, n)
		}
		if _, err := r.file.WriteAt(b[:], at); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLongValuesAreMergedAFewAtATime: what a merge holds in memory does not grow with the length of values.
func TestLongValuesAreMergedAFewAtATime(t *testing.T) {
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	s := newSpool(fs, "db", 512, 1<<20)
	value := make([]byte, 1<<20)
	for i := range 40 {
		if err := s.add(fmt.Appendf(nil, "%03d", 100-i), value); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.fanIn(); n != 2 {
		t.Errorf("%d runs with blocks of a chunk's size are merged at once", n)
	}
	r, err := s.finish(context.Background())
	if err != nil || r.count != 40 {
		t.Fatalf("%+v, %v", r, err)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
}
