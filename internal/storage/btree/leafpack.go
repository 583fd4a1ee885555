package btree

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// leafPacker turns a run of entries into leaves. It keeps up to two unwritten leaves, so that it
// decides how to cut the end of the run once it knows where the run ends: a long run fills its
// leaves to the fill target, the last two leaves share the rest, and a run that only grows at its
// end (ascending keys) leaves full leaves.
type leafPacker struct {
	regions      [2]leafRegion
	second       bool // regions[1] is in use
	appended     int  // entries at the end of the run that the old tree did not have
	deadVersions bool // the run has a superseded version or a tombstone
	pageSize     int
	soft         int // where a long run cuts its leaves
	checkpoint   uint64
	from         page.ID // the old leaf that is being read; zero before the first one
	pages        *pagePool
	separators   arena
	stored       []byte // what the leaf stores of a large value
	packed       int    // entries of the leaves in out and of those written, since the partition began
	covered      coveredRun
	err          error // the first broken invariant
	out          []item
}

// leafRegion is an unwritten leaf. Its entries point into buf; when buf grows, earlier entries
// still point into the old array.
type leafRegion struct {
	bound   page.Separator // nothing in the region is before it
	from    page.ID        // the old leaf that was being read when the region began
	entries []page.Entry
	large   []largeValue
	size    page.LeafSize
	buf     []byte
}

// largeValue is a value that is still to be stored; its reference goes to entries[entry]. The first
// section bytes are its metadata, which stay in the leaf.
type largeValue struct {
	entry   int
	value   []byte
	section int
}

// item is one child of the new tree: an old page that stays, or a new one that has no id yet.
type item struct {
	page.Child
	page  []byte  // nil if the child is unchanged
	from  page.ID // of a new leaf: the old leaf in whose place it is; zero if there is none
	large []storedValue
}

// storedValue says at which offset of a page the reference of a large value belongs.
type storedValue struct {
	offset int
	value  []byte
}

func (r *leafRegion) reset(bound page.Separator, from page.ID) {
	*r = leafRegion{bound: bound, from: from, entries: r.entries[:0], large: r.large[:0], buf: r.buf[:0]}
}

// begin starts a run whose first leaf has the given lower bound, if none is under way.
func (k *leafPacker) begin(bound page.Separator) {
	if k.empty() {
		k.regions[0].reset(bound, k.from)
		k.second, k.appended, k.deadVersions = false, 0, false
	}
}

func (k *leafPacker) empty() bool { return len(k.regions[0].entries) == 0 }

// underfull reports whether the unwritten entries should share a leaf with their neighbour.
func (k *leafPacker) underfull() bool {
	return !k.second && !k.empty() && k.regions[0].size.Bytes() < leastBytes(k.pageSize)
}

// leastBytes is how much a page should hold: two fifths. The halves of a split page are well above
// that, otherwise deletes and inserts around the limit would join and split for ever; and after
// random deletes pages are more than half full on average.
func leastBytes(pageSize int) int { return page.Payload(pageSize) * 2 / 5 }

// add copies e to the end of the run. Values that are too long for a leaf are not copied: they wait
// until they are stored.
func (k *leafPacker) add(e *page.Entry, based bool) {
	var large largeValue
	if !e.Large && len(e.Value) > page.InlineMax(k.pageSize) {
		large = largeValue{value: e.Value, section: metadata.Size(e.Trailer.Kind(), e.Value)}
		k.stored = append(append(k.stored[:0], e.Value[:large.section]...), zeroRef[:]...)
		e.Value, e.Large = k.stored, true
	}
	r := &k.regions[0]
	if k.second {
		r = &k.regions[1]
	}
	if len(r.entries) != 0 && r.size.With(e) > k.soft {
		r = k.cut(e)
	}
	if n := len(r.entries); n > 0 {
		k.check(checkNext(&r.entries[n-1], e))
	}
	r.add(e)
	if k.appended++; based {
		k.appended = 0
	}
	k.deadVersions = k.deadVersions || e.Same || e.Trailer.Kind() == keys.KindDelete
	if large.value != nil {
		large.entry = len(r.entries) - 1
		r.large = append(r.large, large)
	}
}

var zeroRef page.Ref

func (r *leafRegion) add(e *page.Entry) {
	at := len(r.buf)
	if e.Same && len(r.entries) != 0 {
		r.buf = append(r.buf, e.Value...)
		e.Key = r.entries[len(r.entries)-1].Key
		e.Value = r.buf[at:]
	} else {
		r.buf = append(append(r.buf, e.Key...), e.Value...)
		mid := at + len(e.Key)
		e.Key, e.Value = r.buf[at:mid:mid], r.buf[mid:]
	}
	r.size.Add(e)
	r.entries = append(r.entries, *e)
}

// cut opens the next region before e, and emits the first one if both were in use.
func (k *leafPacker) cut(e *page.Entry) *leafRegion {
	if k.second {
		k.emit(&k.regions[0])
		k.regions[0], k.regions[1] = k.regions[1], k.regions[0]
	}
	last := &k.regions[0].entries[len(k.regions[0].entries)-1]
	k.second = true
	bound := k.separators.between(last, e)
	k.check(checkCut(last, &bound, e))
	k.regions[1].reset(bound, k.from)
	return &k.regions[1]
}

