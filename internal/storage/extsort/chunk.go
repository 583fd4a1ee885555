package extsort

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
)

// chunk is the part of the input that is sorted in memory. The zero chunk is empty.
type chunk struct {
	buf       []byte // entries, encoded as in a run
	entries   []chunkEntry
	spare     []chunkEntry // where distribute puts them
	ascending bool         // the keys ascend strictly in the order in which they were added
}

// chunkEntry is the offset of an entry in the chunk, with eight bytes of its key as a number that compares
// like them: the first ones, and while a chunk is sorted those after its common prefix.
type chunkEntry struct {
	head    uint64
	offset  uint32
	keySize uint32
}

const chunkEntryBytes = 16

// bytesWith is about what the chunk takes with one more entry.
func (c *chunk) bytesWith(key, value []byte) int {
	entries := chunkEntryBytes * len(c.entries)
	if !c.ascending {
		entries *= 2 // to be sorted
	}
	return len(c.buf) + len(key) + len(value) + entries
}

// add appends an entry to the chunk, whose buffer begins with the given capacity.
func (c *chunk) add(key, value []byte, capacity int) {
	if c.buf == nil {
		c.buf = make([]byte, 0, capacity)
	}
	e := chunkEntry{head: keys.WordAfter(key, 0), offset: uint32(len(c.buf)), keySize: uint32(len(key))}
	if n := len(c.entries); n == 0 {
		c.ascending = true
	} else if c.ascending {
		c.ascending = c.compare(&c.entries[n-1], e.head, key) < 0
	}
	c.buf = appendEntry(c.buf, key, value, false)
	c.entries = append(c.entries, e)
}

func (c *chunk) reset() { c.buf, c.entries = c.buf[:0], c.entries[:0] }

// entry decodes an entry of the chunk.
func (c *chunk) entry(e *chunkEntry) (key, value []byte) {
	b := c.buf[e.offset:]
	_, n := binary.Uvarint(b)
	v, m := binary.Uvarint(b[n:])
	b = b[n+m:]
	return b[:e.keySize:e.keySize], b[e.keySize : uint64(e.keySize)+v>>1]
}

func (c *chunk) compare(e *chunkEntry, head uint64, key []byte) int {
	if c := cmp.Compare(e.head, head); c != 0 {
		return c
	}
	k, _ := c.entry(e)
	return bytes.Compare(k, key)
}

// sort sorts the entries by key; entries with the same key keep the order in which they were added. The
// keys of one load often begin alike, so the numbers that are compared come from the bytes after the
// prefix that all keys of the chunk share.
func (c *chunk) sort() {
	key := func(i int) []byte {
		k, _ := c.entry(&c.entries[i])
		return k
	}
	common := keys.CommonPrefix(len(c.entries), key)
	for i := range c.entries {
		c.entries[i].head = keys.WordAfter(key(i), common)
	}
	from := 0
	for _, to := range c.distribute() {
		slices.SortFunc(c.entries[from:to], func(a, b chunkEntry) int {
			if a.head != b.head {
				return cmp.Compare(a.head, b.head)
			}
			ka, _ := c.entry(&a)
			kb, _ := c.entry(&b)
			return cmp.Or(bytes.Compare(ka, kb), cmp.Compare(a.offset, b.offset))
		})
		from = int(to)
	}
}

// distributeBitsMax keeps the buckets in the processor's cache.
const distributeBitsMax = 12

// distribute moves the entries to buckets by the first bits in which their heads differ, and returns where each bucket ends. It
// looks at each entry once, where sorting compares it with others whose order no branch predictor can guess.
func (c *chunk) distribute() (ends []uint32) {
	least, most := c.entries[0].head, c.entries[0].head
	for i := range c.entries {
		least, most = min(least, c.entries[i].head), max(most, c.entries[i].head)
	}
	width := min(bits.Len(uint(len(c.entries))), distributeBitsMax)
	shift := max(bits.Len64(least^most)-width, 0)
	mask := uint64(1)<<width - 1
	ends = make([]uint32, mask+1)
	for i := range c.entries {
		ends[c.entries[i].head>>shift&mask]++
	}
	end := uint32(0)
	for i, size := range ends {
		ends[i] = end
		end += size
	}
	out := slices.Grow(c.spare[:0], len(c.entries))[:len(c.entries)]
	for i := range c.entries {
		at := &ends[c.entries[i].head>>shift&mask]
		out[*at] = c.entries[i]
		*at++
	}
	c.entries, c.spare = out, c.entries
	return ends
}
