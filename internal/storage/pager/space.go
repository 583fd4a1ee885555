package pager

import (
	"fmt"
	"maps"
	"slices"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Extent is a run of neighbouring pages.
type Extent struct {
	First page.ID
	Count int
}

// runPreferred is the run length below which free pages are used only if there are no longer runs before
// the end of the file. Runs of eight are written at nearly the speed of long ones. If every hole were
// taken first, each write would be a separate request.
const runPreferred = 8

// space knows which pages are live, pending, taken and free. It does no I/O.
//
//	free --take--> taken --makeLive--> live --freeLive, addPending--> pending --freePending--> free
//	       <-giveBack-    <-freePage-       <-------unfree-----
//
// Invariant, between checkpoints: busy is the disjoint union of live and pending, and taken is empty.
// During a checkpoint busy also contains taken, and the live pages that the checkpoint has freed. The
// superblocks count as live. Page generations are disjoint parts of live.
type space struct {
	busy            bitset.Set
	live            bitset.Set
	taken           bitset.Set
	pageGenerations []pageGeneration // ascending; at most one more than pinned checkpoints
	pending         []pendingPages   // ascending by checkpoint
	unsorted        []unsortedPages  // pending, too, and after them; not yet divided by page generation

	// from[n] is a lower bound for searches: no free run of n pages begins below it. longer has it for longer runs,
	// until a page becomes free; what is not more than that of a shorter run is left out. Between two calls of
	// freePending the bounds only rise, so that the searches of one checkpoint pass over the bitmap once for each
	// length.
	from   [runPreferred + 1]int
	longer map[int]int

	// dirtyWords is the words of live that changed since the map was last written.
	dirtyWords bitset.Set

	broken error // the first invariant that was found broken
}

// pendingPages is what one checkpoint freed of one page generation. The states after allocatedAfter and
// before checkpoint reach these pages.
type pendingPages struct {
	allocatedAfter, checkpoint uint64
	pages                      []page.ID
}

// unsortedPages is what one checkpoint freed.
type unsortedPages struct {
	checkpoint uint64
	pages      []page.ID
}

// pageGeneration is the live pages that were written between two pinned checkpoints; the first of them is
// after. Pages that are in no generation are older than every pinned checkpoint.
type pageGeneration struct {
	after uint64
	pages bitset.Set
}

// newSpace is the space of a state with these live pages.
func newSpace(live *bitset.Set) *space {
	s := &space{live: *live}
	for i := range live.Len() / 64 {
		s.busy.SetWord(i, live.Word(i))
	}
	return s
}

// end is the first page after all live, pending and taken pages.
func (s *space) end() page.ID { return endOf(&s.busy) }

// liveEnd is the first page after all live pages: the page count of the state under construction.
func (s *space) liveEnd() page.ID { return endOf(&s.live) }

// takeUpTo takes the lowest free run, cut to n pages. If n is large enough, runs of fewer than
// runPreferred pages come last. The end of the file comes after all holes.
func (s *space) takeUpTo(n int) Extent {
	if n >= runPreferred {
		if e, ok := s.takeHole(n, runPreferred); ok {
			return e
		}
	}
	if e, ok := s.takeHole(n, 1); ok {
		return e
	}
	return s.takeEnd(n)
}

// takePieces takes n pages in one run if there is such a hole. Otherwise it takes few pieces, each of at
// least an eighth of n, except perhaps the last.
func (s *space) takePieces(n int) []Extent {
	if e, ok := s.takeHole(n, n); ok {
		return []Extent{e}
	}
	var pieces []Extent
	for least := (n + 7) / 8; n > 0; {
		e, ok := s.takeHole(n, min(n, least))
		if !ok {
			e = s.takeEnd(n)
		}
		pieces = append(pieces, e)
		n -= e.Count
	}
	return pieces
}

// takeHole takes up to n pages of the lowest run of at least least pages before the end of the busy pages.
func (s *space) takeHole(n, least int) (Extent, bool) {
	end := int(s.end())
	first, ok := s.busy.Run(s.lowest(least), least, end)
	if !ok {
		s.advance(least, end)
		return Extent{}, false
	}
	e := Extent{page.ID(first), min(n, s.busy.Next(first)-first)}
	s.take(e)
	s.advance(least, first)
	return e, true
}

// lowest is the page below which no free run of least pages begins: a run of least pages is a run of fewer, too.
func (s *space) lowest(least int) (from int) {
	for _, f := range s.from[:min(least, runPreferred)+1] {
		from = max(from, f)
	}
	for n, f := range s.longer {
		if n <= least {
			from = max(from, f)
		}
	}
	return from
}

// freeFrom is the lowest free page at or after home.
func (s *space) freeFrom(home page.ID) page.ID {
	return page.ID(s.busy.NextAbsent(max(int(home), s.lowest(1))))
}

// takeFrom takes the lowest free page at or after home.
func (s *space) takeFrom(home page.ID) page.ID {
	id := s.freeFrom(home)
	s.take(Extent{id, 1})
	return id
}

func (s *space) takeEnd(n int) Extent {
	e := Extent{s.end(), n}
	s.take(e)
	return e
}

// advance raises a lower bound after a search for runs of n found none below from.
func (s *space) advance(n, from int) {
	if n <= runPreferred {
		s.from[n] = max(s.from[n], from)
		return
	}
	if s.longer == nil {
		s.longer = map[int]int{}
	}
	maps.DeleteFunc(s.longer, func(m, f int) bool { return m >= n && f <= from })
	s.longer[n] = from
}

func (s *space) take(e Extent) {
	for i := int(e.First); i < int(e.First)+e.Count; i++ {
		if !s.busy.Add(i) || !s.taken.Add(i) || s.live.Has(i) {
			s.noteBroken("page %d is taken but was not free", i)
		}
	}
}

// giveBack frees pages that were taken and not used.
func (s *space) giveBack(e Extent) {
	for i := int(e.First); i < int(e.First)+e.Count; i++ {
		if s.taken.Remove(i) {
			s.free(i)
		}
	}
}

func (s *space) free(i int) {
	if !s.busy.Remove(i) || s.live.Has(i) {
		s.noteBroken("page %d becomes free but was free or live", i)
	}
	for n := range s.from { // the page may complete a run that begins before it
		s.from[n] = min(s.from[n], max(0, i-n+1))
	}
	clear(s.longer)
}

// makeLive makes a taken page live.
func (s *space) makeLive(id page.ID) error {
	i := int(id)
	if !s.taken.Remove(i) || !s.live.Add(i) {
		return fmt.Errorf("page %d becomes live but was not taken", id)
	}
	s.noteAllocated(i)
	s.dirtyWords.Add(i / 64)
	return nil
}

// freeLive ends the life of a live page. The page stays busy.
func (s *space) freeLive(id page.ID) error {
	i := int(id)
	if i < superblocks || !s.live.Remove(i) {
		return fmt.Errorf("page %d is freed but not live", id)
	}
	s.dirtyWords.Add(i / 64)
	return nil
}

// unfree undoes freeLive, and freePage undoes take and makeLive, when a checkpoint is aborted.
func (s *space) unfree(id page.ID) {
	s.live.Add(int(id))
	s.dirtyWords.Add(int(id) / 64)
}

func (s *space) freePage(id page.ID) {
	s.removeFromGeneration(int(id))
	if s.live.Remove(int(id)) {
		s.dirtyWords.Add(int(id) / 64)
	}
	s.free(int(id))
}

// startGeneration begins a page generation: pages written from now on are no part of checkpoint n.
func (s *space) startGeneration(n uint64) {
	s.pageGenerations = append(s.pageGenerations, pageGeneration{after: n})
}

func (s *space) noteAllocated(i int) {
	if n := len(s.pageGenerations); n > 0 {
		s.pageGenerations[n-1].pages.Add(i)
	}
}

// removeFromGeneration removes a page from its generation, and returns the pinned checkpoint after which
// it was allocated; zero if it is older than all of them.
func (s *space) removeFromGeneration(i int) (allocatedAfter uint64) {
	for n := len(s.pageGenerations) - 1; n >= 0; n-- {
		if s.pageGenerations[n].pages.Remove(i) {
			return s.pageGenerations[n].after
		}
	}
	return 0
}

// addPending makes the pages that a checkpoint freed pending, until their readers are gone. It takes the
// slice, and leaves the work for each page to sortPending, because commits may wait for the end of the
// checkpoint.
func (s *space) addPending(checkpoint uint64, freed []page.ID) {
	s.unsorted = append(s.unsorted, unsortedPages{checkpoint, freed})
}

// sortPending divides pending pages by their page generations. A generation that began after they were
// freed has none of them.
func (s *space) sortPending() {
	for _, u := range s.unsorted {
		first := len(s.pending)
		for _, id := range u.pages {
			s.sortPage(first, u.checkpoint, id)
		}
	}
	s.unsorted = nil
}

// sortPage adds a page to the pending pages of its checkpoint, which begin at first.
func (s *space) sortPage(first int, checkpoint uint64, id page.ID) {
	if !s.busy.Has(int(id)) || s.live.Has(int(id)) {
		s.noteBroken("page %d becomes pending but was free or live", id)
	}
	after := s.removeFromGeneration(int(id))
	at := first
	for at < len(s.pending) && s.pending[at].allocatedAfter != after {
		at++
	}
	if at == len(s.pending) {
		s.pending = append(s.pending, pendingPages{allocatedAfter: after, checkpoint: checkpoint})
	}
	s.pending[at].pages = append(s.pending[at].pages, id)
}

// freePending frees what checkpoints up to n freed, and what checkpoints up to r.readers freed and no
// pinned checkpoint reaches. It calls each for every page.
func (s *space) freePending(n uint64, r *reuse, each func(page.ID)) {
	s.sortPending()
	kept := s.pending[:0]
	for _, p := range s.pending {
		if p.checkpoint > n && (p.checkpoint > r.readers || r.reachedByPinned(&p)) {
			kept = append(kept, p)
			continue
		}
		for _, id := range p.pages {
			s.free(int(id))
			if each != nil {
				each(id)
			}
		}
	}
	clear(s.pending[len(kept):])
	s.pending = kept
	s.mergePageGenerations(r)
	s.busy.Trim()
	s.live.Trim()
}

// mergePageGenerations merges generations whose boundary is no pinned checkpoint any more.
func (s *space) mergePageGenerations(r *reuse) {
	for i := len(s.pageGenerations) - 1; i >= 0; i-- {
		c := &s.pageGenerations[i]
		if slices.Contains(r.pinned, c.after) {
			continue
		}
		if i > 0 { // otherwise they are older than every pinned checkpoint
			into := &s.pageGenerations[i-1].pages
			for m := c.pages.Next(0); m < c.pages.Len(); m = c.pages.Next(m + 1) {
				into.Add(m)
			}
		}
		s.pageGenerations = slices.Delete(s.pageGenerations, i, i+1)
	}
}

func (s *space) pendingCount() (n int) {
	for _, p := range s.pending {
		n += len(p.pages)
	}
	for _, u := range s.unsorted {
		n += len(u.pages)
	}
	return n
}

// reuse says which states have readers.
type reuse struct {
	readers uint64   // no reader holds a root older than this checkpoint
	pinned  []uint64 // the pinned checkpoints
}

// reachedByPinned reports whether a pinned checkpoint may reach these pages.
func (r *reuse) reachedByPinned(p *pendingPages) bool {
	return slices.ContainsFunc(r.pinned, func(n uint64) bool { return p.allocatedAfter < n && n < p.checkpoint })
}

// audit checks the invariant between checkpoints.
func (s *space) audit() error {
	s.sortPending()
	var pending bitset.Set
	for _, p := range s.pending {
		for _, id := range p.pages {
			if !pending.Add(int(id)) {
				return fmt.Errorf("page %d is pending twice", id)
			}
		}
	}
	n, young := max(s.busy.Len(), s.live.Len(), s.taken.Len(), pending.Len()), bitset.Set{}
	for i := range s.pageGenerations {
		c := &s.pageGenerations[i].pages
		n = max(n, c.Len())
		for m := c.Next(0); m < c.Len(); m = c.Next(m + 1) {
			if !young.Add(m) {
				return fmt.Errorf("page %d is in two page generations", m)
			}
		}
	}
	n /= 64
	for i := range n {
		b, l, t, p := s.busy.Word(i), s.live.Word(i), s.taken.Word(i), pending.Word(i)
		if dead := young.Word(i) &^ l; dead != 0 {
			return fmt.Errorf("pages %d.. are in a page generation and not live: %#x", i*64, dead)
		}
		if l&t|l&p|t&p != 0 {
			return fmt.Errorf("pages %d.. are in two sets: live %#x, taken %#x, pending %#x", i*64, l, t, p)
		}
		if b != l|t|p {
			return fmt.Errorf("pages %d.. are in no set or in a wrong one: busy %#x, live %#x, taken %#x, pending %#x", i*64, b, l, t, p)
		}
	}
	return nil
}
