package pager

import (
	"fmt"

	"epochkv/internal/storage/page"
	"epochkv/internal/storage/pager/bitset"
)

// Extent is a run of neighbouring pages.
type Extent struct {
	First page.ID
	Count int
}

// runPreferred is the run length below which free pages are used only when there are no longer ones before the end of the file.
// Runs of eight are written at nearly the speed of long ones; taking every hole first would turn each write into one of its own.
const runPreferred = 8

// space knows which pages are live, pending, taken and free. It does no I/O.
//
// Invariant: busy is the disjoint union of live, pending, passing, taken, and the superblocks (which count as live); young is part of live.
type space struct {
	busy    bitset.Set
	live    bitset.Set
	taken   bitset.Set
	young   bitset.Set     // live since the last Freeze: no frozen state reaches them
	pending []pendingPages // ascending by checkpoint
	passing []pendingPages // those that were young: they wait for readers of older roots, and not for frozen states

	// from[n] is a lower bound for searches: no free run of n pages begins below it, the last standing for all longer ones. Bounds
	// only move up between two releases, so that the searches of one checkpoint walk the bitmap once for each length.
	from [runPreferred + 1]int

	// dirtyWords is the words of live that changed since the map was last written, for the map's leaves.
	dirtyWords bitset.Set
}

// pendingPages is what one checkpoint freed.
type pendingPages struct {
	checkpoint uint64
	pages      []page.ID
}

func newSpace() *space {
	s := &space{}
	for id := range superblocks {
		s.busy.Add(id)
		s.live.Add(id)
	}
	return s
}

// loadWord sets 64 live pages from the stored map.
func (s *space) loadWord(i int, word uint64) {
	if i == 0 {
		word |= 1<<superblocks - 1
	}
	s.live.SetWord(i, word)
	s.busy.SetWord(i, word)
}

// end is the first page behind all that is live, pending or taken.
func (s *space) end() page.ID { return page.ID(s.busy.Last(s.busy.Len()) + 1) }

// liveEnd is the first page behind all that is live: the page count of the state that is being built.
func (s *space) liveEnd() page.ID { return page.ID(s.live.Last(s.live.Len()) + 1) }

// takeUpTo takes the lowest free run, cut to n pages. If n is large enough, runs of fewer than runPreferred pages come last. The end
// of the file comes after all.
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

// takePieces takes n pages in one run if there is such a hole, else in few pieces, each at least an eighth of n but perhaps the last.
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

// takeHole takes up to n pages of the lowest run of at least least pages before the end of what is in use.
func (s *space) takeHole(n, least int) (Extent, bool) {
	from := 0
	for _, f := range s.from[:min(least, runPreferred)+1] {
		from = max(from, f) // a run of least pages is a run of fewer, too
	}
	end := int(s.end())
	first, ok := s.busy.Run(from, least, end)
	if !ok {
		s.advance(least, end)
		return Extent{}, false
	}
	e := Extent{page.ID(first), min(n, s.busy.Next(first)-first)}
	s.take(e)
	s.advance(least, first)
	return e, true
}

func (s *space) takeEnd(n int) Extent {
	e := Extent{s.end(), n}
	s.take(e)
	return e
}

// advance raises a lower bound after a search for runs of n found none below from. Of longer runs than the last bound stands for
// it says nothing.
func (s *space) advance(n, from int) {
	if n <= runPreferred {
		s.from[n] = max(s.from[n], from)
	}
}

func (s *space) take(e Extent) {
	for i := int(e.First); i < int(e.First)+e.Count; i++ {
		s.busy.Add(i)
		s.taken.Add(i)
	}
}

// giveBack returns pages that were taken and not used.
func (s *space) giveBack(e Extent) {
	for i := int(e.First); i < int(e.First)+e.Count; i++ {
		if s.taken.Remove(i) {
			s.free(i)
		}
	}
}

func (s *space) free(i int) {
	s.busy.Remove(i)
	for n := range s.from { // the page may complete a run that begins before it
		s.from[n] = min(s.from[n], max(0, i-n+1))
	}
}

// enliven makes a taken page live.
func (s *space) enliven(id page.ID) error {
	i := int(id)
	if !s.taken.Remove(i) || !s.live.Add(i) {
		return fmt.Errorf("page %d becomes live without having been taken", id)
	}
	s.young.Add(i)
	s.dirtyWords.Add(i / 64)
	return nil
}

// deaden ends a live page's life; it stays busy.
func (s *space) deaden(id page.ID) error {
	i := int(id)
	if i < superblocks || !s.live.Remove(i) {
		return fmt.Errorf("page %d is freed but not live", id)
	}
	s.dirtyWords.Add(i / 64)
	return nil
}

// revive undoes deaden, and drop undoes take and enliven, when a checkpoint is given up.
func (s *space) revive(id page.ID) {
	s.live.Add(int(id))
	s.dirtyWords.Add(int(id) / 64)
}

func (s *space) drop(id page.ID) {
	s.young.Remove(int(id))
	if s.live.Remove(int(id)) {
		s.dirtyWords.Add(int(id) / 64)
	}
	s.free(int(id))
}

// settle lets the pages that a checkpoint freed wait for those who may still read them.
func (s *space) settle(checkpoint uint64, freed []page.ID) {
	old, young := pendingPages{checkpoint: checkpoint}, pendingPages{checkpoint: checkpoint}
	for _, id := range freed {
		if s.young.Remove(int(id)) {
			young.pages = append(young.pages, id)
		} else {
			old.pages = append(old.pages, id)
		}
	}
	s.pending, s.passing = append(s.pending, old), append(s.passing, young)
}

// release frees what checkpoints through n freed, and those of the young pages that checkpoints through young freed, and calls each for every page.
func (s *space) release(n, young uint64, each func(page.ID)) {
	s.pending = s.releaseFrom(s.pending, n, each)
	s.passing = s.releaseFrom(s.passing, max(n, young), each)
	s.busy.Trim()
	s.live.Trim()
}

func (s *space) releaseFrom(list []pendingPages, n uint64, each func(page.ID)) []pendingPages {
	done := 0
	for _, p := range list {
		if p.checkpoint > n {
			break
		}
		for _, id := range p.pages {
			s.free(int(id))
			if each != nil {
				each(id)
			}
		}
		done++
	}
	return append(list[:0], list[done:]...)
}

func (s *space) pendingCount() (n int) {
	for _, list := range [][]pendingPages{s.pending, s.passing} {
		for _, p := range list {
			n += len(p.pages)
		}
	}
	return n
}

// audit checks the invariant.
func (s *space) audit() error {
	var pending bitset.Set
	for _, list := range [][]pendingPages{s.pending, s.passing} {
		for _, p := range list {
			for _, id := range p.pages {
				if !pending.Add(int(id)) {
					return fmt.Errorf("page %d is pending twice", id)
				}
			}
		}
	}
	n := max(s.busy.Len(), s.live.Len(), s.taken.Len(), s.young.Len(), pending.Len()) / 64
	for i := range n {
		b, l, t, p := s.busy.Word(i), s.live.Word(i), s.taken.Word(i), pending.Word(i)
		if dead := s.young.Word(i) &^ l; dead != 0 {
			return fmt.Errorf("pages %d.. are young and not live: %#x", i*64, dead)
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
