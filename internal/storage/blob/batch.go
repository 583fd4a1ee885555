package blob

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Batch is what one checkpoint does to the rows. It is for one goroutine. The same calls on the same store write the same bytes
// to the same pages.
type Batch struct {
	s       *Store
	ck      *pager.Checkpoint
	w       *pager.Writer
	state   pager.RowState
	changes map[uint64]place // where rows lie now, if not where the table says; zero if dropped
	fresh   map[page.ID]int  // cost of live rows on the data pages that the batch has written
	placed  []uint64
	dropped []uint64
	nextID  int
	run     pager.Extent // pages taken for data pages

	queue   []waiting
	queued  int    // cost of the queue
	arena   []byte // room for the rows that will wait
	scratch []byte // one page
	row     []byte // one row

	keepSparse bool // see KeepSparse

	stored *pager.Vector // the new state's table, once Finish has written it
}

// waiting is a row that has no page yet.
type waiting struct {
	id   uint64
	kind rowKind
	data []byte
}

// placeQueued stands for the place of a row that waits: not zero and not alive.
const placeQueued = placeDead

// Begin starts the batch of a checkpoint. It ends with the checkpoint.
func (s *Store) Begin(ck *pager.Checkpoint) *Batch {
	s.applyReleases(ck.Released())
	s.fill.begin()
	b := &Batch{
		s: s, ck: ck, w: ck.Writer(), state: s.state,
		changes: map[uint64]place{}, fresh: map[page.ID]int{}, scratch: vfs.AlignedBuffer(s.pageSize),
	}
	ck.OnEnd(b.commit, b.abort)
	return b
}

// applyReleases makes the ids of dropped rows usable again, once nobody can ask for them.
func (s *Store) applyReleases(through uint64) {
	for len(s.dropped) > 0 && s.dropped[0].checkpoint <= through {
		for _, id := range s.dropped[0].ids {
			s.table.set(id, 0)
			s.used.Remove(int(id))
		}
		s.dropped = s.dropped[1:]
	}
}

// at is where row id lies in the state under construction.
func (b *Batch) at(id uint64) place {
	if p, ok := b.changes[id]; ok {
		return p
	}
	return b.s.table.at(id)
}

// Place stores a value and returns what refers to it. The value is not used after the return.
func (b *Batch) Place(value []byte) (page.Ref, error) {
	if len(value) > ValueMax {
		return page.Ref{}, fmt.Errorf("blob: value of %d bytes, the limit is %d", len(value), ValueMax)
	}
	r := ref{b.newID(), uint64(len(value)), crc32.Checksum(value, castagnoli)}
	b.state.Bytes += r.length
	if pages, remainder := split(len(value), b.s.pageSize); pages == 0 {
		b.enqueue(r.id, rowWhole, value)
	} else if err := b.placeBulk(r.id, value, pages, remainder); err != nil {
		return page.Ref{}, err
	}
	return r.encode(), b.packWhileFull()
}

// newID takes the smallest row id that is not in use.
func (b *Batch) newID() uint64 {
	id := b.s.used.NextAbsent(b.nextID)
	b.s.used.Add(id)
	b.nextID = id + 1
	b.placed = append(b.placed, uint64(id))
	b.state.Rows++
	return uint64(id)
}

// placeBulk writes the bulk pages of a value, and lets its head wait.
func (b *Batch) placeBulk(id uint64, value []byte, pages, remainder int) error {
	h := head{length: len(value), extents: b.ck.AllocPieces(pages), remainder: value[len(value)-remainder:]}
	bulk := value[:len(value)-remainder]
	var err error
	h.pages(func(at page.ID) {
		n := min(len(bulk), bulkBytes(b.s.pageSize))
		if err == nil {
			err = b.writeBulk(at, id, bulk[:n])
		}
		bulk = bulk[n:]
	})
	b.state.BulkPages += uint64(pages)
	b.enqueue(id, rowHead, h.encode())
	return err
}

func (b *Batch) writeBulk(at page.ID, owner uint64, value []byte) error {
	buf, err := b.w.Page(at)
	if err != nil {
		return err
	}
	page.PutHeader(buf, page.Header{Type: page.TypeBulk, ID: at, Checkpoint: b.ck.Number()})
	putBulk(buf, owner, value)
	return nil
}

// Drop says that the state under construction does not refer to r any more. Of a row
// that cannot be read nobody knows what else belongs to it: it keeps its place, and an audit will say that nothing refers to it.
func (b *Batch) Drop(r page.Ref) error {
	ref, err := decodeRef(r)
	if err != nil {
		return err
	}
	if b.at(ref.id) == placeQueued { // placed by this batch
		if err := b.packQueue(); err != nil {
			return err
		}
	}
	p := b.at(ref.id)
	if !p.live() {
		return fmt.Errorf("%w: dropping row %d, which is not alive", ErrBadRef, ref.id)
	}
	if p.lost() {
		b.forget(ref.id, ref.length)
		return nil
	}
	var h head
	if pages, _ := split(int(ref.length), b.s.pageSize); pages > 0 {
		h, err = b.head(ref.id)
	}
	var tail uint64
	var at place
	if err == nil {
		tail, at, err = b.tail(ref.id, p)
	}
	if errors.Is(err, pager.ErrCorrupt) {
		return nil
	}
	if err != nil {
		return err
	}
	h.pages(func(id page.ID) {
		b.ck.Free(id)
		b.state.BulkPages--
	})
	if at != 0 {
		b.dropRow(tail, at)
	}
	b.subtract(p)
	b.forget(ref.id, ref.length)
	return nil
}

