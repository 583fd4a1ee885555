package blob

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Store holds the blobs of one data file.
type Store struct {
	pager    *pager.Reader
	pageSize int
	table    *indirectionTable
	stats    atomic.Pointer[Stats]

	failedDrops atomic.Uint64 // see FailedDrops

	// Owned by the open batch.
	storedTable *pager.PageArray // the array that stores the table
	used        bitset.Set       // blob ids of live and dropped blobs
	dropped     []droppedBlobs   // ascending by checkpoint
	unfreed     unfreed
	fill        fill
	state       pager.BlobState
	rebuilt     bool // the stored table is damaged: the next batch writes all of it

	doubtful bool // the device failed reads while the table was rebuilt: see Repair
	again    bool // the stored table asks the next Open for another rebuild: see RebuildAgain

	copies *copies // of a store that Rebuild made; constant
}

// Stats tells how much space the blobs take, as of the newest durable state.
type Stats struct {
	Blobs         uint64
	Bytes         uint64  // of their values
	BlobPages     uint64  // pages of packed fragments
	OverflowPages uint64  // pages that hold a part of one blob
	TablePages    uint64  // of the stored table
	TableBytes    uint64  // of the table in memory
	FillFactor    float64 // the part of blob pages that live fragments take
	Dropped       uint64  // dropped blobs that old readers may still read
	Unfreed       uint64  // dropped blobs whose pages could not be read: batches try again to free them
}

// Open reads the indirection table of the newest state of p.
func Open(p *pager.Reader) (*Store, error) {
	s := &Store{pager: p, pageSize: p.PageSize(), table: newTable(), state: p.Blobs()}
	if s.state.Blobs > s.state.Slots { // it is to be rebuilt: see RebuildAgain
		return nil, p.Corrupt(s.state.Table.Page, "the indirection table was rebuilt while the device failed reads, and is incomplete")
	}
	s.fill.capacity = capacity(s.pageSize)
	fragments, err := s.readTable()
	if err != nil {
		return nil, err
	}
	if got := (pager.BlobState{
		Table: s.storedTable.Root(), Slots: s.state.Slots, Blobs: fragments, Bytes: s.state.Bytes,
		BlobPages: uint64(s.fill.pages), OverflowPages: s.state.OverflowPages,
	}); got != s.state {
		return nil, p.Corrupt(s.state.Table.Page, fmt.Sprintf("the indirection table holds %+v, the superblock says %+v", got, s.state))
	}
	s.fill.begin()
	s.publishStats()
	return s, nil
}

// RebuildAgain makes the states of later batches ask for another rebuild of the table when they are opened. Such a state counts more blobs than
// ids, which is impossible otherwise: earlier versions of the program take it for damage of the table, and rebuild the table as well.
func (s *Store) RebuildAgain() { s.again = true }

// stored is a state as the superblock has it.
func (s *Store) stored(state pager.BlobState) pager.BlobState {
	if s.again {
		state.Blobs = state.Slots + 1
	}
	return state
}

// Doubtful reports whether the device failed reads while Repair rebuilt the table, so that blobs may be missing from it.
func (s *Store) Doubtful() bool { return s.doubtful }

func (s *Store) readTable() (fragments uint64, err error) {
	end := s.pager.PageCount()
	s.storedTable, err = s.pager.ReadArray(pager.ArrayIndirectionTable, s.state.Table, s.leaves(s.state.Slots), func(i int, payload []byte) error {
		return s.table.decodeLeaf(i, payload, func(id uint64, p location) error {
			if p == locationMissing && id < s.state.Slots {
				s.used.Add(int(id))
				fragments++
				return nil
			}
			live := s.fill.of(p.page()) + p.cost()
			if id >= s.state.Slots || !p.live() || p.page() >= end || p.cost() <= entrySize || live > s.fill.capacity {
				return s.pager.Corrupt(s.state.Table.Page, fmt.Sprintf("impossible location %#x of blob %d", uint64(p), id))
			}
			s.fill.put(p.page(), uint16(live))
			s.used.Add(int(id))
			fragments++
			return nil
		})
	})
	return fragments, err
}