// flush ends the run: the unwritten entries become one leaf or two.
func (k *leafPacker) flush() {
	if k.empty() {
		return
	}
	if k.second {
		k.balance()
	}
	k.emit(&k.regions[0])
	if k.second {
		k.emit(&k.regions[1])
	}
	k.regions[0].entries, k.second = k.regions[0].entries[:0], false
}

// balance decides how the last two leaves of a run divide its entries. One leaf takes all if they
// fit. If the first leaf can be filled so that the second has only entries that the old tree did
// not have, keys are ascending here and the first leaf will not change again. Otherwise a short
// second leaf gets half of the entries.
func (k *leafPacker) balance() {
	a, b := &k.regions[0], &k.regions[1]
	payload := page.Payload(k.pageSize)
	from := len(a.entries)
	all := append(a.entries, b.entries...)
	cut := fitting(all, payload)
	switch ascending := k.appended >= len(all)-cut; {
	case cut == len(all) || ascending:
	case b.size.Bytes() >= payload/2:
		a.entries = all[:from]
		return
	default:
		cut = halfway(all, from, a.size.Bytes()+b.size.Bytes())
		for cut < from && fitting(all[cut:], payload) < len(all)-cut {
			cut++ // entries with a different prefix would cost the second leaf its prefix
		}
	}
	for i := range b.large {
		b.large[i].entry += from
	}
	a.large = append(a.large, b.large...)
	a.entries = all[:cut]
	k.second = cut < len(all)
	if !k.second {
		return
	}
	b.bound = k.separators.between(&all[cut-1], &all[cut])
	k.check(checkCut(&all[cut-1], &b.bound, &all[cut]))
	b.entries = append(b.entries[:0], all[cut:]...)
	b.large = b.large[:0]
	for i, l := range a.large {
		if l.entry >= cut {
			for _, l := range a.large[i:] {
				l.entry -= cut
				b.large = append(b.large, l)
			}
			a.large = a.large[:i]
			break
		}
	}
}

// halfway is the index at which all divides into two halves by bytes, moved to the start of a key
// if one is near. The first half holds at least one entry and at most limit.
func halfway(all []page.Entry, limit, total int) int {
	bytes, cut := 0, 0
	for cut < limit && bytes < total/2 {
		bytes += entryCost(&all[cut])
		cut++
	}
	for i := cut; i > cut/2; i-- {
		if !all[i].Same {
			return max(i, 1)
		}
	}
	return max(cut, 1)
}

func entryCost(e *page.Entry) int {
	const overhead = 17 // header, fingerprint, head, and offset
	if e.Same {
		return overhead + len(e.Value)
	}
	return overhead + len(e.Key) + len(e.Value)
}

// fitting is how many of the entries fit into one leaf.
func fitting(entries []page.Entry, payload int) int {
	var s page.LeafSize
	for i := range entries {
		if s.With(&entries[i]) > payload {
			return i
		}
		s.Add(&entries[i])
	}
	return len(entries)
}

// emit builds a leaf of the region.
func (k *leafPacker) emit(r *leafRegion) {
	p := k.pages.get()
	newest := page.BuildLeaf(p, k.checkpoint, r.entries)
	k.check(checkLeaf(p, r))
	k.packed += len(r.entries)
	it := item{Child: page.Child{Separator: r.bound, Newest: newest}, page: p, from: r.from}
	if k.deadVersions || r.bound.Trailer != page.NoTrailer { // computing the ratio for every leaf cost 3 % of a merge
		it.DeadVersions = ratioOf(p, 0, &r.bound)
	}
	for _, l := range r.large {
		it.large = append(it.large, storedValue{page.Leaf(p).RefOffset(l.entry), l.value[l.section:]})
	}
	k.out = append(k.out, it)
}

// check notes the first broken invariant. The worker asks for it before it writes anything.
func (k *leafPacker) check(err error) {
	if err != nil && k.err == nil {
		k.err = err
	}
}

// arena holds the keys of separators, which live longer than their leaves.
type arena struct{ buf []byte }

// copy copies key into the arena.
func (a *arena) copy(key []byte) []byte {
	if len(key) > cap(a.buf)-len(a.buf) {
		a.buf = make([]byte, 0, max(4096, len(key)))
	}
	at := len(a.buf)
	a.buf = append(a.buf, key...)
	return a.buf[at:len(a.buf):len(a.buf)]
}

// between is the separator for a cut between two neighbours.
func (a *arena) between(left, right *page.Entry) page.Separator {
	if bytes.Equal(left.Key, right.Key) {
		return page.Separator{Key: a.copy(right.Key), Trailer: left.Trailer - 1}
	}
	return page.Separator{Key: a.copy(page.Shortest(left.Key, right.Key)), Trailer: page.NoTrailer}
}

// pagePool lends page buffers to one worker.
type pagePool struct {
	size int
	free [][]byte
}

func (p *pagePool) get() []byte {
	if n := len(p.free); n > 0 {
		b := p.free[n-1]
		p.free = p.free[:n-1]
		return b
	}
	return make([]byte, p.size)
}

func (p *pagePool) put(b []byte) { p.free = append(p.free, b) }
