package extsort

import (
	"bytes"
	"cmp"
	"context"
	"errors"
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

// mergeNewest replaces the newest n runs by one.
func (s *Sorter) mergeNewest(ctx context.Context, n int) error {
	from := s.runs[len(s.runs)-n:]
	merged, err := s.merge(ctx, from, nil)
	if err != nil {
		return err
	}
	merged.tier = from[0].tier + 1
	for _, r := range from {
		err = errors.Join(err, r.remove())
	}
	s.runs = append(s.runs[:len(s.runs)-n], merged)
	return err
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
		case (replace != nil || n%1024 == 0) && ctx.Err() != nil: // large values may take long
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

// merger merges runs with a heap of their cursors.
type merger struct {
	heap    []*mergeCursor // by key, then the newest run first
	current *Cursor
	lastKey []byte // of the current entry
	err     error
}

type mergeCursor struct {
	*Cursor
	age int // 0 for the newest run
}

func newMerger(runs []*Run) *merger {
	m := &merger{}
	for i, r := range runs {
		c := &mergeCursor{Cursor: r.Cursor(), age: len(runs) - 1 - i}
		if c.Next() {
			m.heap = append(m.heap, c)
		}
		m.err = cmp.Or(m.err, c.Err)
	}
	for i := len(m.heap)/2 - 1; i >= 0; i-- {
		m.down(i)
	}
	return m
}

// next moves to the next key. Of several entries with one key it takes the entry of the newest run.
func (m *merger) next() bool {
	for m.err == nil {
		if m.current != nil {
			m.advance()
		}
		if len(m.heap) == 0 {
			return false
		}
		older := m.current != nil && bytes.Equal(m.heap[0].Key, m.lastKey)
		m.current = m.heap[0].Cursor
		if !older {
			m.lastKey = append(m.lastKey[:0], m.current.Key...)
			return true
		}
	}
	return false
}

// advance moves the top cursor, whose entry was used.
func (m *merger) advance() {
	top := m.heap[0]
	if !top.Next() {
		m.err = cmp.Or(m.err, top.Err)
		n := len(m.heap) - 1
		m.heap[0] = m.heap[n]
		m.heap = m.heap[:n]
	}
	m.down(0)
}

func (m *merger) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(m.heap) {
			return
		}
		if child+1 < len(m.heap) && m.less(child+1, child) {
			child++
		}
		if !m.less(child, i) {
			return
		}
		m.heap[i], m.heap[child] = m.heap[child], m.heap[i]
		i = child
	}
}

func (m *merger) less(i, j int) bool {
	a, b := m.heap[i], m.heap[j]
	if c := bytes.Compare(a.Key, b.Key); c != 0 {
		return c < 0
	}
	return a.age < b.age
}