// CheckLive reports as damage if the indirection table names a page that is not live.
func (s *Store) CheckLive(live func(page.ID) bool) error {
	for id := range page.ID(len(s.fill.regions) * regionPages) {
		if s.fill.of(id) > 0 && !live(id) {
			return s.pager.Corrupt(s.state.Table.Page, fmt.Sprintf("the indirection table names page %d, and the allocation map says that it is free", id))
		}
	}
	return nil
}

func (s *Store) leafEntries() int { return leafEntries(pager.ArrayLeafBytes(s.pageSize)) }

func (s *Store) leaves(slots uint64) int {
	return int((slots + uint64(s.leafEntries()) - 1) / uint64(s.leafEntries()))
}

// Stats returns the numbers of the newest durable state.
func (s *Store) Stats() Stats { return *s.stats.Load() }

// FailedDrops is how often a batch has met damage of a value that it was to free.
func (s *Store) FailedDrops() uint64 { return s.failedDrops.Load() }

func (s *Store) publishStats() {
	dropped := 0
	for _, d := range s.dropped {
		dropped += d.count()
	}
	s.stats.Store(&Stats{
		Blobs: s.state.Blobs, Bytes: s.state.Bytes, BlobPages: s.state.BlobPages, OverflowPages: s.state.OverflowPages,
		TablePages: uint64(s.storedTable.PageCount()), TableBytes: uint64(len(*s.table.chunks.Load())) * chunkEntries * 8,
		FillFactor: s.fill.factor(), Dropped: uint64(dropped), Unfreed: uint64(len(s.unfreed.refs)),
	})
}

// PageSource reads blob pages for a reader, through a cache if there is one. The bytes must stay valid
// until the reader's guard ends.
type PageSource interface {
	BlobPage(id page.ID) ([]byte, error)
}

// Append appends the value that r refers to. The caller holds a root that reaches r. Overflow pages are
// read past the cache, in one submission for each window.
func (s *Store) Append(dst []byte, r page.Ref, src PageSource) ([]byte, error) {
	ref, err := decodeRef(r)
	if err != nil {
		return dst, err
	}
	dst, err = s.appendValue(dst, ref, s.table, src)
	if err != nil && s.copies != nil {
		err = s.choose(ref.id, src, func(c *choice) (err error) {
			dst, err = s.appendValue(dst, ref, c, src)
			return err
		})
	}
	return dst, err
}

// appendValue appends the value that ref refers to. After an error it appends nothing.
func (s *Store) appendValue(dst []byte, ref ref, locations locations, src PageSource) ([]byte, error) {
	start := len(dst)
	dst, kind, err := s.appendFragments(dst, ref.id, locations, src)
	if err == nil && kind == fragmentHead {
		fragment := append([]byte(nil), dst[start:]...)
		dst, err = s.appendOverflow(dst[:start], ref.id, fragment)
	}
	if err != nil {
		return dst[:start], err
	}
	if value := dst[start:]; uint64(len(value)) != ref.length || crc32.Checksum(value, castagnoli) != ref.checksum {
		at := locations.locationOf(ref.id).page()
		return dst[:start], s.pager.Corrupt(at, fmt.Sprintf("blob %d is not the value of %d bytes that its leaf refers to", ref.id, ref.length))
	}
	return dst, nil
}

// PastCache reports whether Append reads pages past the cache for the value that r refers to.
func (s *Store) PastCache(r page.Ref) bool {
	pages, _ := split(Length(r), s.pageSize)
	return pages > 0
}

// locations says where fragments are: readers use the table, and a batch also uses its own changes.
type locations interface {
	locationOf(id uint64) location
}

// appendFragments appends the bytes of blob id, both fragments if it was cut. Its kind is whole or head.
func (s *Store) appendFragments(dst []byte, id uint64, locations locations, src PageSource) ([]byte, fragmentKind, error) {
	at := locations.locationOf(id)
	fragment, err := s.readFragment(id, at, src)
	if err != nil || fragment.kind&fragmentContinued == 0 {
		return append(dst, fragment.data...), fragment.kind, err
	}
	kind, second := fragment.kind&^fragmentContinued, binary.LittleEndian.Uint64(fragment.data)
	dst = append(dst, fragment.data[secondIDSize:]...)
	rest := locations.locationOf(second)
	if rest.page() == 0 {
		return dst, kind, s.pager.Corrupt(at.page(), fmt.Sprintf("blob %d continues in fragment %d, which is lost", id, second))
	}
	fragment, err = s.readFragment(second, rest, src)
	if err == nil && fragment.kind != fragmentSecond {
		err = s.pager.Corrupt(at.page(), fmt.Sprintf("blob %d continues in fragment %d, which is of kind %d", id, second, fragment.kind))
	}
	return append(dst, fragment.data...), kind, err
}

