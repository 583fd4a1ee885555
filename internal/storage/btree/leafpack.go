package btree

import (
	"bytes"
	"math"
	"slices"

	"github.com/epochkv/epochkv/internal/invariants"
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
	key, last    []byte // buffers for keys beside a cut
	spare        [2]page.Draft
	all          []page.Entry // buffers of balance
	allKeys      []byte
	packed       int // entries of the leaves in out and of those written, since the partition began
	covered      coveredRun
	err          error // the first broken invariant
	out          []item
}

// leafRegion is an unwritten leaf.
type leafRegion struct {
	bound page.Separator // nothing in the region is before it
	from  page.ID        // the old leaf that was being read when the region began
	draft page.Draft
	large []largeValue
}

// largeValue is a value that is still to be stored; its reference goes to that entry of the leaf. The first
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
	r.bound, r.from, r.large = bound, from, r.large[:0]
	r.draft.Reset()
}

// begin starts a run whose first leaf has the given lower bound, if none is under way.
func (k *leafPacker) begin(bound page.Separator) {
	if k.empty() {
		k.regions[0].reset(bound, k.from)
		k.second, k.appended, k.deadVersions = false, 0, false
	}
}

func (k *leafPacker) empty() bool { return k.regions[0].draft.Count() == 0 }

// underfull reports whether the unwritten entries should share a leaf with their neighbour.
func (k *leafPacker) underfull() bool {
	return !k.second && !k.empty() && k.regions[0].draft.Bytes() < leastBytes(k.pageSize)
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
	r := k.region()
	if r.draft.Count() > 0 {
		k.checkNext(r, e)
	} else {
		k.raiseBound(r, e.Key)
	}
	if !r.draft.Add(e, k.soft) {
		r = k.cut(e)
		r.draft.Add(e, k.soft)
	}
	if k.appended++; based {
		k.appended = 0
	}
	k.deadVersions = k.deadVersions || e.Same || e.Trailer.Kind() == keys.KindDelete
	if large.value != nil {
		large.entry = r.draft.Count() - 1
		r.large = append(r.large, large)
	}
}

// addRun copies entries [from, to) of an old leaf to the end of the run. Each is the only version of its key.
func (k *leafPacker) addRun(v *page.LeafLayout, from, to int) {
	r := k.region()
	if r.draft.Count() == 0 && r.bound.Trailer != page.NoTrailer {
		k.key = v.Key(k.key[:0], from)
		k.raiseBound(r, k.key)
	} else if invariants.Enabled && r.draft.Count() > 0 {
		k.key = v.Key(k.key[:0], from)
		k.checkNext(r, &page.Entry{Key: k.key, Trailer: v.Trailer(from)})
	}
	for from < to {
		n := r.draft.AddRun(v, from, to, k.soft)
		if from += n; from < to {
			k.key = v.Key(k.key[:0], from)
			r = k.cut(&page.Entry{Key: k.key, Trailer: v.Trailer(from)})
		}
	}
	k.appended = 0
}

// raiseBound lets a leaf begin at its first key if its bound is between versions of another one, which are gone: such a bound would let every
// merge that opens its parent rewrite the leaf (Policy.past). The key is greater than the bound's.
func (k *leafPacker) raiseBound(r *leafRegion, first []byte) {
	if r.bound.Trailer != page.NoTrailer && !k.covered.needed && !bytes.Equal(r.bound.Key, first) {
		r.bound = page.Separator{Key: k.separators.copy(page.Shortest(r.bound.Key, first)), Trailer: page.NoTrailer}
	}
}

// region is the one that gets the next entry.
func (k *leafPacker) region() *leafRegion {
	if k.second {
		return &k.regions[1]
	}
	return &k.regions[0]
}

var zeroRef page.Ref

// cut opens the next region before e, and emits the first one if both were in use.
func (k *leafPacker) cut(e *page.Entry) *leafRegion {
	if k.second {
		k.emit(&k.regions[0])
		k.regions[0], k.regions[1] = k.regions[1], k.regions[0]
	}
	draft := &k.regions[0].draft
	k.last = draft.LastKey(k.last[:0])
	last := page.Entry{Key: k.last, Trailer: draft.LastTrailer()}
	k.second = true
	bound := k.separators.between(&last, e)
	k.check(checkCut(&last, &bound, e))
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
	k.regions[0].draft.Reset()
	k.second = false
}

