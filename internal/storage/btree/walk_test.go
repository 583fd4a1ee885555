package btree

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// threeLevels is a tree of numbered keys with inner nodes above inner nodes.
func threeLevels(t testing.TB) (*store, Root) {
	s := newStore(512)
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 4000, 3, 12), Policy{})).Root
	if root.Level < 2 {
		t.Fatalf("root at level %d", root.Level)
	}
	return s, root
}

// rebuild replaces an inner page by one with other children.
func (s *store) rebuild(t *testing.T, id page.ID, change func(children []page.Child) []page.Child) {
	t.Helper()
	node := page.Inner(s.pages[id])
	children, err := readChildren(s, page.Child{ID: id, Separator: page.Separator{Trailer: page.NoTrailer}}, node.Level())
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, s.size)
	page.BuildInner(p, 1, node.Level(), change(children))
	page.SetID(p, id)
	s.pages[id] = p
}

// TestWalkFindsBrokenStructure plants one fault after another into intact pages and expects it to
// be named.
func TestWalkFindsBrokenStructure(t *testing.T) {
	for name, plant := range map[string]func(t *testing.T, s *store, root Root){
		"children swapped": func(t *testing.T, s *store, root Root) {
			s.rebuild(t, s.levelOne(root), func(c []page.Child) []page.Child {
				c[1].ID, c[2].ID = c[2].ID, c[1].ID
				return c
			})
		},
		"separator too high": func(t *testing.T, s *store, root Root) {
			s.rebuild(t, s.levelOne(root), func(c []page.Child) []page.Child {
				c[1].Separator = page.Separator{Key: append(slices.Clone(c[1].Key), "~"...), Trailer: page.NoTrailer}
				return c
			})
		},
		"separator outside its parent's": func(t *testing.T, s *store, root Root) {
			s.rebuild(t, s.levelOne(root), func(c []page.Child) []page.Child {
				c[3].Key = []byte("zzz")
				return c[:4]
			})
		},
		"level skipped": func(t *testing.T, s *store, root Root) {
			s.rebuild(t, root.ID, func(c []page.Child) []page.Child {
				c[0].ID = page.Inner(s.pages[c[0].ID]).Child(0)
				return c
			})
		},
		"newest epoch understated": func(t *testing.T, s *store, root Root) {
			s.rebuild(t, root.ID, func(c []page.Child) []page.Child {
				c[1].Newest = 2
				return c
			})
		},
		"dead-version ratio of a leaf": func(t *testing.T, s *store, root Root) {
			s.rebuild(t, s.levelOne(root), func(c []page.Child) []page.Child {
				c[1].DeadVersions = 9
				return c
			})
		},
		"dead-version ratio of a node": func(t *testing.T, s *store, root Root) {
			s.rebuild(t, root.ID, func(c []page.Child) []page.Child {
				c[1].DeadVersions = 9
				return c
			})
		},
		"page missing": func(_ *testing.T, s *store, root Root) {
			delete(s.pages, page.Inner(s.pages[s.levelOne(root)]).Child(3))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, root := threeLevels(t)
			if err := Walk(s, root, &Visitor{}); err != nil {
				t.Fatal(err)
			}
			plant(t, s, root)
			err := Walk(s, root, &Visitor{})
			if err == nil || name != "page missing" && !errors.Is(err, ErrStructure) {
				t.Fatalf("walk says %v", err)
			}
			t.Log(err)
		})
	}
}

// levelOne is the second parent of leaves from the left.
func (s *store) levelOne(root Root) page.ID {
	id := root.ID
	for level := root.Level; level > 1; level-- {
		id = page.Inner(s.pages[id]).Child(min(1, page.Inner(s.pages[id]).Count()-1))
	}
	return id
}

