package feed

import (
	"bytes"
	"slices"
	"sort"
)

// index finds the watches, live and lagging, of which a range may have a key of a commit. A range of one key is in a hash map. The others
// divide the keys into intervals, each with the ranges that cover it. A range over many intervals is in none of them but in
// a list of its own: every commit is compared with it, which costs less than entries in all intervals, and such a range
// wants most commits anyway.
type index struct {
	exact     map[string][]*entry
	intervals []interval // by their lower bounds; the last one ends all ranges
	wide      []*entry
	divided   []*entry // whose number of intervals has become too large
	found     []*Watch
	most      int // that are to be found
	pass      uint64
}

// interval are the keys from lower up to the next interval.
type interval struct {
	lower  []byte
	bounds int // of ranges that begin or end at lower
	ranges []*entry
}

// entry is a range of a watch in the index.
type entry struct {
	watch     *Watch
	keys      Range // internal keys
	intervals int   // that it covers; zero in the other lists
	wide      bool
}

// intervalsMax is how many intervals a range may cover.
const intervalsMax = 64

func (x *index) init() { x.exact = map[string][]*entry{} }

// add enters the ranges of a watch, which are apart from each other.
func (x *index) add(w *Watch) {
	w.entries = make([]entry, len(w.ranges))
	for i, r := range w.ranges {
		e := &w.entries[i]
		e.watch, e.keys = w, r
		switch {
		case r.isPoint():
			x.exact[string(r.Lower)] = append(x.exact[string(r.Lower)], e)
		case x.locate(r.Upper)-x.locate(r.Lower) > intervalsMax:
			x.widen(e)
		default:
			x.cover(e)
		}
	}
}

// remove takes the ranges of a watch out. A watch that is not in the index stays so.
func (x *index) remove(w *Watch) {
	for i := range w.entries {
		e := &w.entries[i]
		switch {
		case e.wide:
			x.wide = without(x.wide, e)
		case e.intervals > 0:
			x.uncover(e)
		default:
			key := string(e.keys.Lower)
			if x.exact[key] = without(x.exact[key], e); len(x.exact[key]) == 0 {
				delete(x.exact, key)
			}
		}
	}
	w.entries = nil
}

func without(list []*entry, e *entry) []*entry {
	i := slices.Index(list, e)
	last := len(list) - 1
	list[i], list[last] = list[last], nil
	return fit(list[:last])
}

// listKept is the length of a list of which the room is kept, however few ranges it has.
const listKept = 8

// fit gives back the room of a list that has become much shorter. It may stay in the index for long, and there may be very many.
func fit(list []*entry) []*entry {
	if cap(list) <= max(listKept, 4*len(list)) {
		return list
	}
	return append(make([]*entry, 0, 2*len(list)), list...)
}

func (x *index) widen(e *entry) {
	e.intervals, e.wide = 0, true
	x.wide = append(x.wide, e)
}

// locate is the index of the first interval whose lower bound is not before a key.
func (x *index) locate(key []byte) int {
	return sort.Search(len(x.intervals), func(i int) bool { return bytes.Compare(x.intervals[i].lower, key) >= 0 })
}

// cover enters a range into its intervals. Ranges that cover too many after its bounds have divided some become wide.
func (x *index) cover(e *entry) {
	x.bound(e.keys.Lower)
	to := x.bound(e.keys.Upper)
	for i := x.locate(e.keys.Lower); i < to; i++ {
		x.intervals[i].ranges = append(x.intervals[i].ranges, e)
		e.intervals++
	}
	if len(x.divided) > 0 {
		x.widenDivided()
	}
}

// widenDivided makes the ranges wide that cover too many intervals, all of them in one pass over their intervals: very many may be one range.
func (x *index) widenDivided() {
	from, to, list := len(x.intervals), 0, x.divided[:0]
	for _, e := range x.divided {
		if e.intervals > intervalsMax { // and not one that is here twice
			from, to = min(from, x.locate(e.keys.Lower)), max(to, x.locate(e.keys.Upper))
			x.widen(e)
			list = append(list, e)
		}
	}
	for i := from; i < to; i++ {
		x.intervals[i].ranges = fit(slices.DeleteFunc(x.intervals[i].ranges, func(e *entry) bool { return e.wide }))
	}
	for _, e := range list {
		x.unbound(e.keys.Lower)
		x.unbound(e.keys.Upper)
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
		for _, e := range added.ranges {
			if e.intervals++; e.intervals > intervalsMax {
				x.divided = append(x.divided, e)
			}
		}
		x.intervals = slices.Insert(x.intervals, i, added)
	}
	x.intervals[i].bounds++
	return i
}

// uncover takes a range out of its intervals, and unites those that its bounds alone divided.
func (x *index) uncover(e *entry) {
	for i := x.locate(e.keys.Lower); e.intervals > 0; i, e.intervals = i+1, e.intervals-1 {
		x.intervals[i].ranges = without(x.intervals[i].ranges, e)
	}
	x.unbound(e.keys.Lower)
	x.unbound(e.keys.Upper)
}

func (x *index) unbound(key []byte) {
	i := x.locate(key)
	if x.intervals[i].bounds--; x.intervals[i].bounds > 0 {
		return
	}
	for _, e := range x.intervals[i].ranges { // they cover the interval before as well
		e.intervals--
	}
	x.intervals = slices.Delete(x.intervals, i, i+1)
}

// candidates are the watches of which a range may have a key of a commit, each once; valid until the next call. It gives up, and reports
// false, when there are more than most.
func (x *index) candidates(c *Commit, most int) (found []*Watch, all bool) {
	x.pass++
	x.found, x.most = x.found[:0], most
	all = x.collect(x.wide)
	at, last := 0, -1 // the keys ascend, and so do the intervals
	for i := 0; all && i < len(c.spans); i++ {
		key := c.key(i)
		if len(x.exact) > 0 {
			all = x.collect(x.exact[string(key)])
		}
		if at < len(x.intervals) && bytes.Compare(x.intervals[at].lower, key) <= 0 {
			rest := x.intervals[at:]
			at += sort.Search(len(rest), func(i int) bool { return bytes.Compare(rest[i].lower, key) > 0 })
			if at--; at != last {
				all = all && x.collect(x.intervals[at].ranges)
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
