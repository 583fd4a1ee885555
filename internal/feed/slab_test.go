package feed

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

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

// TestABorrowedCommitCountsAsItsCopy: the memory of its reader goes on after it.
func TestABorrowedCommitCountsAsItsCopy(t *testing.T) {
	var b batch.Builder
	for _, key := range []string{"k", "l", "m"} {
		b.Set(keys.SpaceUser, []byte(key), make([]byte, 500))
	}
	record, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	body := append(make([]byte, 0, 1<<20), record.Bytes()...)
	c := &Commit{borrowed: true}
	if _, err := c.read(7, body, make([]span, 0, 1000)); err != nil {
		t.Fatal(err)
	}
	if counted, takes := c.memory(), c.own().memory(); counted > takes || takes > counted+counted/2 {
		t.Fatalf("it counts %d bytes, and its copy takes %d", counted, takes)
	}
}