// TestWalkSkipsDamagedPages damages a leaf and an inner node and expects all other pages, and the
// key ranges of the damaged ones.
func TestWalkSkipsDamagedPages(t *testing.T) {
	s, root := threeLevels(t)
	whole := len(s.pages)
	leaf := page.Inner(s.pages[s.levelOne(root)]).Child(2)
	node := page.Inner(s.pages[root.ID]).Child(0)
	below := 0
	_ = Walk(s, Root{ID: node, Level: root.Level - 1}, &Visitor{Page: func(page.ID, int, []byte) error { below++; return nil }})
	delete(s.pages, leaf)
	delete(s.pages, node)
	damaged := map[page.ID]string{}
	seen := 0
	err := Walk(s, root, &Visitor{
		Page: func(page.ID, int, []byte) error { seen++; return nil },
		Damaged: func(id page.ID, _ int, lo, hi *page.Separator, _ error) error {
			damaged[id] = fmt.Sprint(lo, hi)
			return nil
		},
	})
	if err != nil || len(damaged) != 2 || damaged[leaf] == "" || damaged[node] == "" || seen != whole-below-1 {
		t.Fatalf("damaged %v, saw %d of %d pages: %v", slices.Collect(maps.Values(damaged)), seen, whole, err)
	}
}

// TestReadsRefuseMisplacedPages points an inner node at a page of another level.
func TestReadsRefuseMisplacedPages(t *testing.T) {
	s, root := threeLevels(t)
	s.rebuild(t, root.ID, func(c []page.Child) []page.Child {
		for i := range c {
			c[i].ID = page.Inner(s.pages[c[i].ID]).Child(0)
		}
		return c
	})
	var c Cursor
	c.Reset(s, root, 9, nil, nil)
	_, _, err := Get(s, root, []byte("key00000001"), 9)
	_, err2 := NewestEpoch(s, root, []byte("key00000001"), 1)
	_, err3 := ChangedSince(s, root, nil, nil, 1)
	if c.First() || !errors.Is(errors.Join(c.Err()), ErrStructure) {
		t.Fatal("cursor", c.Err())
	}
	for _, err := range []error{err, err2, err3} {
		if !errors.Is(err, ErrStructure) {
			t.Fatal(err)
		}
	}
}

// TestOldSubtreesAreNotReadForValidation changes one key of many and counts the pages that
// validation reads.
func TestOldSubtreesAreNotReadForValidation(t *testing.T) {
	s, root := threeLevels(t)
	root = s.apply(t, s.mergeInput(root, []Entry{set("key00002000", 9, "new")}, Policy{})).Root
	s.reads = 0
	if changed, err := ChangedSince(s, root, []byte("key00003"), nil, 5); changed || err != nil {
		t.Fatal(changed, err)
	}
	if s.reads > 2 {
		t.Fatalf("%d pages read where nothing is new", s.reads)
	}
	s.reads = 0
	if changed, err := ChangedSince(s, root, nil, nil, 5); !changed || err != nil {
		t.Fatal(changed, err)
	}
	if s.reads > root.Level+1 {
		t.Fatalf("%d pages read for one new key", s.reads)
	}
	s.reads = 0
	if e, err := NewestEpoch(s, root, []byte("key00000001"), 5); e != 0 || err != nil || s.reads > 2 {
		t.Fatalf("%d, %v with %d pages read", e, err, s.reads)
	}
}

// TestBoundedScansReadNoLeafPastTheBound counts pages for short ranges, in both directions.
func TestBoundedScansReadNoLeafPastTheBound(t *testing.T) {
	s, root := threeLevels(t)
	leaf := page.Leaf(s.pages[page.Inner(s.pages[s.levelOne(root)]).Child(2)])
	v := leaf.Layout()
	key := func(i int) []byte { return append(slices.Clone(v.Prefix()), v.Suffix(i)...) }
	hi := append(key(v.Count()-1), 0)
	var c Cursor
	c.Reset(s, root, 9, key(0), hi)
	s.reads = 0
	n := 0
	for ok := c.First(); ok; ok = c.Next() {
		n++
	}
	for ok := c.Last(); ok; ok = c.Prev() {
		n++
	}
	if n != 2*v.Count() || s.reads > 2*(root.Level+2) {
		t.Fatalf("%d keys with %d pages read", n, s.reads)
	}
}

