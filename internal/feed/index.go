package feed

import (
	"bytes"
	"slices"

	"github.com/google/btree"
)

// index finds the watches, live and lagging, of which a range may have a key of a commit. A range of one key is in a hash map. The others
// divide the keys into intervals, each with the ranges that cover it. A range is there once, however many watches have it. An interval has few of them:
// ranges that cover few intervals cannot differ in many ways. A watch of a range that covers many intervals is in none of them but in
// a list of its own: every commit is compared with it, which costs less than places in all intervals, and such a watch
// wants most commits anyway. The watches of a range are divided by the kinds and origins that they want: those that want none of a
// commit cost one comparison, however many they are. Otherwise they would keep the tailer, and so all other watches, from going on.
type index struct {
	exact     map[string]*indexRange
	intervals *btree.BTreeG[*interval] // by their lower bounds
	first     interval                 // before all of those, without ranges
	wide      indexRange               // the watches that have a wide range
	divided   []*indexRange            // whose number of intervals has become too large
	found     []*Watch
	most      int // that are to be found
	pass      uint64

	pivot interval // of a search
	at    *interval
}

// interval are the keys from lower up to the next interval.
type interval struct {
	lower          []byte
	previous, next *interval
	bounds         int // of ranges that begin or end at lower
	ranges         []*indexRange
}

// indexRange is a range in the index, with all watches that have it.
type indexRange struct {
	classes         []*indexClass
	from, to        *interval // that it covers, without the last; nil for a key, and for wide ranges
	intervals, most int32     // that it covers, and may cover
}

// indexClass are the watches of a range that want the same kinds and origins.
type indexClass struct {
	class
	of      *indexRange
	entries []*entry
	live    int // of these, the first ones, which are of live watches
}

// entry is a range of a watch in the index.
type entry struct {
	watch *Watch
	in    *indexClass
	place int // in its entries
}

// How many intervals a range may cover, and those of a watch together.
const (
	intervalsMax      = 64
	watchIntervalsMax = 16 * intervalsMax
)

// intervalsDegree is that of the tree of intervals.
const intervalsDegree = 32

func (x *index) init() {
	x.exact = map[string]*indexRange{}
	x.intervals = btree.NewG(intervalsDegree, func(a, b *interval) bool { return bytes.Compare(a.lower, b.lower) < 0 })
}

// add enters the ranges of a watch, which are apart from each other.
func (x *index) add(w *Watch) {
	most := int32(min(intervalsMax, max(1, watchIntervalsMax/len(w.ranges))))
	w.entries = make([]entry, 0, len(w.ranges))
	for _, r := range w.ranges {
		in := x.find(r, most)
		if in == nil {
			x.widen(w)
			return
		}
		x.enter(w, in)
	}
}

// enter gives a watch its next entry.
func (x *index) enter(w *Watch, r *indexRange) {
	in := r.classOf(w)
	w.entries = append(w.entries, entry{watch: w, in: in, place: len(in.entries)})
	e := &w.entries[len(w.entries)-1]
	if in.entries = append(in.entries, e); w.state == StateLive {
		in.promote(e)
	}
}

// classOf is the class of a watch, a new one if there is none.
func (r *indexRange) classOf(w *Watch) *indexClass {
	for _, in := range r.classes {
		if in.class == w.class {
			return in
		}
	}
	in := &indexClass{class: w.class, of: r}
	r.classes = append(r.classes, in)
	return in
}

// promote puts an entry among those of live watches, and demote among the others.
func (in *indexClass) promote(e *entry) {
	in.move(e, in.live)
	in.live++
}

func (in *indexClass) demote(e *entry) {
	in.live--
	in.move(e, in.live)
}

// move exchanges an entry with the one at a place.
func (in *indexClass) move(e *entry, to int) {
	other := in.entries[to]
	in.entries[e.place], in.entries[to] = other, e
	e.place, other.place = to, e.place
}

// promote says that a watch has become live, and demote that it is not any more: a commit that is offered to live watches costs nothing for
// the others. A watch that is not in the index stays so.
func (x *index) promote(w *Watch) {
	for i := range w.entries {
		w.entries[i].in.promote(&w.entries[i])
	}
}

func (x *index) demote(w *Watch) {
	for i := range w.entries {
		w.entries[i].in.demote(&w.entries[i])
	}
}

// widen compares every commit with a watch.
func (x *index) widen(w *Watch) {
	x.remove(w)
	w.entries = make([]entry, 0, 1)
	x.enter(w, &x.wide)
}

// find returns a range of the index that may cover as many intervals as a watch allows, a new one if there is none, and nil if it covers more.
func (x *index) find(r Range, most int32) *indexRange {
	if r.isPoint() {
		in := x.exact[string(r.Lower)]
		if in == nil {
			in = &indexRange{}
			x.exact[string(r.Lower)] = in
		}
		return in
	}
	from := x.locate(r.Lower)
	if bytes.Equal(from.lower, r.Lower) {
		for _, in := range from.ranges {
			if in.from == from && bytes.Equal(in.to.lower, r.Upper) {
				return in
			}
		}
	}
	covered := int32(1)
	for at := from.next; at != nil && bytes.Compare(at.lower, r.Upper) < 0; at = at.next {
		if covered++; covered > most {
			return nil
		}
	}
	in := &indexRange{most: most}
	x.cover(in, r)
	return in
}

