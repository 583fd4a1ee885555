package btree

import (
	"bytes"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// partition is a piece of a merge that one worker does alone: neighbouring leaves of the old tree,
// and the input before hi.
type partition struct {
	index    int
	before   []event        // what the upper levels get before the partition
	children []page.Child   // the old leaves; a child with id zero is the leaf that an empty tree lacks
	lo       page.Separator // where the partition begins: before its first leaf, or inside it
	hi       *page.Separator
	end      *page.Separator // where its last leaf ends: at hi or after it
	cutFirst bool            // the first leaf began in the partition before, which also frees it
	cutLast  bool            // the last leaf continues in the next partition
	relocate bool            // rewrite leaves that are past the merge's relocation limit
	offered  int             // new children when they were offered to ordered.stream last
}

// worker merges partitions. It reuses its buffers for one partition after the other.
type worker struct {
	m          *merge
	src        Source
	prefetcher Prefetcher // src, if it is a Prefetcher; else nil
	lookahead  peeker     // reads the input ahead of in, for prefetcher
	pack       leafPacker
	pages      pagePool
	key        []byte // of the current version
	leaf       currentLeaf
	history    keyHistory
	retained   bool // a version of key is in the run
	// countedOld and countedNew say that the key's newest version on that side was counted, so that
	// older ones do not count as keys.
	countedOld, countedNew bool
	entry                  page.Entry
	leaves                 []page.ID // buffer of prefetchPartition
	scratch                []byte    // for a key
	freed                  []page.ID
	dropped                []droppedValue
	stats                  Stats
	balance                balance
	intake
}

// droppedValue is a large value that no version in the new tree has.
type droppedValue struct {
	ref  page.Ref
	leaf int // of the partition, that has the version; -1 if it is of the input
}

// intake is the input of a worker.
type intake struct {
	in       peeker
	p        *partition // that it is for
	consumed int        // entries since the last call of Progress
	err      error      // ended it
}

// currentLeaf is the old leaf that a worker merges.
type currentLeaf struct {
	index          int             // in its partition
	bound          *page.Separator // its upper bound; nil if it has none
	runFrom, runTo int             // its entries that runs may have
}

// run merges p. It leaves the partition's children in pack.out.
func (w *worker) run(p *partition) error {
	w.pack.out, w.freed, w.dropped, w.stats = nil, nil, nil, Stats{}
	w.pack.packed, w.balance, w.pack.covered.open, w.p = 0, balance{}, false, p
	w.prefetchPartition(p)
	w.in.seek(p.lo)
	w.checkInput()
	w.key, w.history = w.key[:0], w.m.Policy.begin(nil)
	for i := range p.children {
		c, bound := &p.children[i], p.boundAfter(i)
		if !w.touched(p, i, bound) {
			w.retain(c)
			continue
		}
		if err := w.vacuumOrMerge(p, i, bound); err != nil {
			return err
		}
		if w.stream(); w.err != nil {
			return w.err
		}
	}
	if err := w.in.in.Err(); err != nil {
		return err
	}
	return w.finish(p)
}

// stream offers the children of the partition to ordered.stream, once for each of them. An error is in w.err, and ends the input.
func (w *worker) stream() {
	n := len(w.pack.out)
	if n < streamPages || n == w.p.offered || w.err != nil {
		return
	}
	w.fail(w.m.ordered.stream(w.p, w))
	w.p.offered = len(w.pack.out)
}

// fail ends the input of the partition if err is not nil.
func (w *worker) fail(err error) {
	if err != nil {
		w.err, w.in.ok = err, false
	}
}

// prefetchPartition tells the source which leaves of the partition it will be asked for. The list
// need not be exact.
func (w *worker) prefetchPartition(p *partition) {
	if w.prefetcher == nil {
		return
	}
	w.leaves = w.leaves[:0]
	w.lookahead.seek(p.lo)
	for i := range p.children {
		id, bound := p.children[i].ID, p.boundAfter(i)
		input := w.lookahead.before(bound)
		if id != 0 && !w.m.avoids(id) && (input || w.m.Vacuum.Has(id) || w.m.mayExpire(&p.children[i], bound) || p.divides(i) || p.relocate && id >= w.m.Relocate.From) {
			w.leaves = append(w.leaves, id)
		}
		if input {
			w.lookahead.skip(bound)
		}
	}
	w.prefetcher.Prefetch(w.leaves)
}

// touched reports whether child i of the partition is to be rewritten.
func (w *worker) touched(p *partition, i int, bound *page.Separator) bool {
	c := &p.children[i]
	if w.m.avoids(c.ID) {
		return w.in.before(bound)
	}
	return w.in.before(bound) || w.m.Policy.past(&c.Separator) || w.m.Vacuum.Has(c.ID) || w.m.mayExpire(c, bound) || w.pack.underfull() ||
		p.divides(i) || p.relocate && c.ID >= w.m.Relocate.From
}

// divides reports whether child i of the partition also belongs to the neighbouring partition.
func (p *partition) divides(i int) bool {
	return i == 0 && p.cutFirst || i == len(p.children)-1 && p.cutLast
}

// retain leaves a leaf as it is.
func (w *worker) retain(c *page.Child) {
	w.endRun()
	w.pack.flush()
	w.pack.out = append(w.pack.out, item{Child: *c})
}

// boundAfter is where child i of the partition ends.
func (p *partition) boundAfter(i int) *page.Separator {
	if i+1 < len(p.children) {
		return &p.children[i+1].Separator
	}
	return p.hi
}

// endOf is where leaf i of the partition ends, which may be in the next one.
func (p *partition) endOf(i int) *page.Separator { return boundOf(p.children, i+1, p.end) }

// finish ends the partition's last run. If the run is underfull and the leaf before it is
// unchanged, the two become one run. The last leaf of the tree may be underfull, because ascending
// keys continue there.
func (w *worker) finish(p *partition) error {
	w.endRun()
	n := len(w.pack.out)
	if p.hi == nil || !w.pack.underfull() || n == 0 || w.pack.out[n-1].page != nil {
		w.pack.flush()
		return nil
	}
	prev := w.pack.out[n-1].Child
	old, err := w.neighbour(&prev, &w.pack.regions[0].bound)
	if old == nil {
		w.pack.flush()
		return err
	}
	w.pack.out = w.pack.out[:n-1]
	tail, large := w.pack.takeRegion()
	w.pack.from = prev.ID
	w.pack.covered.needed = w.m.mustCover(&prev.Separator) // an avoided page may end there
	w.pack.begin(prev.Separator)
	w.freed = append(w.freed, prev.ID)
	w.copyLeaf(old)
	for i := range tail {
		e := tail[i]
		if i == 0 {
			e.Same = bytes.Equal(e.Key, w.key) // its newer versions may end the leaf before
		}
		if len(large) > 0 && large[0].entry == i {
			e.Value, e.Large, large = large[0].value, false, large[1:]
		}
		w.pack.add(&e, true)
	}
	w.pack.flush()
	w.pack.covered.needed = false
	return nil
}

// neighbour reads a leaf that is to be joined with an underfull one. It returns nil if the leaf
// must stay or cannot be read.
func (w *worker) neighbour(c *page.Child, bound *page.Separator) (page.Leaf, error) {
	if w.m.avoids(c.ID) {
		return nil, nil
	}
	p, err := fetch(w.src, c.ID, 0)
	if err == nil {
		err = LeafInside(p, &c.Separator, bound, w.scratch)
	}
	if w.m.isUnreadable(err) {
		return nil, nil
	}
	return p, err
}

// copyLeaf adds all entries of an old leaf to the run unchanged.
func (w *worker) copyLeaf(p page.Leaf) {
	v := p.Layout()
	w.balance.read += v.Count()
	for i := range v.Count() {
		w.loadOld(&v, i)
		w.pack.add(&w.entry, true)
	}
}

// loadOld makes entry i of an old leaf the current one.
func (w *worker) loadOld(v *page.LeafLayout, i int) {
	suffix, t, value, large := v.At(i)
	same := i > 0 && len(suffix) == 0
	if !same {
		w.key = append(append(w.key[:0], v.Prefix()...), suffix...)
	}
	w.entry = page.Entry{Key: w.key, Value: value, Trailer: t, Same: same, Large: large}
}

// vacuumOrMerge rewrites leaf i. If there is no input for the leaf, it counts what was dropped as
// vacuumed.
func (w *worker) vacuumOrMerge(p *partition, i int, bound *page.Separator) error {
	if w.in.before(bound) {
		return w.mergeLeaf(p, i, bound)
	}
	before := w.stats.VersionsDropped
	if err := w.mergeLeaf(p, i, bound); err != nil {
		return err
	}
	if n := w.stats.VersionsDropped - before; n > 0 {
		w.stats.LeavesVacuumed++
		w.stats.VersionsVacuumed += n
	}
	return nil
}

// mergeLeaf replaces leaf i of the partition by the run of its entries and the input before bound.
func (w *worker) mergeLeaf(p *partition, i int, bound *page.Separator) error {
	c := &p.children[i]
	lower := c.Separator
	if i == 0 {
		lower = p.lo
	}
	w.leaf.index, w.leaf.bound, w.pack.from = i, bound, c.ID
	if c.ID == 0 {
		w.pack.begin(lower)
		w.emitInput(bound)
		return nil
	}
	b, err := w.fetch(p, i)
	if err != nil {
		return w.skipUnreadable(p, i, bound, err)
	}
	w.pack.begin(w.pack.covered.beginLeaf(w.m, lower))
	leaf := page.Leaf(b)
	v := leaf.Layout()
	from, to := 0, v.Count()
	w.leaf.runFrom, w.leaf.runTo = w.runs(&lower, bound, to)
	if i == 0 && p.cutFirst {
		from = leaf.Search(p.lo.Key)
	} else {
		w.freed = append(w.freed, c.ID)
	}
	if i == len(p.children)-1 && p.cutLast {
		to = leaf.Search(p.hi.Key)
	}
	w.resume(&lower)
	w.balance.read += max(to-from, 0)
	for from < to {
		stop := to
		if w.in.before(bound) {
			stop = min(to, leaf.Search(w.in.entry.Key))
		}
		w.copyOld(&v, from, stop)
		from = max(from, stop)
		from = w.emitKey(&v, from, to, bound)
	}
	w.emitInput(bound)
	return nil
}

// runMin is how many entries are copied as a run: a run costs as much as the decoding of some.
const runMin = 6

// runs returns which entries of an old leaf are taken over as they are if each is the only version of its key.
// Left out are those at its ends whose keys have other versions in the neighbouring leaves, and all if some may expire.
func (w *worker) runs(lower, bound *page.Separator, count int) (from, to int) {
	if w.m.Policy.Expired.meets(lower, bound) {
		return 0, 0
	}
	if lower.Trailer != page.NoTrailer {
		from = 1
	}
	if bound != nil && bound.Trailer != page.NoTrailer {
		count--
	}
	return from, count
}

// fetch reads leaf i of the partition, which is to be rewritten. A leaf with keys of another place, as after a write that the
// device has lost, is damage, too.
func (w *worker) fetch(p *partition, i int) ([]byte, error) {
	c := &p.children[i]
	if w.m.avoids(c.ID) {
		return nil, errAvoided
	}
	b, err := fetch(w.src, c.ID, 0)
	if err == nil {
		err = LeafInside(b, &c.Separator, p.endOf(i), w.scratch)
	}
	return b, err
}

// skipUnreadable leaves child i of the partition, which cannot be read, where it is. Its whole range is skipped: the partition that shares it may
// have read it.
func (w *worker) skipUnreadable(p *partition, i int, bound *page.Separator, err error) error {
	if !w.m.isUnreadable(err) {
		return err
	}
	c := p.children[i]
	w.m.unreadablePages.add(UnreadablePage{ID: c.ID, Lower: c.Separator, Upper: p.endOf(i), Err: err})
	w.in.skip(bound)
	w.checkInput()
	if i == 0 {
		c.Separator = p.lo
	}
	w.retain(&c)
	return nil
}

// resume restores the history of a key whose newer versions are before the leaf's lower bound. The
// bound may name a version that is gone.
func (w *worker) resume(lower *page.Separator) {
	if lower.Trailer == page.NoTrailer {
		return
	}
	if bytes.Equal(w.key, lower.Key) {
		w.history.newer = min(w.history.newer, (lower.Trailer + 1).Epoch())
		return
	}
	w.key = append(w.key[:0], lower.Key...)
	w.history, w.retained = w.m.Policy.historyAfter(lower), false
	w.countedOld, w.countedNew = true, true
}

// enter makes the input's key the current one, unless it is already. It returns false if the key
// was refused.
func (w *worker) enter(key []byte) bool {
	switch c := bytes.Compare(w.key, key); {
	case c < 0:
		w.key = append(w.key[:0], key...)
		w.reset()
	case c > 0:
		w.refuse(fmt.Errorf("%w: %.40q after %.40q", ErrInputOrder, key, w.key))
		w.checkInput()
		return false
	}
	return true
}

// refuse skips all input of the current key.
func (w *worker) refuse(err error) {
	key := bytes.Clone(w.in.entry.Key)
	w.m.refused.add(key, err)
	for w.in.ok && bytes.Equal(w.in.entry.Key, key) {
		w.consumed++
		w.balance.read++
		w.balance.skipped++
		w.in.next()
	}
}

func (w *worker) reset() {
	w.history, w.retained, w.countedOld, w.countedNew = w.m.Policy.begin(w.key), false, false, false
}

// copyOld emits entries [from, to) of an old leaf. The input has nothing for their keys. Versions that are the only ones of
// their keys stay, whatever the snapshots, and change no count: runs of them are copied.
func (w *worker) copyOld(v *page.LeafLayout, from, to int) {
	for from < to {
		n := 0
		if from >= w.leaf.runFrom {
			n = v.SoleVersions(from, min(to, w.leaf.runTo))
		}
		if n >= w.m.runMin {
			w.pack.addRun(v, from, from+n)
			from += n
			continue
		}
		for range max(n, 1) {
			w.emitOld(v, from)
			from++
		}
	}
}

// emitOld emits entry i of an old leaf. The input has nothing for its key.
func (w *worker) emitOld(v *page.LeafLayout, i int) {
	suffix, t, value, large := v.At(i)
	if i == 0 {
		w.enterSplitKey(v.Prefix(), suffix)
	} else if len(suffix) != 0 {
		w.key = append(append(w.key[:0], v.Prefix()...), suffix...)
		w.reset()
	}
	w.entry = page.Entry{Value: value, Trailer: t, Large: large}
	w.emit(true)
}

// enterSplitKey is enter for a key in two parts.
func (w *worker) enterSplitKey(prefix, suffix []byte) {
	n := len(prefix)
	if len(w.key) == n+len(suffix) && string(w.key[:n]) == string(prefix) && string(w.key[n:]) == string(suffix) {
		return
	}
	w.key = append(append(w.key[:0], prefix...), suffix...)
	w.reset()
}

// emitKey emits all versions of the input's next key in order, together with the old ones from
// entry i on. It returns the entry after them.
func (w *worker) emitKey(v *page.LeafLayout, i, to int, bound *page.Separator) int {
	if i == to || !w.in.before(bound) {
		return i
	}
	e := &w.in.entry
	if !w.enter(e.Key) {
		return i
	}
	if string(v.Prefix()) != string(w.key[:min(len(w.key), len(v.Prefix()))]) || !bytes.Equal(v.Suffix(i), w.key[len(v.Prefix()):]) {
		w.m.invoke(w, nil, 0)
		w.emitInputKey(bound)
		return i
	}
	w.m.invoke(w, v, i)
	for first := i; i < to && (i == first || v.Same(i)); {
		_, t, value, large := v.At(i)
		switch {
		case w.inputHasKey(bound) && e.Trailer > t:
			w.emitNew()
		case w.inputHasKey(bound) && e.Trailer == t: // a repeated input replaces what its first merge wrote
			w.countOld(t, value)
			w.dropRef(value, large, true)
			w.balance.skipped++
			i++
		default:
			w.entry = page.Entry{Value: value, Trailer: t, Large: large}
			w.emit(true)
			i++
		}
	}
	w.emitInputKey(bound)
	return i
}

func (w *worker) inputHasKey(bound *page.Separator) bool {
	return w.in.ok && bytes.Equal(w.in.entry.Key, w.key) && w.in.before(bound)
}

// emitInputKey emits the remaining input of the current key.
func (w *worker) emitInputKey(bound *page.Separator) {
	for w.inputHasKey(bound) {
		w.emitNew()
	}
}

// emitInput emits the input before bound. The old tree has no entries of its keys.
func (w *worker) emitInput(bound *page.Separator) {
	for w.in.before(bound) {
		if !w.enter(w.in.entry.Key) {
			continue
		}
		w.m.invoke(w, nil, 0)
		w.emitInputKey(bound)
	}
}

func (w *worker) emitNew() {
	e := &w.in.entry
	if w.history.any && e.Trailer.Epoch() > w.history.newer {
		w.refuse(fmt.Errorf("%w: %.40q at epoch %d after %d", ErrInputOrder, w.key, e.Trailer.Epoch(), w.history.newer))
		w.checkInput()
		return
	}
	if e.Trailer.Kind() != keys.KindNone { // a baseline's Invoke that changed nothing
		w.entry = page.Entry{Value: e.Value, Trailer: e.Trailer, Large: e.Large}
		w.emit(false)
	} else {
		w.balance.skipped++
	}
	w.nextInput()
}

// nextInput moves to the next entry. One leaf may take any amount of input, so do the versions of one key, and nothing may be left of all of it:
// so here finished pages are written, and a merge that was cancelled ends.
func (w *worker) nextInput() {
	w.consumed++
	w.balance.read++
	w.in.next()
	w.checkInput()
	if w.consumed%cancelEvery == 0 {
		w.fail(w.m.ctx.Err())
	}
	w.stream()
}

// cancelEvery is after how many entries of its input a worker looks whether the merge was cancelled.
const cancelEvery = 256

// checkInput skips entries that no page can hold.
func (w *worker) checkInput() {
	for w.in.ok {
		n := len(w.in.entry.Key)
		if n != 0 && n <= page.KeySizeMax(w.m.PageSize) {
			return
		}
		w.refuse(fmt.Errorf("%w: %d bytes in pages of %d", ErrKeySize, n, w.m.PageSize))
	}
}

// emit adds the current entry, a version of w.key, to the run if a snapshot can see it, and else
// drops it.
func (w *worker) emit(old bool) {
	e := &w.entry
	t := e.Trailer
	if old {
		w.countOld(t, e.Value)
	}
	keep := !w.m.Policy.Expired.Has(w.key) && w.m.Policy.retains(&w.history, t.Epoch())
	if keep && t.Kind() == keys.KindDelete && w.history.done && !w.m.Policy.RetainTombstones && !w.continuesOnAvoidedPage() {
		// No snapshot is before the tombstone, and the older versions go too: here, or in the
		// leaves after this one (see Policy.past).
		keep = false
		w.stats.TombstonesDropped++
	}
	if !keep {
		w.stats.VersionsDropped++
		w.dropRef(e.Value, e.Large, old)
		if w.pack.covered.needed {
			w.pack.covered.drop(w.key, t, w.leaf.bound)
		}
		return
	}
	w.stats.Versions++
	w.stats.Bytes += int64(len(w.key) + w.inlineSize(e))
	if !w.countedNew && t.Kind() != keys.KindDelete {
		w.stats.CountKey(w.key, 1)
	}
	w.countedNew = true
	e.Key, e.Same = w.key, w.retained
	w.retained = true
	w.pack.add(e, old)
}

// continuesOnAvoidedPage reports whether an avoided page after this leaf may have older versions of
// the current key. They would stay there, and become visible again with the page if no tombstone
// hid them.
func (w *worker) continuesOnAvoidedPage() bool {
	return len(w.m.Avoid) > 0 && w.leaf.bound != nil && w.leaf.bound.Trailer != page.NoTrailer && bytes.Equal(w.leaf.bound.Key, w.key)
}

// inlineSize is how many bytes of an entry's value a leaf holds.
func (w *worker) inlineSize(e *page.Entry) int {
	if len(e.Value) > page.InlineMax(w.m.PageSize) {
		return metadata.Size(e.Trailer.Kind(), e.Value) + page.RefSize
	}
	return len(e.Value)
}

// countOld subtracts a version of the old tree from the counts; emit adds it again if it stays.
func (w *worker) countOld(t keys.Trailer, value []byte) {
	w.stats.Versions--
	w.stats.Bytes -= int64(len(w.key) + len(value))
	if !w.countedOld && t.Kind() != keys.KindDelete {
		w.stats.CountKey(w.key, -1)
	}
	w.countedOld = true
}

func (w *worker) dropRef(value []byte, large, old bool) {
	if large {
		d := droppedValue{page.RefOf(value), w.leaf.index}
		if !old {
			d.leaf = -1
		}
		w.dropped = append(w.dropped, d)
	}
}
