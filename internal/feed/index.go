package feed

import "slices"

// index finds the watches, live and lagging, of which a range may have a key of a commit. A range of one key is in a hash map, all others in
// trees. A range is there once, however many watches have it. Watches are divided by the kinds and origins that they want: those that want
// none of a commit cost one comparison, however many they are, and whatever their ranges. Otherwise they would keep the tailer, and so all
// other watches, from going on. For the same reason a range that has no key of a commit is not looked at, or few of them are.
//
// Watches that want bulk loads only are not in it: of a bulk load, which is rare, all watches are asked.
type index struct {
	points map[string][]*holders
	trees  []*tree // one for each class

	search
}

// search is what the index is asked for, and has found.
type search struct {
	commit *Commit
	live   bool
	found  []*Watch
	most   int // that are to be found
	pass   uint64
	looked int // ranges of trees that were looked at
}

// holders are the watches of a range that want the same kinds and origins.
type holders struct {
	class
	node    *node // nil for a range of one key
	entries []*entry
	live    int // of these, the first ones, which are of live watches
}

// entry is a range of a watch in the index.
type entry struct {
	watch *Watch
	in    *holders
	place int // in its entries
}

func (x *index) init() { x.points = map[string][]*holders{} }

// add enters the ranges of a watch, which are apart from each other.
func (x *index) add(w *Watch) {
	wanted := class{w.kinds & kindOperations, w.origins}
	if wanted.kinds == 0 {
		return
	}
	w.entries = make([]entry, len(w.ranges))
	for i, r := range w.ranges {
		var in *holders
		if r.isPoint() {
			in = x.point(r.Lower, wanted)
		} else {
			in = &x.tree(wanted).node(r).holders
		}
		e := &w.entries[i]
		*e = entry{watch: w, in: in, place: len(in.entries)}
		if in.entries = append(in.entries, e); w.state == StateLive {
			in.promote(e)
		}
	}
}

// point is the place of the watches of a key, a new one if there is none, and tree the tree of a class.
func (x *index) point(key []byte, wanted class) *holders {
	all := x.points[string(key)]
	for _, in := range all {
		if in.class == wanted {
			return in
		}
	}
	in := &holders{class: wanted}
	x.points[string(key)] = append(all, in)
	return in
}

func (x *index) tree(wanted class) *tree {
	for _, t := range x.trees {
		if t.class == wanted {
			return t
		}
	}
	t := &tree{class: wanted}
	x.trees = append(x.trees, t)
	return t
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

// promote puts an entry among those of live watches, and demote among the others.
func (in *holders) promote(e *entry) {
	in.move(e, in.live)
	if in.live++; in.live == 1 && in.node != nil {
		in.node.promote()
	}
}

func (in *holders) demote(e *entry) {
	in.live--
	if in.move(e, in.live); in.live == 0 && in.node != nil {
		in.node.demote()
	}
}

// move exchanges an entry with the one at a place.
func (in *holders) move(e *entry, to int) {
	other := in.entries[to]
	in.entries[e.place], in.entries[to] = other, e
	e.place, other.place = to, e.place
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
		switch {
		case len(in.entries) > 0:
		case in.node != nil:
			x.removeNode(in.node)
		default:
			x.removePoint(w.ranges[i].Lower, in)
		}
	}
	w.entries = nil
}

func (x *index) removePoint(key []byte, in *holders) {
	all := x.points[string(key)]
	if len(all) == 1 {
		delete(x.points, string(key))
		return
	}
	x.points[string(key)] = without(all, slices.Index(all, in))
}

func (x *index) removeNode(n *node) {
	t := x.tree(n.class)
	if t.remove(n); t.root == nil {
		x.trees = without(x.trees, slices.Index(x.trees, t))
	}
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

// candidates are the watches that want the origin and a kind of a commit, and of which a range may have a key of it, each once; or the live ones
// among them. They are valid until the next call. It gives up, and reports false, when there are more than most.
func (x *index) candidates(c *Commit, live bool, most int) (found []*Watch, all bool) {
	s := &x.search
	s.commit, s.live, s.most, s.found, s.looked = c, live, most, s.found[:0], 0
	s.pass++
	kinds := c.kinds()
	all = true
	for i := 0; all && i < len(x.trees); i++ {
		if t := x.trees[i]; t.wants(c.Origin, kinds) {
			all = s.collectBelow(t.root, 0, len(c.spans), c.key(0))
		}
	}
	for i := 0; all && i < len(c.spans) && len(x.points) > 0; i++ {
		for _, in := range x.points[string(c.key(i))] {
			all = all && (!in.wants(c.Origin, kinds) || s.collect(in))
		}
	}
	s.commit = nil
	return s.found, all
}

// collect reports false when more were found than are wanted.
func (s *search) collect(in *holders) bool {
	list := in.entries
	if s.live {
		list = list[:in.live]
	}
	for _, e := range list {
		if w := e.watch; w.pass != s.pass {
			if len(s.found) == s.most {
				return false
			}
			w.pass = s.pass
			s.found = append(s.found, w)
		}
	}
	return true
}