// remove takes the ranges of a watch out. A watch that is not in the index stays so.
func (x *index) remove(w *Watch) {
	for i := range w.entries {
		e := &w.entries[i]
		in := e.in
		if e.place < in.live {
			in.demote(e)
		}
		in.entries = without(in.entries, e.place)
		if e.place < len(in.entries) {
			in.entries[e.place].place = e.place
		}
		r := in.of
		if len(in.entries) == 0 {
			r.classes = without(r.classes, slices.Index(r.classes, in))
		}
		switch {
		case len(r.classes) > 0 || r == &x.wide:
		case r.from != nil:
			x.uncover(r)
		default:
			delete(x.exact, string(w.ranges[i].Lower))
		}
	}
	w.entries = nil
}

// without is a list whose last element has the place of one that is taken out.
func without[E any](list []*E, i int) []*E {
	last := len(list) - 1
	list[i], list[last] = list[last], nil
	return fit(list[:last])
}

// listKept is the length of a list of which the room is kept, however few it has.
const listKept = 8

// fit gives back the room of a list that has become much shorter. It may stay in the index for long, and there may be very many.
func fit[E any](list []*E) []*E {
	if cap(list) <= max(listKept, 4*len(list)) {
		return list
	}
	return append(make([]*E, 0, 2*len(list)), list...)
}

// locate is the interval of a key.
func (x *index) locate(key []byte) *interval {
	x.at, x.pivot.lower = &x.first, key
	x.intervals.DescendLessOrEqual(&x.pivot, x.take)
	x.pivot.lower = nil
	return x.at
}

func (x *index) take(at *interval) bool {
	x.at = at
	return false
}

// cover enters a range into its intervals. The watches of ranges that cover too many after its bounds have divided some become wide.
func (x *index) cover(in *indexRange, r Range) {
	in.from, in.to = x.bound(r.Lower), x.bound(r.Upper)
	for at := in.from; at != in.to; at = at.next {
		at.ranges = append(at.ranges, in)
		in.intervals++
	}
	for _, other := range x.divided {
		for other.intervals > other.most && len(other.classes) > 0 {
			last := other.classes[len(other.classes)-1]
			x.widen(last.entries[len(last.entries)-1].watch)
		}
	}
	clear(x.divided)
	x.divided = x.divided[:0]
}

// bound makes a key the lower bound of an interval.
func (x *index) bound(key []byte) *interval {
	at := x.locate(key)
	if at == &x.first || !bytes.Equal(at.lower, key) {
		added := &interval{lower: key, previous: at, next: at.next, ranges: slices.Clone(at.ranges)}
		for _, in := range added.ranges {
			if in.intervals++; in.intervals > in.most {
				x.divided = append(x.divided, in)
			}
		}
		if at.next = added; added.next != nil {
			added.next.previous = added
		}
		x.intervals.ReplaceOrInsert(added)
		at = added
	}
	at.bounds++
	return at
}

// uncover takes a range out of its intervals, and unites those that its bounds alone divided.
func (x *index) uncover(in *indexRange) {
	for at := in.from; at != in.to; at = at.next {
		at.ranges = without(at.ranges, slices.Index(at.ranges, in))
	}
	x.unbound(in.from)
	x.unbound(in.to)
}

func (x *index) unbound(at *interval) {
	if at.bounds--; at.bounds > 0 {
		return
	}
	for _, in := range at.ranges { // they cover the interval before as well
		in.intervals--
	}
	if at.previous.next = at.next; at.next != nil {
		at.next.previous = at.previous
	}
	x.intervals.Delete(at)
}

// candidates are the watches that want the origin and a kind of a commit, and of which a range may have a key of it, each once; or the live ones
// among them. They are valid until the next call. It gives up, and reports false, when there are more than most.
func (x *index) candidates(c *Commit, live bool, most int) (found []*Watch, all bool) {
	x.pass++
	x.found, x.most = x.found[:0], most
	kinds := c.kinds()
	all = x.collect(&x.wide, c, kinds, live)
	at := &x.first // the keys ascend, and so do the intervals
	for i := 0; all && i < len(c.spans); i++ {
		key := c.key(i)
		if len(x.exact) > 0 {
			if in := x.exact[string(key)]; in != nil {
				all = x.collect(in, c, kinds, live)
			}
		}
		if at.next != nil && bytes.Compare(at.next.lower, key) <= 0 {
			at = x.locate(key)
			for _, in := range at.ranges {
				all = all && x.collect(in, c, kinds, live)
			}
		}
	}
	return x.found, all
}

// collect reports false when more were found than are wanted.
func (x *index) collect(r *indexRange, c *Commit, kinds Kinds, live bool) bool {
	for _, in := range r.classes {
		if !in.wants(c.Origin, kinds) {
			continue
		}
		list := in.entries
		if live {
			list = list[:in.live]
		}
		for _, e := range list {
			if w := e.watch; w.pass != x.pass {
				if len(x.found) == x.most {
					return false
				}
				w.pass = x.pass
				x.found = append(x.found, w)
			}
		}
	}
	return true
}
