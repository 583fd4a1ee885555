package blob

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Store is the values of one data file.
type Store struct {
	pager    *pager.Pager
	pageSize int
	table    *table
	stats    atomic.Pointer[Stats]

	// Owned by the open batch.
	stored  *pager.Vector // the stored table
	used    bitset.Set    // row ids that live or dead rows have
	dropped []droppedRows // ascending by checkpoint
	fill    fill
	state   pager.RowState
	rebuilt bool // the stored table is damaged: the next batch writes all of it
}

// droppedRows is what one checkpoint dropped.
type droppedRows struct {
	checkpoint uint64
	ids        []uint64
}

// Stats tells what the rows take, as of the newest durable state.
type Stats struct {
	Rows       uint64
	Bytes      uint64  // of their values
	DataPages  uint64  // of packed rows
	BulkPages  uint64  // of single values
	TablePages uint64  // of the stored table
	TableBytes uint64  // of the table in memory
	FillFactor float64 // the part of data pages that live rows take
	Dropped    uint64  // rows that wait for their readers
}

// Open reads the row table of p's newest state.
func Open(p *pager.Pager) (*Store, error) {
	s := &Store{pager: p, pageSize: p.PageSize(), table: newTable(), state: p.Rows()}
	s.fill.capacity = capacity(s.pageSize)
	rows, err := s.load()
	if err != nil {
		return nil, err
	}
	if got := (pager.RowState{
		Table: s.stored.Root(), Slots: s.state.Slots, Rows: rows, Bytes: s.state.Bytes,
		DataPages: uint64(s.fill.pages), BulkPages: s.state.BulkPages,
	}); got != s.state {
		return nil, p.Corrupt(s.state.Table.Page, fmt.Sprintf("the row table holds %+v, the superblock says %+v", got, s.state))
	}
	s.fill.begin()
	s.snapshotStats()
	return s, nil
}

func (s *Store) load() (rows uint64, err error) {
	end := page.ID(s.pager.Stats().PageCount)
	s.stored, err = s.pager.LoadVector(pager.VectorRows, s.state.Table, s.leaves(s.state.Slots), func(i int, payload []byte) error {
		return s.table.decodeLeaf(i, payload, func(id uint64, p place) error {
			if p == placeLost && id < s.state.Slots {
				s.used.Add(int(id))
				rows++
				return nil
			}
			live := s.fill.of(p.page()) + p.cost()
			if id >= s.state.Slots || !p.live() || p.page() >= end || p.cost() <= entrySize || live > s.fill.capacity {
				return s.pager.Corrupt(s.state.Table.Page, fmt.Sprintf("row %d lies at %#x", id, uint64(p)))
			}
			s.fill.put(p.page(), uint16(live))
			s.used.Add(int(id))
			rows++
			return nil
		})
	})
	return rows, err
}

func (s *Store) leafRows() int { return leafRows(pager.VectorLeafBytes(s.pageSize)) }

func (s *Store) leaves(slots uint64) int {
	return int((slots + uint64(s.leafRows()) - 1) / uint64(s.leafRows()))
}

// Stats is as of the newest durable state.
func (s *Store) Stats() Stats { return *s.stats.Load() }

func (s *Store) snapshotStats() {
	dropped := 0
	for _, d := range s.dropped {
		dropped += len(d.ids)
	}
	s.stats.Store(&Stats{
		Rows: s.state.Rows, Bytes: s.state.Bytes, DataPages: s.state.DataPages, BulkPages: s.state.BulkPages,
		TablePages: uint64(s.stored.PageCount()), TableBytes: uint64(len(*s.table.chunks.Load())) * chunkRows * 8,
		FillFactor: s.fill.factor(), Dropped: uint64(dropped),
	})
}

// PageSource reads data pages for a reader, through a cache if there is one. The bytes must stay while the reader's pin lasts.
type PageSource interface {
	DataPage(id page.ID) ([]byte, error)
}

// Append appends the value that r refers to. The caller holds a root that reaches r. Bulk pages are read past the cache, in one
// submission for each window.
func (s *Store) Append(dst []byte, r page.Ref, src PageSource) ([]byte, error) {
	ref, err := decodeRef(r)
	if err != nil {
		return dst, err
	}
	start := len(dst)
	dst, kind, err := s.appendRow(dst, ref.id, s.table, src)
	if err == nil && kind == rowHead {
		row := append([]byte(nil), dst[start:]...)
		dst, err = s.appendBulk(dst[:start], ref.id, row)
	}
	if err != nil {
		return dst[:start], err
	}
	if value := dst[start:]; uint64(len(value)) != ref.length || crc32.Checksum(value, castagnoli) != ref.checksum {
		at := s.table.at(ref.id).page()
		return dst[:start], s.pager.Corrupt(at, fmt.Sprintf("row %d is not the value of %d bytes that its leaf refers to", ref.id, ref.length))
	}
	return dst, nil
}

