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
	table    *indirectionTable
	stats    atomic.Pointer[Stats]

	// Owned by the open batch.
	storedTable *pager.PageArray // the stored table
	used        bitset.Set       // row ids that live or dead rows have
	dropped     []droppedBlobs   // ascending by checkpoint
	fill        fill
	state       pager.BlobState
	rebuilt     bool // the stored table is damaged: the next batch writes all of it
}

// droppedBlobs is what one checkpoint dropped.
type droppedBlobs struct {
	checkpoint uint64
	ids        []uint64
}

// Stats tells what the rows take, as of the newest durable state.
type Stats struct {
	Blobs         uint64
	Bytes         uint64  // of their values
	BlobPages     uint64  // of packed rows
	OverflowPages uint64  // of single values
	TablePages    uint64  // of the stored table
	TableBytes    uint64  // of the table in memory
	FillFactor    float64 // the part of data pages that live rows take
	Dropped       uint64  // rows that wait for their readers
}

// Open reads the row table of p's newest state.
func Open(p *pager.Pager) (*Store, error) {
	s := &Store{pager: p, pageSize: p.PageSize(), table: newTable(), state: p.Blobs()}
	s.fill.capacity = capacity(s.pageSize)
	rows, err := s.readTable()
	if err != nil {
		return nil, err
	}
	if got := (pager.BlobState{
		Table: s.storedTable.Root(), Slots: s.state.Slots, Blobs: rows, Bytes: s.state.Bytes,
		BlobPages: uint64(s.fill.pages), OverflowPages: s.state.OverflowPages,
	}); got != s.state {
		return nil, p.Corrupt(s.state.Table.Page, fmt.Sprintf("the row table holds %+v, the superblock says %+v", got, s.state))
	}
	s.fill.begin()
	s.publishStats()
	return s, nil
}