// balance decides how the last two leaves of a run divide its entries. One leaf takes all if they
// fit. If the first leaf can be filled so that the second has only entries that the old tree did
// not have, keys are ascending here and the first leaf will not change again. Otherwise a short
// second leaf gets half of the entries.
func (k *leafPacker) balance() {
	a, b := &k.regions[0], &k.regions[1]
	payload := page.Payload(k.pageSize)
	from, bytes := a.draft.Count(), a.draft.Bytes()+b.draft.Bytes()
	if a.draft.Join(&b.draft, payload) {
		a.takeLarge(b, from)
		k.second = false
		return
	}
	long := b.draft.Bytes() >= payload/2
	if long && k.appended == 0 || a.draft.KeyBytes()+b.draft.KeyBytes() > balancedBytesMax {
		return
	}
	all := k.entries(&a.draft, &b.draft)
	cut := fitting(all, payload)
	switch ascending := k.appended >= len(all)-cut; {
	case ascending:
	case long:
		return
	default:
		cut = halfway(all, from, bytes)
		for cut < from && fitting(all[cut:], payload) < len(all)-cut {
			cut++ // entries with a different prefix would cost the second leaf its prefix
		}
	}
	k.divide(all, from, cut)
}

// balancedBytesMax is how many bytes of keys and values the leaves may have that are divided anew: each key is copied. Keys that share nearly all of their
// bytes are thousands of times as long as what a page has of them, and their last leaf stays as short as it is.
const balancedBytesMax = 2 << 20

// entries are those of one draft after the other.
func (k *leafPacker) entries(drafts ...*page.Draft) []page.Entry {
	k.all, k.allKeys = k.all[:0], k.allKeys[:0]
	for _, d := range drafts {
		k.all, k.allKeys = d.Entries(k.all, k.allKeys)
	}
	return k.all
}

// takeRegion empties the only region, and returns its entries and large values. They are valid until balance.
func (k *leafPacker) takeRegion() ([]page.Entry, []largeValue) {
	r := &k.regions[0]
	r.draft, k.spare[0] = k.spare[0], r.draft
	r.draft.Reset()
	entries := k.entries(&k.spare[0])
	large := slices.Clone(r.large)
	r.large = r.large[:0]
	return entries, large
}

// divide moves the cut between the two regions, which have all of the entries, from one entry to another.
func (k *leafPacker) divide(all []page.Entry, from, to int) {
	a, b := &k.regions[0], &k.regions[1]
	b.bound = k.separators.between(&all[to-1], &all[to])
	k.check(checkCut(&all[to-1], &b.bound, &all[to]))
	a.takeLarge(b, from)
	for i, l := range a.large {
		if l.entry >= to {
			for _, l := range a.large[i:] {
				l.entry -= to
				b.large = append(b.large, l)
			}
			a.large = a.large[:i]
			break
		}
	}
	for i, part := range [][]page.Entry{all[:to], all[to:]} {
		k.spare[i].Reset()
		for j := range part {
			k.spare[i].Add(&part[j], math.MaxInt)
		}
		k.regions[i].draft, k.spare[i] = k.spare[i], k.regions[i].draft
	}
}

// takeLarge takes the large values of b, whose entries come after so many.
func (r *leafRegion) takeLarge(b *leafRegion, entries int) {
	for _, l := range b.large {
		l.entry += entries
		r.large = append(r.large, l)
	}
	b.large = b.large[:0]
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
	newest := r.draft.Build(p, k.checkpoint)
	k.check(checkLeaf(p, r))
	k.packed += r.draft.Count()
	it := item{Child: page.Child{Separator: r.bound, Newest: newest}, page: p, from: r.from}
	if k.deadVersions || r.bound.Trailer != page.NoTrailer { // computing the ratio for every leaf cost 3 % of a merge
		it.DeadVersions = ratioOf(p, 0, &r.bound)
	}
	for _, l := range r.large {
		it.large = append(it.large, storedValue{page.Leaf(p).RefOffset(l.entry), l.value[l.section:]})
	}
	k.out = append(k.out, it)
}

// checkNext checks that e may come after the last entry of r.
func (k *leafPacker) checkNext(r *leafRegion, e *page.Entry) {
	last := page.Entry{Trailer: r.draft.LastTrailer()}
	if invariants.Enabled {
		k.last = r.draft.LastKey(k.last[:0])
		last.Key = k.last
	}
	k.check(checkNext(&last, e))
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
