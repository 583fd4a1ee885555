package pager

import "epochkv/internal/storage/page"

// Lanes are allocations that do not depend on each other: each of several parts of a checkpoint's work takes pages from its own,
// and gets the same ones whatever the others do and when. So one worker or many write the same bytes to the same pages.
//
// A lane is promised the number of pages that its part is expected to need, from the lowest free extents. A part that needs more goes on
// in extents behind the end of the file that are its own by arithmetic: the lanes' extents alternate there. What no lane used returns
// when the lanes end.
type Lane struct {
	ck   *Checkpoint
	runs []Extent // promised, not yet begun
	run  Extent   // what is left of the one in use
	next page.ID  // where the lane goes on when its promise is used up
	step page.ID  // from one of its extents there to the next
}

// laneExtent is the pages that a lane takes at once when its promise is used up. Holes that it leaves are at most as long.
const laneExtent = 32

// Lanes starts one lane for each entry of expected. Until EndLanes, pages are taken from lanes alone.
func (ck *Checkpoint) Lanes(expected []int) []*Lane {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	ck.noLanes()
	ck.lanes = true
	lanes := make([]*Lane, len(expected))
	for i, n := range expected {
		lanes[i] = &Lane{ck: ck, step: page.ID(len(expected) * laneExtent)}
		for n > 0 {
			e := ck.p.space.takeUpTo(n)
			ck.taken = append(ck.taken, e)
			lanes[i].runs = append(lanes[i].runs, e)
			n -= e.Count
		}
	}
	end := ck.p.space.end()
	for i, l := range lanes {
		l.next = end + page.ID(i*laneExtent)
	}
	return lanes
}

// Take takes the lane's next page. A lane is for one goroutine.
func (l *Lane) Take() page.ID {
	if l.run.Count == 0 {
		l.run = l.nextRun()
	}
	id := l.run.First
	l.run = Extent{id + 1, l.run.Count - 1}
	return id
}

func (l *Lane) nextRun() Extent {
	if len(l.runs) > 0 {
		e := l.runs[0]
		l.runs = l.runs[1:]
		return e
	}
	e := Extent{l.next, laneExtent}
	l.next += l.step
	l.ck.mu.Lock()
	defer l.ck.mu.Unlock()
	l.ck.p.space.take(e)
	l.ck.taken = append(l.ck.taken, e)
	return e
}

// EndLanes ends the lanes and returns what they did not use.
func (ck *Checkpoint) EndLanes(lanes []*Lane) {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	ck.lanes = false
	for _, l := range lanes {
		ck.p.space.giveBack(l.run)
		for _, e := range l.runs {
			ck.p.space.giveBack(e)
		}
		l.run, l.runs, l.ck = Extent{}, nil, nil
	}
}

// noLanes panics when pages are taken past open lanes: they might be a lane's own by arithmetic.
func (ck *Checkpoint) noLanes() {
	if ck.lanes {
		panic("pager: pages taken past open lanes")
	}
}
