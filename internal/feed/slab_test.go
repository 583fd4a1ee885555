package feed

// checkMemory compares what counts as memory of ring and queues with what they have.
func (m *model) checkMemory() {
	m.t.Helper()
	f := m.feed
	f.lock()
	defer f.unlock()
	var ring, queues int64
	for _, c := range f.ring.commits.all() {
		ring += c.size
	}
	commits, slabs := map[*Commit]bool{}, map[*slab]bool{}
	for _, w := range f.watches {
		queues += int64(cap(w.queue.refs)) * refBytes
		for _, r := range w.queue.refs[w.queue.head:] {
			c := r.commit
			if c.borrowed {
				m.t.Fatalf("the queue of watch %d has a commit in the memory of a reader", w.ID)
			}
			if c.inRing || commits[c] {
				continue
			}
			commits[c] = true
			if queues += c.size; c.slab != nil && !slabs[c.slab] {
				slabs[c.slab] = true
				queues += c.slab.bytes
				m.seen.shared++
			}
		}
	}
	if ring != f.ring.bytes || queues != f.memory.queues {
		m.t.Fatalf("ring and queues have %d and %d bytes, and count as %d and %d", ring, queues, f.ring.bytes, f.memory.queues)
	}
}