func (s *Store) readTable() (rows uint64, err error) {
	end := page.ID(s.pager.Stats().PageCount)
	s.storedTable, err = s.pager.ReadArray(pager.ArrayIndirectionTable, s.state.Table, s.leaves(s.state.Slots), func(i int, payload []byte) error {
		return s.table.decodeLeaf(i, payload, func(id uint64, p location) error {
			if p == locationMissing && id < s.state.Slots {
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

func (s *Store) leafEntries() int { return leafEntries(pager.ArrayLeafBytes(s.pageSize)) }

func (s *Store) leaves(slots uint64) int {
	return int((slots + uint64(s.leafEntries()) - 1) / uint64(s.leafEntries()))
}

// Stats is as of the newest durable state.
func (s *Store) Stats() Stats { return *s.stats.Load() }

func (s *Store) publishStats() {
	dropped := 0
	for _, d := range s.dropped {
		dropped += len(d.ids)
	}
	s.stats.Store(&Stats{
		Blobs: s.state.Blobs, Bytes: s.state.Bytes, BlobPages: s.state.BlobPages, OverflowPages: s.state.OverflowPages,
		TablePages: uint64(s.storedTable.PageCount()), TableBytes: uint64(len(*s.table.chunks.Load())) * chunkEntries * 8,
		FillFactor: s.fill.factor(), Dropped: uint64(dropped),
	})
}

// PageSource reads data pages for a reader, through a cache if there is one. The bytes must stay while the reader's pin lasts.
type PageSource interface {
	BlobPage(id page.ID) ([]byte, error)
}

// Append appends the value that r refers to. The caller holds a root that reaches r. Bulk pages are read past the cache, in one
// submission for each window.
func (s *Store) Append(dst []byte, r page.Ref, src PageSource) ([]byte, error) {
	ref, err := decodeRef(r)
	if err != nil {
		return dst, err
	}
	start := len(dst)
	dst, kind, err := s.appendFragments(dst, ref.id, s.table, src)
	if err == nil && kind == fragmentHead {
		row := append([]byte(nil), dst[start:]...)
		dst, err = s.appendOverflow(dst[:start], ref.id, row)
	}
	if err != nil {
		return dst[:start], err
	}
	if value := dst[start:]; uint64(len(value)) != ref.length || crc32.Checksum(value, castagnoli) != ref.checksum {
		at := s.table.locationOf(ref.id).page()
		return dst[:start], s.pager.Corrupt(at, fmt.Sprintf("row %d is not the value of %d bytes that its leaf refers to", ref.id, ref.length))
	}
	return dst, nil
}

// locations says where rows lie: for readers the table, for a batch what it has changed, too.
type locations interface {
	locationOf(id uint64) location
}

// appendFragments appends row id, both parts of it if it was cut. Its kind is whole or head.
func (s *Store) appendFragments(dst []byte, id uint64, places locations, src PageSource) ([]byte, fragmentKind, error) {
	at := places.locationOf(id)
	row, err := s.readFragment(id, at, src)
	if err != nil || row.kind&fragmentContinued == 0 {
		return append(dst, row.data...), row.kind, err
	}
	kind, tail := row.kind&^fragmentContinued, binary.LittleEndian.Uint64(row.data)
	dst = append(dst, row.data[secondIDSize:]...)
	row, err = s.readFragment(tail, places.locationOf(tail), src)
	if err == nil && row.kind != fragmentSecond {
		err = s.pager.Corrupt(at.page(), fmt.Sprintf("row %d goes on in row %d, which is of kind %d", id, tail, row.kind))
	}
	return append(dst, row.data...), kind, err
}

// readFragment reads row id, or a part of it, from the page where it lies.
func (s *Store) readFragment(id uint64, at location, src PageSource) (slotFragment, error) {
	if at.page() == 0 {
		return slotFragment{}, fmt.Errorf("%w: row %d", ErrBadRef, id)
	}
	buf, err := src.BlobPage(at.page())
	if err != nil {
		return slotFragment{}, err
	}
	return s.fragmentIn(buf, id, at)
}

// fragmentIn finds a row in the page where the table says it is.
func (s *Store) fragmentIn(buf []byte, id uint64, at location) (slotFragment, error) {
	rows, err := fragmentCount(buf)
	if err == nil && at.slot() >= rows {
		err = fmt.Errorf("%w: row %d in slot %d of %d", errMalformed, id, at.slot(), rows)
	}
	var row slotFragment
	if err == nil {
		row, err = fragmentAt(buf, at.slot(), rows)
	}
	if err == nil && (row.id != id || cost(len(row.data), s.pageSize) != at.cost() || (row.kind&fragmentContinued != 0) != at.continued()) {
		err = fmt.Errorf("%w: slot %d holds row %d of %d bytes, not row %d", errMalformed, at.slot(), row.id, len(row.data), id)
	}
	if err != nil {
		return slotFragment{}, s.pager.Corrupt(at.page(), err.Error())
	}
	return row, nil
}

// overflowWindow bounds the memory that reading a long value takes beside the value, in bytes.
const overflowWindow = 1 << 20

// appendOverflow appends a value that begins in bulk pages.
func (s *Store) appendOverflow(dst []byte, id uint64, row []byte) ([]byte, error) {
	h, err := decodeHead(row, s.pageSize)
	if err != nil {
		return dst, s.pager.Corrupt(s.table.locationOf(id).page(), err.Error())
	}
	window := max(1, overflowWindow/s.pageSize)
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
			if t := page.ReadHeader(now[i].Buf).Type; t != page.TypeOverflow || overflowOwner(now[i].Buf) != id {
				return dst, s.pager.Corrupt(now[i].ID, fmt.Sprintf("page of type %d of row %d, not bulk of row %d", t, overflowOwner(now[i].Buf), id))
			}
			n := min(left, overflowBytes(s.pageSize))
			dst = append(dst, now[i].Buf[overflowPayload:overflowPayload+n]...)
			left -= n
		}
		reads = reads[len(now):]
	}
	return append(dst, h.remainder...), nil
}
