package feed

import "slices"

// A watch that catches up alone gets nearly every commit of the log, hundreds of thousands a second. Their memory is allocated for
// several together: one by one, allocation and garbage collection were half of the work of a reader.

// slab is memory of several commits. It counts as memory of the queues, as a whole, while some queue refers to one of them.
type slab struct {
	bytes int64 // constant

	// Guarded by Feed.mu.
	refs int // commits to which queues refer
}

// slabBytes is about how much a slab has at most. A delivery of which one commit is left keeps all of it.
const slabBytes = 16 << 10

// share copies the commits that the only watch of a group wants out of the memory of the reader.
func (r *reading) share(w *Watch) {
	wanted, bytes := r.wanted[:0], int64(0)
	for i := range r.pieces {
		for j, c := range r.pieces[i].commits {
			if !c.borrowed {
				continue
			}
			if r.runs = w.match(r.runs[:0], c, 0); len(r.runs) == 0 {
				continue
			}
			if one := c.memory(); bytes+one > slabBytes {
				shareSlab(wanted)
				wanted, bytes = wanted[:0], 0
			} else {
				bytes += one
			}
			wanted = append(wanted, &r.pieces[i].commits[j])
		}
	}
	shareSlab(wanted)
	r.wanted = wanted[:0]
}

// shareSlab replaces commits by copies that share a slab. One by itself needs none.
func shareSlab(list []**Commit) {
	if len(list) < 2 {
		return
	}
	bodies, operations := 0, 0
	for _, c := range list {
		bodies += len((*c).body)
		operations += len((*c).spans)
	}
	commits, memory, spans := make([]Commit, len(list)), slices.Grow([]byte(nil), bodies), make([]span, 0, operations)
	s := &slab{bytes: int64(len(commits))*commitBytes + int64(cap(memory)) + int64(cap(spans))*spanBytes}
	for i, at := range list {
		c := *at
		body, first := len(memory), len(spans)
		memory, spans = append(memory, c.body...), append(spans, c.spans...)
		c.copyTo(&commits[i], memory[body:len(memory):len(memory)], spans[first:len(spans):len(spans)])
		commits[i].slab = s
		*at = &commits[i]
	}
}

// retainSlabLocked counts the first reference of queues to a commit.
func (f *Feed) retainSlabLocked(s *slab) {
	if s.refs == 0 {
		f.memory.queues += s.bytes
	}
	s.refs++
}

func (f *Feed) releaseSlabLocked(s *slab) {
	if s.refs--; s.refs == 0 {
		f.memory.queues -= s.bytes
	}
}
