package blob

import (
	"math/bits"

	"github.com/epochkv/epochkv/internal/storage/bitset"
)

// drops is the blobs that a batch has dropped: any number of them, because a merge drops what the leaves refer to that it rewrites.
type drops struct {
	dropped  idSet      // their locations do not change before Publish
	outdated bitset.Set // leaves of the stored table that have one that was dropped since they were written
	unfreed  unfreed    // of earlier batches and of this one
}

// idSet is a set of blob ids. It takes a bit for each, and 128 bytes more where only few of chunkEntries neighbours are in it. The
// zero idSet is empty and ready.
type idSet struct {
	chunks map[uint64]*idChunk // by id / chunkEntries
	count  int
}

type idChunk [chunkEntries / 64]uint64

// add adds an id that is not there.
func (s *idSet) add(id uint64) {
	c := s.chunks[id/chunkEntries]
	if c == nil {
		if s.chunks == nil {
			s.chunks = map[uint64]*idChunk{}
		}
		c = new(idChunk)
		s.chunks[id/chunkEntries] = c
	}
	c[id%chunkEntries/64] |= 1 << (id % 64)
	s.count++
}

func (s *idSet) has(id uint64) bool {
	c := s.chunks[id/chunkEntries]
	return c != nil && c[id%chunkEntries/64]&(1<<(id%64)) != 0
}

// each calls do for every id, in no order.
func (s *idSet) each(do func(id uint64)) {
	for n, c := range s.chunks {
		c.each(n, do)
	}
}

// eachIn calls do for every id in [from, to), in order.
func (s *idSet) eachIn(from, to uint64, do func(id uint64)) {
	for n := from / chunkEntries; n*chunkEntries < to; n++ {
		if c := s.chunks[n]; c != nil {
			c.each(n, func(id uint64) {
				if from <= id && id < to {
					do(id)
				}
			})
		}
	}
}

// each calls do for every id of the n-th chunk, in order.
func (c *idChunk) each(n uint64, do func(id uint64)) {
	for i, word := range c {
		for ; word != 0; word &= word - 1 {
			do(n*chunkEntries + uint64(i*64+bits.TrailingZeros64(word)))
		}
	}
}

// droppedBlobs is the ids that one checkpoint dropped: as a list if that is shorter, because long readers may keep thousands of them.
type droppedBlobs struct {
	checkpoint uint64
	list       []uint64
	set        idSet
}

func newDroppedBlobs(checkpoint uint64, ids idSet) droppedBlobs {
	if ids.count > len(ids.chunks)*chunkEntries/64 {
		return droppedBlobs{checkpoint: checkpoint, set: ids}
	}
	d := droppedBlobs{checkpoint: checkpoint, list: make([]uint64, 0, ids.count)}
	ids.each(func(id uint64) { d.list = append(d.list, id) })
	return d
}

func (d *droppedBlobs) count() int { return len(d.list) + d.set.count }

// each calls do for every id, in no order.
func (d *droppedBlobs) each(do func(id uint64)) {
	for _, id := range d.list {
		do(id)
	}
	d.set.each(do)
}
