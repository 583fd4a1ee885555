package feed

import (
	"bytes"
	"slices"
	"sort"
)

// index finds the watches, live and lagging, of which a range may have a key of a commit. A range of one key is in a hash map. The others
// divide the keys into intervals, each with the ranges that cover it. A range is there once, however many watches have it: an interval has few,
// as of those that cover few intervals few can differ. The watches of ranges over many intervals are in none of them but in
// a list of their own: every commit is compared with them, which costs less than places in all intervals, and such a range
// wants most commits anyway.
type index struct {
	exact     map[string]*indexRange
	intervals []interval // by their lower bounds; the last one ends all ranges
	wide      indexRange
	divided   []*indexRange // whose number of intervals has become too large
	found     []*Watch
	most      int // that are to be found
	pass      uint64
}

// interval are the keys from lower up to the next interval.
type interval struct {
	lower  []byte
	bounds int // of ranges that begin or end at lower
	ranges []*indexRange
}

// indexRange is a range in the index, with all watches that have it, or every range that is wide.
type indexRange struct {
	keys            Range // internal keys
	entries         []*entry
	intervals, most int32 // that it covers, and may cover
}

// entry is a range of a watch in the index.
type entry struct {
	watch *Watch
	in    *indexRange
	place int // in its entries
}

// How many intervals a range may cover, and those of a watch together.
const (
	intervalsMax      = 64
	watchIntervalsMax = 16 * intervalsMax
)

func (x *index) init() { x.exact = map[string]*indexRange{} }

// add enters the ranges of a watch, which are apart from each other.
func (x *index) add(w *Watch) {
	w.entries = make([]entry, len(w.ranges))
	for i, r := range w.ranges {
		e := &w.entries[i]
		e.watch = w
		x.find(r, int32(min(intervalsMax, max(1, watchIntervalsMax/len(w.ranges))))).enter(e)
	}
}

// find returns a range of the index that may cover as many intervals as a watch allows, a new one if there is none.
func (x *index) find(r Range, most int32) *indexRange {
	if r.isPoint() {
		in := x.exact[string(r.Lower)]
		if in == nil {
			in = &indexRange{keys: r}
			x.exact[string(r.Lower)] = in
		}
		return in
	}
	from := x.locate(r.Lower)
	if from < len(x.intervals) {
		for _, in := range x.intervals[from].ranges {
			if bytes.Equal(in.keys.Lower, r.Lower) && bytes.Equal(in.keys.Upper, r.Upper) {
				in.most = max(in.most, most)
				return in
			}
		}
	}
	if x.locate(r.Upper)-from >= int(most) {
		return &x.wide
	}
	in := &indexRange{keys: r, most: most}
	x.cover(in)
	return in
}

func (in *indexRange) enter(e *entry) {
	e.in, e.place = in, len(in.entries)
	in.entries = append(in.entries, e)
}

// remove takes the ranges of a watch out. A watch that is not in the index stays so.
func (x *index) remove(w *Watch) {
	for i := range w.entries {
		e := &w.entries[i]
		in := e.in
		in.entries = without(in.entries, e.place)
		if e.place < len(in.entries) {
			in.entries[e.place].place = e.place
		}
		switch {
		case len(in.entries) > 0 || in == &x.wide:
		case in.intervals > 0:
			x.uncover(in)
		default:
			delete(x.exact, string(in.keys.Lower))
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

// locate is the index of the first interval whose lower bound is not before a key.
func (x *index) locate(key []byte) int {
	return sort.Search(len(x.intervals), func(i int) bool { return bytes.Compare(x.intervals[i].lower, key) >= 0 })
}

// cover enters a range into its intervals. Ranges that cover too many after its bounds have divided some become wide.
func (x *index) cover(in *indexRange) {
	x.bound(in.keys.Lower)
	to := x.bound(in.keys.Upper)
	for i := x.locate(in.keys.Lower); i < to; i++ {
		x.intervals[i].ranges = append(x.intervals[i].ranges, in)
		in.intervals++
	}
	for _, other := range x.divided {
		if other.intervals > other.most { // and not one that is here twice
			x.uncover(other)
			for _, e := range other.entries {
				x.wide.enter(e)
			}
		}
	}
	clear(x.divided)
	x.divided = x.divided[:0]
}

// bound makes a key the lower bound of an interval, and returns its index.
func (x *index) bound(key []byte) int {
	i := x.locate(key)
	if i == len(x.intervals) || !bytes.Equal(x.intervals[i].lower, key) {
		added := interval{lower: key}
		if i > 0 {
			added.ranges = slices.Clone(x.intervals[i-1].ranges)
		}
		for _, in := range added.ranges {
			if in.intervals++; in.intervals > in.most {
				x.divided = append(x.divided, in)
			}
		}
		x.intervals = slices.Insert(x.intervals, i, added)
	}
	x.intervals[i].bounds++
	return i
}

// uncover takes a range out of its intervals, and unites those that its bounds alone divided.
func (x *index) uncover(in *indexRange) {
	for i := x.locate(in.keys.Lower); in.intervals > 0; i, in.intervals = i+1, in.intervals-1 {
		list := x.intervals[i].ranges
		x.intervals[i].ranges = without(list, slices.Index(list, in))
	}
	x.unbound(in.keys.Lower)
	x.unbound(in.keys.Upper)
}

func (x *index) unbound(key []byte) {
	i := x.locate(key)
	if x.intervals[i].bounds--; x.intervals[i].bounds > 0 {
		return
	}
	for _, in := range x.intervals[i].ranges { // they cover the interval before as well
		in.intervals--
	}
	x.intervals = slices.Delete(x.intervals, i, i+1)
}

// candidates are the watches of which a range may have a key of a commit, each once; valid until the next call. It gives up, and reports
// false, when there are more than most.
func (x *index) candidates(c *Commit, most int) (found []*Watch, all bool) {
	x.pass++
	x.found, x.most = x.found[:0], most
	all = x.collect(x.wide.entries)
	at, last := 0, -1 // the keys ascend, and so do the intervals
	for i := 0; all && i < len(c.spans); i++ {
		key := c.key(i)
		if len(x.exact) > 0 {
			if in := x.exact[string(key)]; in != nil {
				all = x.collect(in.entries)
			}
		}
		if at < len(x.intervals) && bytes.Compare(x.intervals[at].lower, key) <= 0 {
			rest := x.intervals[at:]
			at += sort.Search(len(rest), func(i int) bool { return bytes.Compare(rest[i].lower, key) > 0 })
			if at--; at != last {
				for _, in := range x.intervals[at].ranges {
					all = all && x.collect(in.entries)
				}
				last = at
			}
		}
	}
	return x.found, all
}

// collect reports false when more were found than are wanted.
func (x *index) collect(list []*entry) bool {
	for _, e := range list {
		if w := e.watch; w.pass != x.pass {
			if len(x.found) == x.most {
				return false
			}
			w.pass = x.pass
			x.found = append(x.found, w)
		}
	}
	return true
}