// readFragment reads the fragment with this id from its page.
func (s *Store) readFragment(id uint64, at location, src PageSource) (slotFragment, error) {
	if at.missing() {
		return slotFragment{}, s.pager.Corrupt(0, fmt.Sprintf("blob %d was not found when the indirection table was rebuilt", id))
	}
	if at.page() == 0 {
		return slotFragment{}, fmt.Errorf("%w: blob %d", ErrBadRef, id)
	}
	buf, err := src.BlobPage(at.page())
	if err != nil {
		return slotFragment{}, err
	}
	return s.fragmentIn(buf, id, at)
}

// fragmentIn finds a fragment in the page that the table names.
func (s *Store) fragmentIn(buf []byte, id uint64, at location) (slotFragment, error) {
	fragments, err := fragmentCount(buf)
	if err == nil && at.slot() >= fragments {
		err = fmt.Errorf("%w: fragment %d in slot %d of %d", errMalformed, id, at.slot(), fragments)
	}
	var fragment slotFragment
	if err == nil {
		fragment, err = fragmentAt(buf, at.slot(), fragments)
	}
	if err == nil && (fragment.id != id || cost(len(fragment.data), s.pageSize) != at.cost() || (fragment.kind&fragmentContinued != 0) != at.continued()) {
		err = fmt.Errorf("%w: slot %d holds fragment %d of %d bytes, not fragment %d", errMalformed, at.slot(), fragment.id, len(fragment.data), id)
	}
	if err != nil {
		return slotFragment{}, s.pager.Corrupt(at.page(), err.Error())
	}
	return fragment, nil
}

// overflowWindow bounds the memory, in bytes, that reading a long value takes in addition to the value.
const overflowWindow = 1 << 20

// window is this memory. It is used again: with a new one for each value, a read of 64 KiB took three times as long.
type window struct{ slab []byte }

var windows = sync.Pool{New: func() any { return new(window) }}

// bytes is n bytes of the window.
func (w *window) bytes(n int) []byte {
	if len(w.slab) < n {
		w.slab = vfs.AlignedBuffer(n)
	}
	return w.slab[:n]
}

// appendOverflow appends a value that begins in overflow pages.
func (s *Store) appendOverflow(dst []byte, id uint64, fragment []byte) ([]byte, error) {
	h, err := decodeHead(fragment, s.pageSize)
	if err != nil {
		return dst, s.pager.Corrupt(s.table.locationOf(id).page(), err.Error())
	}
	most := max(1, overflowWindow/s.pageSize)
	var reads []pager.Read
	h.pages(func(id page.ID) { reads = append(reads, pager.Read{ID: id}) })
	w := windows.Get().(*window)
	defer windows.Put(w)
	slab := w.bytes(min(most, len(reads)) * s.pageSize)
	if need := len(dst) + h.length; cap(dst) < need {
		dst = append(make([]byte, 0, need), dst...)
	}
	left := h.length - len(h.remainder)
	for len(reads) > 0 {
		now := reads[:min(most, len(reads))]
		for i := range now {
			now[i].Buf = slab[i*s.pageSize : (i+1)*s.pageSize]
		}
		if err := s.pager.ReadPages(now); err != nil {
			return dst, err
		}
		for i := range now {
			if t := page.ReadHeader(now[i].Buf).Type; t != page.TypeOverflow || overflowOwner(now[i].Buf) != id {
				return dst, s.pager.Corrupt(now[i].ID, fmt.Sprintf("page of type %d of blob %d, not an overflow page of blob %d", t, overflowOwner(now[i].Buf), id))
			}
			n := min(left, overflowBytes(s.pageSize))
			dst = append(dst, now[i].Buf[overflowPayload:overflowPayload+n]...)
			left -= n
		}
		reads = reads[len(now):]
	}
	return append(dst, h.remainder...), nil
}
