package memtable

import (
	"unsafe"

	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Announce prepares an Apply of body, for which in has secured memory. The caller reserves an epoch and
// copies the record into the log between the two. A lone insert waits for the same cache misses as those
// of a batch (window.go). Announce prefetches the bucket, makes the search for the block, whose path it
// leaves in the splice, and prefetches the block. So the misses overlap with the work on the log, and the
// time in which an epoch is reserved and not installed becomes shorter. All of it is a hint.
//
// A key that the table has needs its node and no block. Which of the two it is, the bucket says, for which
// Announce would have to wait; so it expects what the last lone operation of the writer found.
func (t *Table) Announce(in *Inserter, body *batch.Body) {
	var r batch.Reader
	n := body.Count()
	if n > smallBody || r.ReadBody(body) != nil {
		return
	}
	for i := 0; r.Next(); i++ {
		t.announceOne(in, in.spliceOf(i, n), r.Key)
	}
}

// Expect prefetches what Find of key reads first. The table may be freed meanwhile.
func (t *Table) Expect(key []byte) { prefetchLines(t.index.bucket(t.hash(key)), 1) }

func (t *Table) announceOne(in *Inserter, s *splice, key []byte) {
	hash := t.hash(key)
	if in.overwrote && s == &in.splice {
		if node, absent := t.index.candidate(hash); !absent {
			prefetchLines(unsafe.Pointer(raw64(t.arena.base, node)), 1)
			return
		}
	}
	prefetchLines(t.index.bucket(hash), 1)
	s.ascending = false
	tower := t.approach(s, key, t.heads.of(key))
	block := towerBlock(t.arena.base, tower).Load()
	prefetchLines(unsafe.Pointer(raw64(t.arena.base, block)), int(blockWords(t.slots))*wordBytes/cacheLine)
}

func prefetchLines(at unsafe.Pointer, count int) {
	lines := [windowOps]unsafe.Pointer{at}
	prefetch(&lines, 1, count)
}
