package blob

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// location is a table entry: where a row lies. The zero place is nowhere.
//
//	63     62        56 55     40 39          38           0
//	+------+-----------+---------+-----------+--------------+
//	| dead | slot      | cost    | continued | page         |
//	+------+-----------+---------+-----------+--------------+
//
// Continued is what the row's kind says, so that dropping a row that is not needs no look at it. Dead marks a row that was dropped and waits for its readers; it is never stored.
type location uint64

const (
	locationDead      location = 1 << 63
	locationContinued location = 1 << 39
	slotShift                  = 56
	costShift                  = 40
	slotMask                   = 1<<7 - 1
	costMask                   = 1<<16 - 1
	pageMask                   = locationContinued - 1
)

// locationMissing is the location of a blob that a leaf refers to and that a repair of the table did not find: no blob page is page 0.
// It keeps the id from being used again. Otherwise the leaf would then refer to another value, and drop it one day.
const locationMissing location = slotMask << slotShift

func makeLocation(id page.ID, slot, cost int, kind fragmentKind) location {
	p := location(id) | location(cost)<<costShift | location(slot)<<slotShift
	if kind&fragmentContinued != 0 {
		p |= locationContinued
	}
	return p
}

func (p location) page() page.ID { return page.ID(p & pageMask) }
func (p location) slot() int     { return int(p>>slotShift) & slotMask }
func (p location) cost() int     { return int(p>>costShift) & costMask }
func (p location) missing() bool { return p&^locationDead == locationMissing }
func (p location) live() bool    { return p != 0 && p&locationDead == 0 }

// continued reports whether the row goes on in a tail.
func (p location) continued() bool { return p&locationContinued != 0 }

// chunkEntries is the rows of a chunk: small enough that a small store's table is small, large enough that the directory is short.
const chunkEntries = 1024

type chunk [chunkEntries]atomic.Uint64

// indirectionTable is the row table in memory. Anybody reads it without a lock; the store's one writer changes it. Its directory grows by
// replacement, so that a reader's copy stays valid.
type indirectionTable struct {
	chunks atomic.Pointer[[]*chunk]
}

// locationOf is where row id lies, dead or not; zero if there is no such row.
func (t *indirectionTable) locationOf(id uint64) location {
	chunks := *t.chunks.Load()
	if id/chunkEntries >= uint64(len(chunks)) {
		return 0
	}
	return location(chunks[id/chunkEntries][id%chunkEntries].Load())
}

func (t *indirectionTable) set(id uint64, p location) {
	chunks := *t.chunks.Load()
	if n := int(id/chunkEntries) + 1; n > len(chunks) {
		grown := append(make([]*chunk, 0, n+n/4), chunks...)
		for len(grown) < n {
			grown = append(grown, new(chunk))
		}
		chunks = grown
		t.chunks.Store(&grown)
	}
	chunks[id/chunkEntries][id%chunkEntries].Store(uint64(p))
}

func newTable() *indirectionTable {
	t := &indirectionTable{}
	t.chunks.Store(new([]*chunk))
	return t
}

// leafEntries is the rows of a leaf of the stored table.
func leafEntries(leafBytes int) int { return leafBytes / 8 }

// decodeLeaf sets the rows of leaf i from its stored bytes, and calls each for every one that there is.
func (t *indirectionTable) decodeLeaf(i int, payload []byte, each func(id uint64, p location) error) error {
	n := leafEntries(len(payload))
	for j := range n {
		p := location(binary.LittleEndian.Uint64(payload[j*8:]))
		if p == 0 {
			continue
		}
		id := uint64(i*n + j)
		if err := each(id, p); err != nil {
			return err
		}
		t.set(id, p)
	}
	return nil
}

// encodeLeaf fills the stored bytes of leaf i: the living rows.
func (t *indirectionTable) encodeLeaf(i int, payload []byte) {
	n := leafEntries(len(payload))
	for j := range n {
		if p := t.locationOf(uint64(i*n + j)); p.live() {
			putTableEntry(payload, j, p)
		}
	}
}

func putTableEntry(payload []byte, i int, p location) {
	binary.LittleEndian.PutUint64(payload[i*8:], uint64(p))
}
