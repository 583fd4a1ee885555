package storage

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestALeafThatCanBeReadAgainIsSkippedNoMore: its keys can be scanned again, with what was written to them meanwhile. If it cannot be read when
// the checkpoint comes, it stays skipped.
func TestALeafThatCanBeReadAgainIsSkippedNoMore(t *testing.T) {
	for _, flaps := range []bool{false, true} {
		t.Run(fmt.Sprintf("flaps=%v", flaps), func(t *testing.T) {
			b := newBench(t)
			e := b.engine
			b.put(0, 300, 60)
			b.checkpoint()
			heal := b.loseLastLeaf()
			var w batch.Builder
			w.Set(keys.SpaceUser, []byte("key-00299"), []byte("new"))
			w.Delete(keys.SpaceUser, []byte("key-00298"))
			w.Set(keys.SpaceUser, []byte("key-00300"), []byte(strings.Repeat("l", 3000)))
			b.commit(&w)
			b.checkpoint()
			skipped := e.checkpoints.skippedPages.Pages()
			if len(skipped) != 1 || skipped[0].Level != 0 {
				t.Fatalf("skipped: %+v", skipped)
			}
			e.heal(t.Context())
			if e.rebuilds.waiting.Load() {
				t.Fatal("a leaf that cannot be read was healed")
			}
			id := skipped[0].ID
			heal(id)
			e.heal(t.Context())
			if flaps {
				b.clearPage(id)
				e.pages.Invalidate(id)
			}
			b.checkpoint()
			if n := len(e.checkpoints.skippedPages.Pages()); (n == 1) != flaps || e.rebuilds.waiting.Load() {
				t.Fatalf("%d pages are skipped", n)
			}
			want := []string{"page"}
			if !flaps {
				want = nil
				if n := b.scanned(); n != 300 {
					t.Errorf("a scan has %d keys", n)
				}
			}
			if kinds := b.found(); fmt.Sprint(kinds) != fmt.Sprint(want) {
				t.Errorf("found %v, want %v", kinds, want)
			}
		})
	}
}

// TestANodeThatCanBeReadAgainIsSkippedNoMore: it could not be rebuilt, because a page below it could not be read at the same time.
func TestANodeThatCanBeReadAgainIsSkippedNoMore(t *testing.T) {
	b := newBench(t)
	e, ctx := b.engine, t.Context()
	b.put(0, 300, 60)
	b.checkpoint()
	var node, leaf page.ID // the last ones
	if err := btree.Walk(pagesource.NewDirect(&e.pager.Reader), rootOf(e.pager.State()), &btree.Visitor{Page: func(id page.ID, level int, _ []byte) error {
		if leaf = id; level == 1 {
			node = id
		}
		return nil
	}}); err != nil {
		t.Fatal(err)
	}
	heal := b.remember()
	b.clearPage(node)
	b.clearPage(leaf)
	b.put(299, 301, 70)
	b.checkpoint()
	look := func() (searches bool) {
		e.lookAgain(ctx, 1)
		select {
		case <-e.rebuilds.requests:
			searches = true
			if err := e.searchOrphans(ctx); err != nil {
				t.Fatal(err)
			}
		default:
		}
		b.checkpoint()
		return searches
	}
	look()
	if e.rebuilds.reasonOf(node) == "" || look() {
		t.Errorf("the node is not refused, or searched again: %q", e.rebuilds.reasonOf(node))
	}
	heal(node)
	heal(leaf)
	if !look() || len(e.checkpoints.skippedPages.Pages()) > 0 {
		t.Fatal("the node is skipped, and can be read")
	}
	if n := b.scanned(); n != 301 {
		t.Errorf("a scan has %d keys", n)
	}
	if kinds := b.found(); len(kinds) > 0 {
		t.Errorf("found %v", kinds)
	}
}

// loseLastLeaf is damageLastLeaf. It returns what lets a page be read again.
func (b *bench) loseLastLeaf() (heal func(page.ID)) {
	b.t.Helper()
	heal = b.remember()
	b.damageLastLeaf()
	return heal
}

// remember returns what lets a page be read again that is damaged from now on.
func (b *bench) remember() (heal func(page.ID)) {
	b.t.Helper()
	size := b.engine.pager.PageSize()
	intact := make([]byte, int(b.engine.pager.PageCount())*size)
	f, err := b.fs.Open("db/data.ekv", vfs.ReadOnly)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := f.ReadAt(intact, 0); err != nil {
		b.t.Fatal(err)
	}
	_ = f.Close()
	return func(id page.ID) {
		b.writePage(id, intact[int(id)*size:(int(id)+1)*size])
		b.engine.pages.Invalidate(id)
	}
}

// checkpointsOnRequest makes each checkpoint that is requested, until stop is called.
func (b *bench) checkpointsOnRequest() (stop func()) {
	stopping, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stopping:
				return
			case <-b.engine.CheckpointRequests():
				at := keys.Epoch(b.visible.Load())
				if err := b.engine.Checkpoint(b.t.Context(), GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}); err != nil {
					b.t.Error(err)
				}
			}
		}
	}()
	return func() {
		close(stopping)
		<-stopped
	}
}

