package btree

import (
	"bytes"
	"maps"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// compareCursor walks the tree with one cursor at several epochs and bounds, in random steps, and
// compares each stop with the model.
func (w *workload) compareCursor(t *testing.T, s *store, root Root, live []keys.Epoch) {
	t.Helper()
	all := slices.Sorted(maps.Keys(w.m))
	var c Cursor
	for _, at := range append([]keys.Epoch{w.frontier, w.epoch, w.frontier + 5}, live...) {
		var lo, hi string
		if w.rng.IntN(2) == 0 {
			lo = w.key()
		}
		if w.rng.IntN(2) == 0 {
			hi = w.key()
		}
		var want []string
		for _, k := range all {
			v, ok := w.m.at(k, at)
			if ok && v.kind.HasValue() && k >= lo && (hi == "" || k < hi) {
				want = append(want, k)
			}
		}
		c.Reset(s, root, at, []byte(lo), []byte(hi))
		w.walk(t, s, &c, at, want)
		pausingWalks(t, s, root, at, lo, hi, want)
	}
}

// walk takes random steps over keys that must be want.
func (w *workload) walk(t *testing.T, s *store, c *Cursor, at keys.Epoch, want []string) {
	t.Helper()
	i := -1
	check := func(op string, ok bool) {
		t.Helper()
		if c.Err() != nil {
			t.Fatalf("%s: %v", op, c.Err())
		}
		inside := i >= 0 && i < len(want)
		if ok != inside || ok != c.Valid() || ok && string(c.Key()) != want[i] {
			t.Fatalf("%s at %d with bounds [%q, %q): on %q (%v), want %d of %q", op, at, c.lo, c.hi, c.Key(), ok, i, want)
		}
		if !ok {
			return
		}
		v, _ := w.m.at(want[i], at)
		if got := c.Version(); got.Epoch != v.epoch || got.Kind != v.kind || !bytes.Equal(s.value(t, *got), v.value) {
			t.Fatalf("%s: %q is at epoch %d, want %d", op, want[i], got.Epoch, v.epoch)
		}
	}
	i = 0
	for check("First", c.First()); c.Valid(); check("Next", c.Next()) {
		i++
	}
	i = len(want) - 1
	for check("Last", c.Last()); c.Valid(); check("Prev", c.Prev()) {
		i--
	}
	for range 60 {
		k := w.key()
		switch op := w.rng.IntN(6); {
		case op == 0 || !c.Valid() && op < 3:
			i, _ = slices.BinarySearch(want, k)
			check("SeekGE", c.SeekGE([]byte(k)))
		case op == 1 || !c.Valid():
			i, _ = slices.BinarySearch(want, k)
			i--
			check("SeekLT", c.SeekLT([]byte(k)))
		case op < 4:
			i++
			check("Next", c.Next())
		default:
			i--
			check("Prev", c.Prev())
		}
	}
}

// pausingWalks finds the same keys in steps of two leaves, and continues where each pauses.
func pausingWalks(t *testing.T, s *store, root Root, at keys.Epoch, lo, hi string, want []string) {
	t.Helper()
	c := Cursor{LeavesMax: 2}
	reset := func() { c.Reset(s, root, at, []byte(lo), []byte(hi)) }
	for _, forward := range []bool{true, false} {
		next, from := c.Next, slices.Clone(want)
		reset()
		ok := c.First
		if !forward {
			next, ok = c.Prev, c.Last
			slices.Reverse(from)
		}
		n, halts := 0, 0
		for ok(); c.Valid() || c.Paused(); {
			if !c.Valid() {
				if halts++; halts > 4*len(s.used)+4 {
					t.Fatalf("forward %v: halted %d times", forward, halts)
				}
				resume := bytes.Clone(c.Resume())
				reset()
				if forward {
					c.SeekGE(resume)
				} else {
					c.SeekLT(resume)
				}
				continue
			}
			if n == len(from) || string(c.Key()) != from[n] {
				t.Fatalf("forward %v at %d: key %d is %q", forward, at, n, c.Key())
			}
			n++
			next()
		}
		if c.Err() != nil || n != len(from) {
			t.Fatalf("forward %v at %d: %d of %d keys, %v", forward, at, n, len(from), c.Err())
		}
	}
}
