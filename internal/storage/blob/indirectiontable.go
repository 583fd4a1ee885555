package blob

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// location is a table entry: where a fragment is. The zero location is nowhere.
//
//	63     62        56 55     40 39          38           0
//	+------+-----------+---------+-----------+--------------+
//	| dead | slot      | cost    | continued | page         |
//	+------+-----------+---------+-----------+--------------+
//
// Continued repeats what the fragment's kind says, so that a blob without a second fragment can be
// dropped without a read. Dead marks a dropped blob that old readers may still read; it is never stored.
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

// locationMissing is the location of a blob that a leaf refers to, or one that could not be read may refer to, and that a repair of
// the table did not find: no blob page is page 0. It prevents that the id is used again. Otherwise the leaf would refer to
// another value, and would drop that value one day.
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

// found reports whether there is a live fragment.
func (p location) found() bool { return p.live() && !p.missing() }

// continued reports whether the fragment continues in a second fragment.
func (p location) continued() bool { return p&locationContinued != 0 }

// chunkEntries is the number of entries of a chunk: few enough that the table of a small store is small,
// and enough that the directory is short.
const chunkEntries = 1024

type chunk [chunkEntries]atomic.Uint64

// indirectionTable is the indirection table in memory. Readers take no lock; the one writer of the store
// changes it. Its directory grows by replacement, so that a reader's copy stays valid.
type indirectionTable struct {
	chunks atomic.Pointer[[]*chunk]
}

// locationOf is the location of blob id, live or dropped; zero if there is no such blob.
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

// leafEntries is the number of entries in a leaf of the stored table.
func leafEntries(leafBytes int) int { return leafBytes / 8 }

// decodeLeaf sets the entries of leaf i from its stored bytes, and calls each for every blob in it.
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

// encodeLeaf fills the stored bytes of leaf i with the live blobs.
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