// TestWhatIsGivenBackDelaysNoCommit: the repair tree may have so much that the merge which gives it back takes longer than writers wait for memory.
func TestWhatIsGivenBackDelaysNoCommit(t *testing.T) {
	b := newBench(t)
	e := b.engine
	b.put(0, 300, 60)
	b.checkpoint()
	heal := b.loseLastLeaf()
	var w batch.Builder
	for i := range 3000 {
		w.Set(keys.SpaceUser, fmt.Appendf(nil, "key-00299-%05d", i), []byte(strings.Repeat("n", 100)))
	}
	b.commit(&w)
	b.checkpoint()
	heal(e.checkpoints.skippedPages.Pages()[0].ID)
	e.heal(t.Context())

	e.options.StallMax = 4 * time.Second // half of it for the merge that rebuilds, and half for the one after it, which a busy machine needs, too
	most := e.memory.immutableBytes.Swap(2 * e.memory.memtableBytes)
	slow := b.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow, Delay: 20 * time.Millisecond})
	stop := b.checkpointsOnRequest()
	for i := range 300 { // more than memory holds; each that is refused fails
		b.put(i%10, i%10+1, 1000)
		if e.rebuilds.yielded.Load() > 0 {
			slow.Remove() // only what is given back takes long
		}
	}
	stop()
	slow.Remove()
	e.memory.immutableBytes.Store(most) // a rotation would wait for a checkpoint, and the goroutine that makes them has ended
	if n := len(e.checkpoints.skippedPages.Pages()); n != 1 || e.Stats().Backpressure.Stalls == 0 {
		t.Errorf("%d pages are skipped; %+v: the test tests nothing", n, e.Stats().Backpressure)
	}
	if e.lookAgain(t.Context(), 1); e.rebuilds.waiting.Load() {
		t.Error("writers are delayed again at once")
	}
	e.lookAgain(t.Context(), 2)
	b.checkpoint()
	if n := b.scanned(); n != 3300 || e.rebuilds.yielded.Load() != 0 {
		t.Errorf("a scan has %d keys", n)
	}
	if kinds := b.found(); len(kinds) > 0 {
		t.Errorf("found %v", kinds)
	}
}

// scanned counts the keys of a scan.
func (b *bench) scanned() (n int) {
	b.t.Helper()
	b.slot.Enter()
	defer b.slot.Leave()
	r, c := b.engine.NewReader(), &Cursor{}
	from := []byte{byte(keys.SpaceUser)}
	for {
		r.OpenCursor(c, keys.Epoch(b.visible.Load()), from, []byte{byte(keys.SpaceUser) + 1}, 0)
		for c.SeekGE(from); c.Valid(); c.Next() {
			if c.Version().Kind.HasValue() {
				n++
			}
		}
		if c.Err() != nil {
			b.t.Fatal(c.Err())
		}
		if !c.Paused() {
			return n
		}
		from = append([]byte(nil), c.Resume()...)
	}
}

