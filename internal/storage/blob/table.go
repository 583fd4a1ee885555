package blob

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// place is a table entry: where a row lies. The zero place is nowhere.
//
//	63     62        56 55     40 39          38           0
//	+------+-----------+---------+-----------+--------------+
//	| dead | slot      | cost    | continued | page         |
//	+------+-----------+---------+-----------+--------------+
//
// Continued is what the row's kind says, so that dropping a row that is not needs no look at it. Dead marks a row that was dropped and waits for its readers; it is never stored.
type place uint64

const (
	placeDead      place = 1 << 63
	placeContinued place = 1 << 39
	slotShift            = 56
	costShift            = 40
	slotMask             = 1<<7 - 1
	costMask             = 1<<16 - 1
	pageMask             = placeContinued - 1
)

// placeLost stands for the place of a row that a leaf refers to and that a repair of the table did not find: no data page is page 0. It keeps the id
// from being used again, since the leaf would then refer to another value, and drop it one day.
const placeLost place = slotMask << slotShift

func makePlace(id page.ID, slot, cost int, kind rowKind) place {
	p := place(id) | place(cost)<<costShift | place(slot)<<slotShift
	if kind&rowContinued != 0 {
		p |= placeContinued
	}
	return p
}

func (p place) page() page.ID { return page.ID(p & pageMask) }
func (p place) slot() int     { return int(p>>slotShift) & slotMask }
func (p place) cost() int     { return int(p>>costShift) & costMask }
func (p place) lost() bool    { return p&^placeDead == placeLost }
func (p place) live() bool    { return p != 0 && p&placeDead == 0 }

// continued reports whether the row goes on in a tail.
func (p place) continued() bool { return p&placeContinued != 0 }

// chunkRows is the rows of a chunk: small enough that a small store's table is small, large enough that the directory is short.
const chunkRows = 1024

type chunk [chunkRows]atomic.Uint64

// table is the row table in memory. Anybody reads it without a lock; the store's one writer changes it. Its directory grows by
// replacement, so that a reader's copy stays valid.
type table struct {
	chunks atomic.Pointer[[]*chunk]
}

// at is where row id lies, dead or not; zero if there is no such row.
func (t *table) at(id uint64) place {
	chunks := *t.chunks.Load()
	if id/chunkRows >= uint64(len(chunks)) {
		return 0
	}
	return place(chunks[id/chunkRows][id%chunkRows].Load())
}

func (t *table) set(id uint64, p place) {
	chunks := *t.chunks.Load()
	if n := int(id/chunkRows) + 1; n > len(chunks) {
		grown := append(make([]*chunk, 0, n+n/4), chunks...)
		for len(grown) < n {
			grown = append(grown, new(chunk))
		}
		chunks = grown
		t.chunks.Store(&grown)
	}
	chunks[id/chunkRows][id%chunkRows].Store(uint64(p))
}

func newTable() *table {
	t := &table{}
	t.chunks.Store(new([]*chunk))
	return t
}

// leafRows is the rows of a leaf of the stored table.
func leafRows(leafBytes int) int { return leafBytes / 8 }

// decodeLeaf sets the rows of leaf i from its stored bytes, and calls each for every one that there is.
func (t *table) decodeLeaf(i int, payload []byte, each func(id uint64, p place) error) error {
	n := leafRows(len(payload))
	for j := range n {
		p := place(binary.LittleEndian.Uint64(payload[j*8:]))
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
func (t *table) encodeLeaf(i int, payload []byte) {
	n := leafRows(len(payload))
	for j := range n {
		if p := t.at(uint64(i*n + j)); p.live() {
			putTableEntry(payload, j, p)
		}
	}
}

func putTableEntry(payload []byte, i int, p place) {
	binary.LittleEndian.PutUint64(payload[i*8:], uint64(p))
}
