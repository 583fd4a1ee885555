package cache

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// tree is a tree of random keys whose pages lie in one slice, and in a cache that holds them all.
type tree struct {
	pages    [][]byte // by id: the source without any look-up
	root     btree.Root
	probes   [][]byte // all keys, in random order
	cache    *cache.Cache
	registry *pin.Registry
}

// AllocExtent implements btree.Sink.
func (t *tree) AllocExtent(n int) (page.ID, int, error) {
	first := page.ID(len(t.pages))
	for range n {
		t.pages = append(t.pages, nil)
	}
	return first, n, nil
}

// WritePage implements btree.Sink.
func (t *tree) WritePage(id page.ID, p []byte) error {
	t.pages[id] = slices.Clone(p)
	return nil
}

func newTree(tb testing.TB, n int) *tree {
	tb.Helper()
	t := &tree{pages: make([][]byte, 2)}
	entries := randomEntries(n)
	result, err := btree.Merge(context.Background(), &btree.MergeInput{
		PageSize: page.SizeDefault, Policy: btree.Policy{MinVisible: keys.MaxEpoch},
		Input:  func() btree.Input { return &btree.SliceInput{Entries: entries} },
		Source: func() btree.Source { return nil },
		Sink:   t,
	})
	if err != nil {
		tb.Fatal(err)
	}
	t.root = result.Root
	buf := make([]byte, 0, 17*n) // the keys are adjacent, so that fetching the key is not what is measured
	for _, i := range rand.New(rand.NewPCG(2, 0)).Perm(n) {
		buf = append(buf, entries[i].Key...)
	}
	t.probes = slices.Collect(slices.Chunk(buf, 17))
	t.fillCache(tb)
	return t
}

func randomEntries(n int) []btree.Entry {
	random := rand.New(rand.NewPCG(1, 0))
	entries, value := make([]btree.Entry, n), make([]byte, 100)
	for i := range entries {
		k := make([]byte, 17)
		k[0] = byte(keys.SpaceUser)
		binary.BigEndian.PutUint64(k[1:], random.Uint64())
		binary.BigEndian.PutUint64(k[9:], random.Uint64())
		entries[i] = btree.Entry{Key: k, Value: value, Trailer: keys.MakeTrailer(1, keys.KindSet)}
	}
	slices.SortFunc(entries, func(a, b btree.Entry) int { return keys.Compare(a.Key, a.Trailer, b.Key, b.Trailer) })
	return entries
}

// fillCache reads every page often enough to be as warm as it gets. All arms then read the frames, which lie in huge pages.
func (t *tree) fillCache(tb testing.TB) {
	t.registry = pin.NewRegistry(new(atomic.Uint64))
	var err error
	t.cache, err = cache.New(cache.Config{
		Bytes: int64(len(t.pages)+1000) * page.SizeDefault, PageSize: page.SizeDefault, Registry: t.registry,
		Read: func(id cache.ID, buf []byte) error { copy(buf, t.pages[id]); return nil },
	})
	if err != nil {
		tb.Fatal(err)
	}
	s := t.registry.Slot()
	defer s.Free()
	for range 10 {
		for id := 2; id < len(t.pages); id++ {
			s.Enter()
			p, err := t.cache.Page(cache.ID(id), cache.Default)
			if err != nil {
				tb.Fatal(err)
			}
			t.pages[id] = p
			s.Leave()
		}
	}
}

// array finds a page at its id's place: less than any look-up or reference can cost.
type array struct{ *tree }

func (a array) Page(id page.ID, _ int) ([]byte, error) { return a.pages[id], nil }

// looked finds pages in the cache.
type looked struct{ *tree }

func (l looked) Page(id page.ID, level int) ([]byte, error) {
	if level == 0 {
		return l.cache.Page(cache.ID(id), cache.Default)
	}
	return l.cache.Page(cache.ID(id), cache.VeryHigh)
}

// swizzled has, beside each inner node, a word for each child that points at its frame. The child's own header says whether the frame
// still holds it. What an eviction would have to undo, and warming the leaf, are left out: a real one costs more.
type swizzled struct {
	*tree
	children [][]unsafe.Pointer // by the parent's id
}

func newSwizzled(t *tree) *swizzled {
	s := &swizzled{tree: t, children: make([][]unsafe.Pointer, len(t.pages))}
	for id := 2; id < len(t.pages); id++ {
		if t.pages[id] == nil || page.ReadHeader(t.pages[id]).Type != page.TypeInner {
			continue
		}
		s.children[id] = make([]unsafe.Pointer, page.Inner(t.pages[id]).Count())
	}
	return s
}

// get is btree.Get over references.
func (s *swizzled) get(key []byte) bool {
	id, p := s.root.ID, s.pages[s.root.ID]
	for level := s.root.Level; level > 0; level-- {
		node := page.Inner(p)
		i := node.Search(key, keys.MakeTrailer(5, 0xff))
		child := node.Child(i)
		ref := &s.children[id][i]
		if f := atomic.LoadPointer(ref); f != nil {
			p = unsafe.Slice((*byte)(f), page.SizeDefault)
			if page.ReadHeader(p).ID != child {
				panic("no eviction here")
			}
		} else {
			p, _ = looked{s.tree}.Page(child, level-1)
			atomic.StorePointer(ref, unsafe.Pointer(unsafe.SliceData(p)))
		}
		id = child
	}
	_, _, _, ok := page.Leaf(p).Find(key, page.Fingerprint(key), 5)
	return ok
}

// BenchmarkTreeGet asks what a direct reference from an inner node to its child's frame would save.
func BenchmarkTreeGet(b *testing.B) {
	for _, n := range []int{1 << 20, 1 << 22} {
		t := newTree(b, n)
		direct := newSwizzled(t)
		arms := []struct {
			name string
			get  func(key []byte) bool
		}{
			{"array", func(k []byte) bool { _, ok, _ := btree.Get(array{t}, t.root, k, 5); return ok }},
			{"lookup", func(k []byte) bool { _, ok, _ := btree.Get(looked{t}, t.root, k, 5); return ok }},
			{"swizzled", direct.get},
		}
		for _, threads := range []int{1, 2} {
			for _, arm := range arms {
				b.Run(fmt.Sprintf("keys=%dM/threads=%d/arm=%s", n>>20, threads, arm.name), func(b *testing.B) {
					t.gets(b, threads, arm.get)
				})
			}
		}
		_ = t.cache.Close()
	}
}

func (t *tree) gets(b *testing.B, threads int, get func([]byte) bool) {
	var wg sync.WaitGroup
	for g := range threads {
		wg.Go(func() {
			s := t.registry.Slot()
			defer s.Free()
			for i := range b.N / threads {
				s.Enter()
				if !get(t.probes[(i+g*len(t.probes)/2)%len(t.probes)]) {
					panic("lost")
				}
				s.Leave()
			}
		})
	}
	wg.Wait()
}