// places says where rows lie: for readers the table, for a batch what it has changed, too.
type places interface {
	at(id uint64) place
}

// appendRow appends row id, both parts of it if it was cut. Its kind is whole or head.
func (s *Store) appendRow(dst []byte, id uint64, places places, src PageSource) ([]byte, rowKind, error) {
	at := places.at(id)
	row, err := s.rowAt(id, at, src)
	if err != nil || row.kind&rowContinued == 0 {
		return append(dst, row.data...), row.kind, err
	}
	kind, tail := row.kind&^rowContinued, binary.LittleEndian.Uint64(row.data)
	dst = append(dst, row.data[tailID:]...)
	row, err = s.rowAt(tail, places.at(tail), src)
	if err == nil && row.kind != rowTail {
		err = s.pager.Corrupt(at.page(), fmt.Sprintf("row %d goes on in row %d, which is of kind %d", id, tail, row.kind))
	}
	return append(dst, row.data...), kind, err
}

// rowAt reads row id, or a part of it, from the page where it lies.
func (s *Store) rowAt(id uint64, at place, src PageSource) (slotRow, error) {
	if at.page() == 0 {
		return slotRow{}, fmt.Errorf("%w: row %d", ErrBadRef, id)
	}
	buf, err := src.DataPage(at.page())
	if err != nil {
		return slotRow{}, err
	}
	return s.rowIn(buf, id, at)
}

// rowIn finds a row in the page where the table says it is.
func (s *Store) rowIn(buf []byte, id uint64, at place) (slotRow, error) {
	rows, err := pageRows(buf)
	if err == nil && at.slot() >= rows {
		err = fmt.Errorf("%w: row %d in slot %d of %d", errMalformed, id, at.slot(), rows)
	}
	var row slotRow
	if err == nil {
		row, err = rowAt(buf, at.slot(), rows)
	}
	if err == nil && (row.id != id || cost(len(row.data), s.pageSize) != at.cost() || (row.kind&rowContinued != 0) != at.continued()) {
		err = fmt.Errorf("%w: slot %d holds row %d of %d bytes, not row %d", errMalformed, at.slot(), row.id, len(row.data), id)
	}
	if err != nil {
		return slotRow{}, s.pager.Corrupt(at.page(), err.Error())
	}
	return row, nil
}

// bulkWindow bounds the memory that reading a long value takes beside the value, in bytes.
const bulkWindow = 1 << 20

// appendBulk appends a value that begins in bulk pages.
func (s *Store) appendBulk(dst []byte, id uint64, row []byte) ([]byte, error) {
	h, err := decodeHead(row, s.pageSize)
	if err != nil {
		return dst, s.pager.Corrupt(s.table.at(id).page(), err.Error())
	}
	window := max(1, bulkWindow/s.pageSize)
	var reads []pager.Read
	h.pages(func(id page.ID) { reads = append(reads, pager.Read{ID: id}) })
	slab := vfs.AlignedBuffer(min(window, len(reads)) * s.pageSize)
	if need := len(dst) + h.length; cap(dst) < need {
		dst = append(make([]byte, 0, need), dst...)
	}
	left := h.length - len(h.remainder)
	for len(reads) > 0 {
		now := reads[:min(window, len(reads))]
		for i := range now {
			now[i].Buf = slab[i*s.pageSize : (i+1)*s.pageSize]
		}
		if err := s.pager.ReadPages(now); err != nil {
			return dst, err
		}
		for i := range now {
			if t := page.ReadHeader(now[i].Buf).Type; t != page.TypeBulk || bulkOwner(now[i].Buf) != id {
				return dst, s.pager.Corrupt(now[i].ID, fmt.Sprintf("page of type %d of row %d, not bulk of row %d", t, bulkOwner(now[i].Buf), id))
			}
			n := min(left, bulkBytes(s.pageSize))
			dst = append(dst, now[i].Buf[bulkPayload:bulkPayload+n]...)
			left -= n
		}
		reads = reads[len(now):]
	}
	return append(dst, h.remainder...), nil
}