// TestAPageOfAnotherPlaceIsSkipped: a device that has lost a write has an older page there, of the same number and with other keys. That is damage of this
// page, and no reason to stop the store, also if a merge only looks whether it can be joined with its neighbour.
func TestAPageOfAnotherPlaceIsSkipped(t *testing.T) {
	for i := range 4 {
		level, before := i%2, i < 2
		t.Run(fmt.Sprintf("level=%d,before=%v", level, before), func(t *testing.T) {
			b := newBench(t)
			e := b.engine
			b.put(0, 1000, 60)
			b.checkpoint()
			source := pagesource.WholeTree{Pager: &e.pager.Reader}
			var nodes []page.Child
			if err := btree.Walk(source, rootOf(e.pager.State()), &btree.Visitor{Page: func(id page.ID, at int, _ []byte) error {
				if at == 1 {
					nodes = append(nodes, page.Child{ID: id})
				}
				return nil
			}}); err != nil {
				t.Fatal(err)
			}
			children := func(node int) []page.Child {
				all, err := btree.Children(source, &nodes[node], 1)
				if err != nil {
					t.Fatal(err)
				}
				return all
			}
			first := func(leaf page.Child) (n int) {
				p, err := source.Page(leaf.ID, 0)
				if err != nil {
					t.Fatal(err)
				}
				v := page.Leaf(p).Layout()
				if _, err := fmt.Sscanf(string(keys.User(v.Key(nil, 0))), "key-%05d", &n); err != nil {
					t.Fatal(err)
				}
				return n
			}
			// The page before or after it becomes nearly empty: the last leaf of a node, or a node.
			mid, others := len(nodes)/2, []page.Child{nodes[1], nodes[len(nodes)-2]}
			id, from, to := nodes[mid].ID, first(children(mid - 1)[0]), first(children(mid)[0])
			kept := to + 1 // on the page
			if level == 0 {
				leaves := children(mid)
				id, from, to = leaves[len(leaves)-2].ID, first(leaves[len(leaves)-1]), first(children(mid + 1)[0])
				kept = from - 1
				others = []page.Child{children(1)[0], children(len(nodes) - 2)[0]}
			}
			other := others[1]
			if before {
				other = others[0]
			}
			older, err := source.Page(other.ID, level)
			if err != nil {
				t.Fatal(err)
			}
			page.SetID(older, id)
			b.writePage(id, older)
			e.pages.Invalidate(id)
			var w batch.Builder
			for n := from + 1; n < to; n++ {
				w.Delete(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", n))
			}
			b.commit(&w)
			b.checkpoint()
			at := keys.Epoch(b.visible.Load())
			for size := range 2 {
				b.put(0, 1000, size+1)
				b.checkpoint()
			}
			skipped := e.checkpoints.skippedPages.Pages()
			if len(skipped) != 1 || skipped[0].ID != id {
				t.Errorf("page %d is not skipped, but %+v", id, skipped)
			}
			e.rebuilds.refuse([]btree.RebuiltNode{{ID: id}}, "")
			if e.heal(t.Context()); e.rebuilds.waiting.Load() || e.rebuilds.refused == nil {
				t.Error("it was healed")
			}
			b.readAll(0, 1000)
			b.checkLost(keys.Append(nil, keys.SpaceUser, fmt.Appendf(nil, "key-%05d", kept)), at)
		})
	}
}

// checkLost: no read finds what a page had at an epoch, or that it had nothing.
func (b *bench) checkLost(key []byte, at keys.Epoch) {
	b.t.Helper()
	b.slot.Enter()
	defer b.slot.Leave()
	r := b.engine.NewReader()
	if _, ok, err := r.Get(key, at); !errors.Is(err, ErrDamaged) {
		b.t.Errorf("get: %v, %v", ok, err)
	}
	if err := r.GetAll(new(Finder), [][]byte{key}, at, Visits{Each: func(_ int, _ Version, ok bool) error {
		b.t.Errorf("in a batch: %v", ok)
		return nil
	}}); !errors.Is(err, ErrDamaged) {
		b.t.Errorf("in a batch: %v", err)
	}
	if err := r.Versions(key, at, func(v Version) bool {
		b.t.Errorf("in the history: %d", v.Epoch)
		return true
	}); !errors.Is(err, ErrDamaged) {
		b.t.Errorf("in the history: %v", err)
	}
}

// TestAnOlderLeafStopsNoCheckpoint: after a write that the device has lost, an older version of a leaf is there, and some of the large values to which it
// refers were dropped. The leaf is skipped, and what is written after that is kept.
func TestAnOlderLeafStopsNoCheckpoint(t *testing.T) {
	for older := range 2 {
		b := newBench(t)
		e := b.engine
		var was [][]byte
		for round := range 8 {
			b.put(round%2*5, 10, 200+round)
			b.checkpoint()
			var id page.ID // of the first leaf
			if err := btree.Walk(pagesource.WholeTree{Pager: &e.pager.Reader}, rootOf(e.pager.State()), &btree.Visitor{Page: func(at page.ID, level int, p []byte) error {
				if level == 0 && id == 0 {
					id, was = at, append(was, p)
				}
				return nil
			}}); err != nil {
				t.Fatal(err)
			}
			if p := was[max(0, round-older-1)]; round == 3 {
				page.SetID(p, id)
				b.writePage(id, p)
			}
		}
		if n := len(e.checkpoints.skippedPages.Pages()); n != 1 {
			t.Errorf("%d pages are skipped", n)
		}
		r := e.NewReader()
		for i := range 10 {
			b.slot.Enter()
			v, _, err := r.Newest(keys.Append(nil, keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i)))
			if err != nil {
				t.Fatal(err)
			}
			if value, err := r.AppendValue(nil, v); err != nil || len(value) != 206+i/5 {
				t.Errorf("key %d: a value of %d bytes, %v", i, len(value), err)
			}
			b.slot.Leave()
		}
	}
}

// TestAnOlderNodeStopsNoCheckpoint: after a write that the device has lost, an older version of an inner node is there, of whose children some were freed.
// The node is skipped, also if a search finds that it can be read, and what is written after that is kept.
func TestAnOlderNodeStopsNoCheckpoint(t *testing.T) {
	for level := 1; level < 3; level++ {
		b := newBench(t)
		e := b.engine
		b.put(0, 300, 60)
		var was []byte
		for round := range 2 {
			b.put(0, 10, 20)
			b.checkpoint()
			var id page.ID // of the first node
			if err := btree.Walk(pagesource.WholeTree{Pager: &e.pager.Reader}, rootOf(e.pager.State()), &btree.Visitor{Page: func(at page.ID, l int, p []byte) error {
				if l != level || id != 0 {
					return nil
				}
				if id = at; round == 0 {
					was = p
				}
				return nil
			}}); err != nil {
				t.Fatal(err)
			}
			if round == 1 {
				page.SetID(was, id)
				b.writePage(id, was)
				e.pages.Invalidate(id)
			}
		}
		for range 3 {
			b.put(0, 10, 30)
			b.checkpoint()
			if err := e.searchOrphans(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if n := len(e.checkpoints.skippedPages.Pages()); n != 1 {
			t.Errorf("level %d: %d pages are skipped", level, n)
		}
		b.readAll(0, 10)
	}
}
