package memtable

import (
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// An insert of a random key waits for three cache misses, one after the other: the key's bucket of the
// index, the tower that is responsible for it, and that tower's block. The keys of a batch are known
// before, so Apply takes the operations of a batch in windows that go through three stages:
//
//	announce   hash the keys and search the guide; prefetch buckets and towers
//	locate     step from the guide's towers to the responsible ones; prefetch blocks and nodes
//	insert
//
// While one window is inserted, the next one is located and the one after that is announced, so the lines
// of a window have the time of a whole window to arrive. What the first two stages find is a hint: other
// inserts, also those of earlier windows, may have split a block or added the key since.
const (
	// windowOps is how many operations a window has.
	windowOps = 16
	// windowMin is how many operations a body must have: a lone insert gains nothing.
	windowMin = 4
	// stages is how many windows are under way.
	stages = 3
	// stepsPerLevel is how many steps to the right locate makes on each level, whether or not a key needs
	// them. With towers of one half height half of all keys need none, and a quarter needs one.
	stepsPerLevel = 2
)

// window is a part of a body whose inserts share their cache misses.
type window struct {
	ops    [windowOps]batch.Op
	hashes [windowOps]uint64
	heads  [windowOps]uint32
	towers [windowOps]uint32         // at or before the tower responsible for the key, and near it; zero if unknown
	lines  [windowOps]unsafe.Pointer // scratch: what to prefetch
	absent [windowOps]bool           // the index had no node for the key
	n      int
}

// applyWindows is Apply for a body of several operations. It returns how many keys were new and how many
// operations were installed.
func (t *Table) applyWindows(in *Inserter, r *batch.Reader, epoch keys.Epoch, sync bool) (fresh, ops uint64) {
	var ring [stages]window
	t.announce(&ring[0], r)
	t.announce(&ring[1], r)
	t.locate(in, &ring[0])
	for next := 0; ring[next].n > 0; next = (next + 1) % stages {
		t.announce(&ring[(next+2)%stages], r)
		t.locate(in, &ring[(next+1)%stages])
		w := &ring[next]
		for i := range w.n {
			op := &w.ops[i]
			if t.applyFound(in, &in.splice, op, epoch, sync, w.found(t, i), w.hashes[i], w.towers[i]) {
				fresh++
			}
			if in.starved != nil {
				return fresh, ops
			}
			ops++
		}
	}
	return fresh, ops
}

// found is the node of the key of operation i, or zero if the index had none.
func (w *window) found(t *Table, i int) uint32 {
	if w.absent[i] {
		return 0
	}
	node, _ := t.index.find(t.arena.base, w.hashes[i], w.ops[i].Key)
	return node
}

// announce reads the operations of a window.
func (t *Table) announce(w *window, r *batch.Reader) {
	base := t.arena.base
	for w.n = 0; w.n < windowOps && r.Next(); w.n++ {
		w.ops[w.n] = r.Op
	}
	for i := range w.n {
		w.hashes[i] = t.hash(w.ops[i].Key)
		w.lines[i] = t.index.bucket(w.hashes[i])
	}
	prefetch(&w.lines, w.n, 1)
	for i := range w.n {
		w.heads[i] = t.heads.of(w.ops[i].Key)
		if w.towers[i] = t.guide.search(base, w.heads[i]); w.towers[i] == 0 {
			w.towers[i] = t.first // before all others
		}
		w.lines[i] = unsafe.Pointer(raw64(base, w.towers[i]))
	}
	prefetch(&w.lines, w.n, 1)
}

// locate finds the towers of the window's keys, level by level for all of them.
func (t *Table) locate(in *Inserter, w *window) {
	if w.n == 0 {
		return
	}
	base := t.arena.base
	if s := &in.splice; s.levels > 0 && w.heads[0] > s.lowHead && w.heads[w.n-1] < s.highHead {
		w.towers = [windowOps]uint32{} // a run in one block, to which the splice leads
	} else {
		for level := guideHeight - 1; level >= 0; level-- {
			for range stepsPerLevel {
				for i := range w.n {
					w.towers[i] = stepRight(base, w.towers[i], level, w.heads[i])
				}
			}
		}
		for i := range w.n {
			tower := w.towers[i]
			if headIn(towerLink(base, tower, 0).Load()) <= w.heads[i] {
				w.towers[i] = 0 // still far away, or the heads of the keys are alike
			}
			w.lines[i] = unsafe.Pointer(raw64(base, towerBlock(base, tower).Load()))
		}
		prefetch(&w.lines, w.n, int(blockWords(t.slots))*wordBytes/cacheLine)
	}
	for i := range w.n {
		var node uint32
		node, w.absent[i] = t.index.candidate(w.hashes[i])
		w.lines[i] = unsafe.Pointer(raw64(base, node))
	}
	prefetch(&w.lines, w.n, 1)
}

const cacheLine = 64

// stepRight is the next tower on a level if its head is below head, else the tower itself. It has no branch:
// whether there is a step to make is not predictable.
func stepRight(base unsafe.Pointer, tower uint32, level int, head uint32) uint32 {
	link := towerLink(base, tower, level).Load()
	next := offsetIn(link)
	if headIn(link) >= head {
		next = tower
	}
	return next
}
