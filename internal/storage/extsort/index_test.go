package extsort

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

const longKeyBytes = 16 << 10 // the longest key of a tree with pages of 64 KiB

// longKey is as long as a key may be: a block has four of them.
func longKey(i int) []byte {
	return append(fmt.Appendf(make([]byte, 0, longKeyBytes), "%06d", i), make([]byte, longKeyBytes-6)...)
}

func heapInUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestIndexOfARunDoesNotGrowInMemory: the index of 16 MiB of the longest keys has 4 MiB. Memory has none of it, of runs that are
// written sorted and of runs that are merged, and a cursor has a few pages.
func TestIndexOfARunDoesNotGrowInMemory(t *testing.T) {
	const count, heapMax = 1000, 1 << 20
	for name, order := range map[string][]int{"sorted": ascending(count), "random": rand.New(rand.NewPCG(3, 3)).Perm(count)} {
		t.Run(name, func(t *testing.T) {
			fs, err := vfs.OpenOS(vfs.IOAuto)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = fs.Close() }()
			dir := t.TempDir()
			before := heapInUse()
			s := New(Options{FS: fs, FileName: func(n int) string { return fmt.Sprintf("%s/%06d.tmp", dir, n) }, ChunkBytes: 1 << 20, InlineMax: inlineMax})
			for _, i := range order {
				if err := s.Add(longKey(i), fmt.Append(nil, i)); err != nil {
					t.Fatal(err)
				}
			}
			r, err := s.Finish(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if grown := heapInUse() - before; grown > heapMax {
				t.Errorf("a run with %d blocks keeps %d bytes, %d are expected at most", r.blocks, grown, heapMax)
			}
			if r.depth < 3 || r.cursorBytes() > longestCursor(r.depth) {
				t.Errorf("the index has %d levels, a cursor takes %d bytes; expected at least 3 and at most %d", r.depth, r.cursorBytes(), longestCursor(r.depth))
			}
			checkLongKeys(t, r, count)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// longestCursor is a block and a full index page of each level.
func longestCursor(depth int) int {
	return blockBytes + longKeyBytes + 32 + depth*indexFanOut*(longKeyBytes+32)
}

func ascending(n int) (order []int) {
	for i := range n {
		order = append(order, i)
	}
	return order
}

func checkLongKeys(t *testing.T, r *Run, count int) {
	t.Helper()
	c := r.Cursor()
	for i := range count {
		if !c.Next() || !bytes.Equal(c.Key, longKey(i)) {
			t.Fatalf("entry %d is %.6q, %v", i, c.Key, c.Err)
		}
	}
	if c.Next() || c.Err != nil {
		t.Fatalf("one more: %.6q, %v", c.Key, c.Err)
	}
	rng := rand.New(rand.NewPCG(4, 4))
	for range 200 {
		i := rng.IntN(count)
		if c.SeekGE(longKey(i)[:6+rng.IntN(longKeyBytes-6)]); !c.Valid || !bytes.Equal(c.Key, longKey(i)) {
			t.Fatalf("the seek of %d finds %.6q, %v", i, c.Key, c.Err)
		}
		if i+1 < count && (!c.Next() || !bytes.Equal(c.Key, longKey(i+1))) {
			t.Fatalf("after the seek of %d comes %.6q, %v", i, c.Key, c.Err)
		}
	}
}

// TestCutsOfARunStayBelowTheirBound: the cuts are keys of the run in ascending order. If they would take too much, there are fewer.
func TestCutsOfARunStayBelowTheirBound(t *testing.T) {
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	s := newSorter(fs, 1<<20)
	for i := range 400 {
		if err := s.Add(longKey(i), nil); err != nil {
			t.Fatal(err)
		}
	}
	r, err := s.Finish(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	const one = longKeyBytes + cutBytes
	for _, test := range []struct{ blocks, bytesMax, cuts int }{
		{4, 1 << 30, 25}, {4, 25 * one, 25}, {4, 25*one - 1, 12}, {4, 3 * one, 3}, {4, one, 1}, {4, one - 1, 0}, {200, one, 0},
	} {
		cuts, err := r.Split(test.blocks, test.bytesMax)
		if err != nil || len(cuts) != test.cuts {
			t.Errorf("%d blocks, %d bytes: %d cuts and %v, expected %d", test.blocks, test.bytesMax, len(cuts), err, test.cuts)
		}
		for i, cut := range cuts {
			if i > 0 && bytes.Compare(cuts[i-1], cut) >= 0 {
				t.Errorf("cut %d, %.6q, comes after %.6q", i, cut, cuts[i-1])
			}
			if c := r.Cursor(); !seekExactly(c, cut) {
				t.Errorf("cut %d is no key of the run: %.6q", i, cut)
			}
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func seekExactly(c *Cursor, key []byte) bool {
	c.SeekGE(key)
	return c.Valid && bytes.Equal(c.Key, key)
}