// TestUsedCursorsAllocateNothing counts allocations of reads over pages in memory.
func TestUsedCursorsAllocateNothing(t *testing.T) {
	a := newArrayStore(512, 1000)
	root := a.merge(t, Root{}, numbered(0, 4000, 3, 12), 1, fillPercent).Root
	var c Cursor
	key, hi := []byte("key00001234"), []byte("key000017")
	read := func() {
		c.Reset(a, root, 9, key, hi)
		for ok := c.First(); ok; ok = c.Next() {
		}
		for ok := c.Last(); ok; ok = c.Prev() {
		}
		_, _, _ = Get(a, root, key, 9)
		_, _ = NewestEpoch(a, root, key, 1)
		_, _ = ChangedSince(a, root, key, nil, 5)
	}
	read()
	if n := testing.AllocsPerRun(20, read); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

// TestEveryLeafIsPrefetched: before it enters a leaf, by a seek or by a step, a cursor names its id
// and those that follow inside the bounds.
func TestEveryLeafIsPrefetched(t *testing.T) {
	s, root := threeLevels(t)
	for _, forward := range []bool{true, false} {
		var c Cursor
		ids := make([]page.ID, 8)
		foretold := map[page.ID]bool{}
		entered := 0
		read := map[page.ID]bool{}
		seeks := 0
		c.BeforeLeaf = func(c *Cursor, id page.ID, f, seek bool) {
			if f != forward || !c.Bounded(f) {
				t.Fatal("direction or bound wrong")
			}
			if read[id] {
				t.Fatalf("leaf %d was told after it had been read", id)
			}
			entered++
			if seek {
				seeks++
			}
			n := c.Ahead(ids, f)
			if n == 0 || ids[0] != id {
				t.Fatalf("leaf %d is entered, and %v lie ahead", id, ids[:n])
			}
			for _, id := range ids[:n] {
				foretold[id] = true
			}
		}
		c.Reset(s, root, 9, []byte("key000010"), []byte("key000020"))
		c.src = recorder{s, read}
		step := c.Next
		if forward {
			c.First()
		} else {
			step = c.Prev
			c.Last()
		}
		if entered != 1 || seeks != 1 {
			t.Fatalf("a seek told of %d leaves, %d of them by a seek", entered, seeks)
		}
		for step() {
		}
		for id := range foretold {
			if !read[id] {
				t.Fatalf("page %d was foretold and not read", id)
			}
		}
		if seeks != 1 || entered < 2 || len(foretold) != entered {
			t.Fatalf("%d leaves entered, %d by a seek, %d foretold", entered, seeks, len(foretold))
		}
	}
}

type recorder struct {
	s    *store
	read map[page.ID]bool
}

func (r recorder) Page(id page.ID, level int) ([]byte, error) {
	r.read[id] = true
	return r.s.Page(id, level)
}

// FuzzTree decodes bytes as merges of a few keys and compares the tree with a map after each.
func FuzzTree(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 200, 4, 5, 6, 255, 7, 8, 9})
	f.Fuzz(func(t *testing.T, ops []byte) {
		s := newStore(512)
		var root Root
		want := map[string]string{}
		epoch := keys.Epoch(0)
		var pending []Entry
		flush := func() {
			slices.Reverse(pending) // newest first, so that sorting by trailer is not all that orders
			root = s.apply(t, s.mergeInput(root, sorted(pending), Policy{MinVisible: epoch})).Root
			pending = nil
			s.check(t, root)
		}
		for i := 0; i+1 < len(ops); i += 2 {
			epoch++
			key := fmt.Sprint(ops[i] % 64)
			e := set(key, epoch, string(make([]byte, int(ops[i+1])*2)))
			if ops[i+1]%5 == 0 {
				e = deletes([]Entry{e}, epoch)[0]
				delete(want, key)
			} else {
				want[key] = string(e.Value)
			}
			if pending = append(pending, e); ops[i] >= 192 {
				flush()
			}
		}
		flush()
		got := map[string]string{}
		var c Cursor
		c.Reset(s, root, epoch, nil, nil)
		for ok := c.First(); ok; ok = c.Next() {
			got[string(c.Key())] = string(s.value(t, *c.Version()))
		}
		if c.Err() != nil || !maps.Equal(got, want) {
			t.Fatalf("%d keys, want %d: %v", len(got), len(want), c.Err())
		}
	})
}

// TestCursorsWriteLinesOfTheirOwn: a cursor writes its key for every entry. If another cursor
// writes to the same cache line, that takes three times as long.
func TestCursorsWriteLinesOfTheirOwn(t *testing.T) {
	for range 100 {
		var c Cursor
		c.Reset(nil, Root{}, 0, nil, nil)
		for _, b := range [][]byte{c.key, c.scratch} {
			if at := uintptr(unsafe.Pointer(unsafe.SliceData(b))); at%keys.LineBytes != 0 || cap(b) < keys.LineBytes {
				t.Fatalf("a buffer of %d bytes at %#x", cap(b), at)
			}
		}
	}
}
