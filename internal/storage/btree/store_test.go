package btree

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// store is a data file in memory. It allocates the lowest free extent first, and fails the test on
// every misuse.
type store struct {
	mu        sync.Mutex
	size      int
	pages     map[page.ID][]byte
	used      []bool // by id: allocated
	values    map[page.Ref][]byte
	announced []page.Ref // that are dropped next
	nextRef   uint64
	reads     int
	lent      [][]byte // by Pages
}

func newStore(pageSize int) *store {
	return &store{size: pageSize, pages: map[page.ID][]byte{}, used: []bool{true, true}, values: map[page.Ref][]byte{}}
}

func (s *store) AllocExtent(n int) (page.ID, int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := slices.Index(s.used, false)
	if first < 0 {
		first = len(s.used)
	}
	for i := range n {
		switch {
		case first+i == len(s.used):
			s.used = append(s.used, true)
		case s.used[first+i]:
			return page.ID(first), i, nil
		}
		s.used[first+i] = true
	}
	return page.ID(first), n, nil
}

func (s *store) WritePage(id page.ID, p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pages[id] != nil || !s.used[id] {
		return fmt.Errorf("write to page %d, which is not free", id)
	}
	if err := errors.Join(page.Check(p, id), page.Verify(p)); err != nil {
		return err
	}
	s.pages[id] = slices.Clone(p)
	return nil
}

func (s *store) Page(id page.ID, _ int) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads++
	if s.pages[id] == nil {
		return nil, fmt.Errorf("no page %d", id)
	}
	return s.pages[id], nil
}

func (s *store) Store(value []byte) (r page.Ref, err error) {
	s.nextRef++
	binary.LittleEndian.PutUint64(r[:], s.nextRef)
	binary.LittleEndian.PutUint64(r[8:], uint64(len(value)))
	s.values[r] = slices.Clone(value)
	return r, nil
}

func (s *store) ReadAhead(refs []page.Ref) { s.announced = slices.Clone(refs) }

func (s *store) Drop(r page.Ref) error {
	if _, ok := s.values[r]; !ok {
		return fmt.Errorf("drop of unknown value %x", r)
	}
	if !slices.Contains(s.announced, r) {
		return fmt.Errorf("drop of value %x, which was not announced", r)
	}
	delete(s.values, r)
	return nil
}

// scribbler is a source whose pages are overwritten at the next call, as a merge must expect.
type scribbler struct {
	s   *store
	buf []byte
}

func (s *scribbler) Page(id page.ID, level int) ([]byte, error) {
	p, err := s.s.Page(id, level)
	if err != nil {
		return nil, err
	}
	for i := range s.buf {
		s.buf[i] = 0xee
	}
	s.buf = slices.Clone(p)
	return s.buf, nil
}

// mergeInput is a merge of sorted entries into base.
func (s *store) mergeInput(base Root, entries []Entry, policy Policy) *MergeInput {
	return &MergeInput{
		Base: base, Checkpoint: 1, PageSize: s.size, Policy: policy,
		Input: func() Input {
			return &volatileInput{SliceInput: SliceInput{Entries: entries}, keep: page.InlineMax(s.size)}
		},
		Source: func() Source { return &scribbler{s: s} },
		Sink:   s, Values: s,
	}
}

// volatileInput returns keys and values in buffers that the next call overwrites, as a merge must
// expect.
type volatileInput struct {
	SliceInput
	keep       int
	key, value []byte
}

func (v *volatileInput) Next(e *Entry) bool {
	ok := v.SliceInput.Next(e)
	if ok {
		v.key = append(v.key[:0], e.Key...)
		e.Key = v.key
		if len(e.Value) <= v.keep {
			v.value = append(v.value[:0], e.Value...)
			e.Value = v.value
		}
	}
	return ok
}

// apply merges and then removes the pages that the merge replaced.
func (s *store) apply(t testing.TB, in *MergeInput) *Result {
	t.Helper()
	return s.replace(t, func() (*Result, error) { return Merge(context.Background(), in) })
}

// applyFilling is apply with pages of a long run that are full by the given share, and another runMin.
func (s *store) applyFilling(t testing.TB, in *MergeInput, percent, runMin int) *Result {
	t.Helper()
	return s.replace(t, func() (*Result, error) { return mergeFilling(context.Background(), in, percent, runMin) })
}

// replace takes over the result of a merge.
func (s *store) replace(t testing.TB, merge func() (*Result, error)) *Result {
	t.Helper()
	res, err := merge()
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range res.Freed {
		if s.pages[id] == nil {
			t.Fatalf("page %d freed twice", id)
		}
		delete(s.pages, id)
	}
	for id := range s.used { // freed, or reserved and not written
		s.used[id] = id < 2 || s.pages[page.ID(id)] != nil
	}
	return res
}

// check walks the tree and makes sure that exactly its pages and values are in the store.
func (s *store) check(t testing.TB, root Root) {
	t.Helper()
	seen := map[page.ID]bool{}
	refs := 0
	err := Walk(s, root, &Visitor{Page: func(id page.ID, level int, p []byte) error {
		if seen[id] {
			return fmt.Errorf("reached twice")
		}
		seen[id] = true
		if level == 0 {
			v := page.Leaf(p).Layout()
			for i := range v.Count() {
				if _, _, value, large := v.At(i); large {
					refs++
					if _, ok := s.values[page.RefOf(value)]; !ok {
						return fmt.Errorf("entry %d refers to nothing", i)
					}
				}
			}
		}
		return errors.Join(page.Check(p, id), page.Verify(p))
	}})
	if err != nil {
		t.Fatal(err)
	}
	s.checkRatios(t, page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: root.ID}, root.Level)
	if len(seen) != len(s.pages) {
		t.Fatalf("%d pages reachable, %d in the store", len(seen), len(s.pages))
	}
	if refs != len(s.values) {
		t.Fatalf("%d references, %d values in the store", refs, len(s.values))
	}
}

// value is what is stored of a version, metadata and value, wherever the value is.
func (s *store) value(t testing.TB, v Version) []byte {
	t.Helper()
	if !v.Large {
		return v.Value
	}
	b, ok := s.values[page.RefOf(v.Value)]
	if !ok {
		t.Fatalf("reference %x leads nowhere", v.Value)
	}
	return slices.Concat(v.Value[:len(v.Value)-page.RefSize], b)
}

func set(key string, epoch keys.Epoch, value string) Entry {
	return Entry{Key: []byte(key), Trailer: keys.MakeTrailer(epoch, keys.KindSet), Value: []byte(value)}
}
