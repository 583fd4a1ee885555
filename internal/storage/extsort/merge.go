package extsort

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"math"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
)

// fanIn is the number of runs that are merged at once. Their blocks, each of which holds at least one
// whole value, and their index pages take no more memory than two chunks.
func (s *Sorter) fanIn() int {
	longest := blockBytes
	for _, r := range s.runs {
		longest = max(longest, r.cursorBytes())
	}
	return max(2, min(fanInMax, max(2*s.options.ChunkBytes, fanInMax*blockBytes)/longest))
}

// mergeRuns replaces n runs from an index on by one.
func (s *Sorter) mergeRuns(ctx context.Context, from, n int) error {
	runs := s.runs[from : from+n]
	merged, err := s.merge(ctx, runs, nil)
	if err != nil {
		return err
	}
	merged.tier = runs[0].tier + 1
	for _, r := range runs {
		err = errors.Join(err, r.remove())
	}
	s.runs = slices.Replace(s.runs, from, from+n, merged)
	return err
}

// smallest is where the n neighbouring runs begin that have the fewest bytes together.
func (s *Sorter) smallest(n int) (from int) {
	least := int64(math.MaxInt64)
	for i := range len(s.runs) - n + 1 {
		bytes := int64(0)
		for _, r := range s.runs[i : i+n] {
			bytes += r.bytes
		}
		if bytes <= least { // the newest of equal ones
			from, least = i, bytes
		}
	}
	return from
}

// merge writes the entries of runs, the oldest run first, as one run. With replace, it replaces large
// values.
func (s *Sorter) merge(ctx context.Context, runs []*Run, replace func(dst, key, value []byte) ([]byte, error)) (*Run, error) {
	w, err := s.newWriter()
	if err != nil {
		return nil, err
	}
	m := newMerger(runs)
	var replaced []byte
	for n := 0; err == nil && m.next(); n++ {
		c := m.current
		switch {
		case (len(c.Value) > s.options.InlineMax || n%1024 == 0) && ctx.Err() != nil: // large values may take long
			err = ctx.Err()
		case replace != nil && !c.Replaced && len(c.Value) > s.options.InlineMax:
			if replaced, err = replace(replaced[:0], c.Key, c.Value); err == nil {
				err = w.add(c.Key, replaced, true)
			}
		default:
			err = w.add(c.Key, c.Value, c.Replaced)
		}
	}
	r, flushed := w.finish()
	if err = cmp.Or(err, m.err, flushed); err != nil {
		return nil, errors.Join(err, r.remove())
	}
	return r, nil
}

// merger merges runs with a tree of losers: each inner node has the cursor that lost the comparison there, so that the way of
// a cursor that has moved takes one comparison a level. Most compare a word of each key.
type merger struct {
	cursors []mergeCursor // of the oldest run first
	losers  []int         // by node, the winner of all first; the leaf of cursor i would be node len(cursors)+i
	common  int           // bytes with which all keys begin
	current *Cursor
	lastKey []byte // of the current entry
	err     error
}

type mergeCursor struct {
	*Cursor
	head uint64 // of its key, after the common bytes
}

func newMerger(runs []*Run) *merger {
	m := &merger{cursors: make([]mergeCursor, len(runs)), losers: make([]int, len(runs))}
	m.common = keys.CommonPrefix(len(runs), func(i int) []byte { return runs[i].common })
	for i, r := range runs {
		m.cursors[i].Cursor = r.Cursor()
		m.advance(i)
	}
	m.losers[0] = m.play(1)
	return m
}

// play plays the games of a node and below, and returns the winner.
func (m *merger) play(node int) (winner int) {
	n := len(m.cursors)
	if node >= n {
		return node - n
	}
	a, b := m.play(2*node), m.play(2*node+1)
	if m.less(b, a) {
		a, b = b, a
	}
	m.losers[node] = b
	return a
}

// next moves to the next key. Of several entries with one key it takes the entry of the newest run.
func (m *merger) next() bool {
	for m.err == nil {
		i := m.losers[0]
		if m.current != nil {
			m.advance(i)
			for node := (len(m.cursors) + i) / 2; node > 0; node /= 2 {
				if m.less(m.losers[node], i) {
					i, m.losers[node] = m.losers[node], i
				}
			}
			m.losers[0] = i
		}
		c := m.cursors[i].Cursor
		if !c.Valid {
			return false
		}
		older := m.current != nil && bytes.Equal(c.Key, m.lastKey)
		m.current = c
		if !older {
			m.lastKey = append(m.lastKey[:0], c.Key...)
			return m.err == nil
		}
	}
	return false
}

// advance moves a cursor.
func (m *merger) advance(i int) {
	c := &m.cursors[i]
	if c.Next() {
		c.head = keys.WordAfter(c.Key, m.common)
	}
	m.err = cmp.Or(m.err, c.Err)
}

// less reports whether the entry of a cursor comes before that of another: by key, then that of the newer run.
func (m *merger) less(i, j int) bool {
	a, b := &m.cursors[i], &m.cursors[j]
	switch {
	case !a.Valid || !b.Valid:
		return a.Valid
	case a.head != b.head:
		return a.head < b.head
	}
	if c := bytes.Compare(a.Key, b.Key); c != 0 {
		return c < 0
	}
	return i > j
}