func (b *Batch) dropRow(id uint64, p place) {
	b.subtract(p)
	b.forget(id, 0)
}

// forget takes a row out of the table, and so many bytes of values off the account.
func (b *Batch) forget(id, bytes uint64) {
	b.changes[id] = 0
	b.dropped = append(b.dropped, id)
	b.state.Rows--
	b.state.Bytes -= bytes
}

// tail finds the second part of row id at p, if it has one: its place is not zero then.
func (b *Batch) tail(id uint64, p place) (tail uint64, at place, err error) {
	if !p.continued() {
		return 0, 0, nil
	}
	row, err := b.s.rowAt(id, p, b)
	if err != nil {
		return 0, 0, err
	}
	tail = binary.LittleEndian.Uint64(row.data)
	if at = b.at(tail); !at.live() || at.lost() {
		return 0, 0, b.s.pager.Corrupt(p.page(), fmt.Sprintf("row %d goes on in row %d, which is not alive", id, tail))
	}
	return tail, at, nil
}

// head reads the head row id. It is valid until the next.
func (b *Batch) head(id uint64) (h head, err error) {
	var kind rowKind
	if b.row, kind, err = b.s.appendRow(b.row[:0], id, b, b); err != nil {
		return head{}, err
	}
	if h, err = decodeHead(b.row, b.s.pageSize); err != nil || kind != rowHead {
		return head{}, b.s.pager.Corrupt(b.at(id).page(), fmt.Sprintf("row %d is no head: %v", id, err))
	}
	return h, nil
}

// DataPage implements PageSource, for pages of the batch's own too. It is valid until the next call.
func (b *Batch) DataPage(id page.ID) ([]byte, error) {
	if _, ok := b.fresh[id]; ok {
		if err := b.w.Flush(); err != nil {
			return nil, err
		}
	}
	return b.scratch, b.s.pager.ReadPage(id, b.scratch)
}

// subtract takes a row off its data page, and frees the page if it was the last.
func (b *Batch) subtract(p place) {
	id := p.page()
	if live, ok := b.fresh[id]; ok {
		b.fresh[id] = live - p.cost()
		if live == p.cost() {
			delete(b.fresh, id)
			b.ck.Free(id)
		}
		return
	}
	live := b.s.fill.of(id) - p.cost()
	b.s.fill.set(id, live)
	if live == 0 {
		b.ck.Free(id)
	}
}

// Finish writes what still waits, moves rows off pages at or past limit (zero for none) and off sparse ones, and hands the new row
// state to the checkpoint.
func (b *Batch) Finish(limit page.ID) error {
	if limit > 0 {
		if err := b.relocate(limit); err != nil {
			return err
		}
	}
	if err := b.evacuateSparse(); err != nil {
		return err
	}
	if err := b.packQueue(); err != nil {
		return err
	}
	if err := b.w.Flush(); err != nil {
		return err
	}
	for id, live := range b.fresh {
		b.s.fill.set(id, live)
	}
	b.state.DataPages = uint64(b.s.fill.pages)
	if err := b.writeTable(limit); err != nil {
		return err
	}
	b.ck.SetRows(b.state)
	return nil
}

// packQueue gives each row that waits its page.
func (b *Batch) packQueue() error {
	for len(b.queue) > 0 {
		if err := b.packPage(); err != nil {
			return err
		}
	}
	return nil
}

// writeTable writes the leaves of the table that change.
func (b *Batch) writeTable(limit page.ID) error {
	b.state.Slots = uint64(b.s.used.Last(b.s.used.Len()) + 1)
	perLeaf := uint64(b.s.leafRows())
	byLeaf := map[int][]uint64{}
	var dirty bitset.Set
	for id := range b.changes {
		leaf := int(id / perLeaf)
		dirty.Add(leaf)
		byLeaf[leaf] = append(byLeaf[leaf], id)
	}
	for i := 0; b.s.rebuilt && i < b.s.leaves(b.state.Slots); i++ {
		dirty.Add(i)
	}
	leaf := func(i int, payload []byte) {
		b.s.table.encodeLeaf(i, payload)
		for _, id := range byLeaf[i] {
			putTableEntry(payload, int(id%perLeaf), b.changes[id])
		}
	}
	next, err := b.ck.UpdateVector(b.s.stored, b.s.leaves(b.state.Slots), &dirty, limit, leaf)
	if err != nil {
		return err
	}
	b.stored, b.state.Table = next, next.Root()
	return nil
}

// commit makes the batch's changes the store's. The state that has them is durable, and no reader has its root yet.
func (b *Batch) commit() {
	s := b.s
	// Whoever finds the first part of a row must find the second.
	for _, continued := range [...]bool{false, true} {
		for id, p := range b.changes {
			if p == 0 {
				p = s.table.at(id) | placeDead // readers of older roots still find it
			}
			if p.continued() == continued {
				s.table.set(id, p)
			}
		}
	}
	if len(b.dropped) > 0 {
		s.dropped = append(s.dropped, droppedRows{b.ck.Number(), b.dropped})
	}
	if b.stored != nil {
		s.stored, s.state, s.rebuilt = b.stored, b.state, false
	}
	s.snapshotStats()
}

func (b *Batch) abort() {
	b.s.fill.undo()
	for _, id := range b.placed {
		b.s.used.Remove(int(id))
	}
}
