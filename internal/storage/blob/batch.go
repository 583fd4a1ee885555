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
	state   pager.BlobState
	changes map[uint64]location // where rows lie now, if not where the table says; zero if dropped
	fresh   map[page.ID]int     // cost of live rows on the data pages that the batch has written
	newIDs  []uint64
	dropped []uint64
	nextID  int
	run     pager.Extent // pages taken for data pages

	queue    []queuedFragment
	queued   int    // cost of the queue
	arena    []byte // room for the rows that will wait
	scratch  []byte // one page
	fragment []byte // one row

	keepSparse bool // see KeepSparse

	storedTable *pager.PageArray // the new state's table, once Finish has written it
}

// queuedFragment is a row that has no page yet.
type queuedFragment struct {
	id   uint64
	kind fragmentKind
	data []byte
}

// locationQueued stands for the place of a row that waits: not zero and not alive.
const locationQueued = locationDead

// Begin starts the batch of a checkpoint. It ends with the checkpoint.
func (s *Store) Begin(ck *pager.Checkpoint) *Batch {
	s.reuseIDs(ck.ReusedThrough())
	s.fill.begin()
	b := &Batch{
		s: s, ck: ck, w: ck.Writer(), state: s.state,
		changes: map[uint64]location{}, fresh: map[page.ID]int{}, scratch: vfs.AlignedBuffer(s.pageSize),
	}
	ck.OnEnd(b.commit, b.abort)
	return b
}

// reuseIDs makes the ids of dropped rows usable again, once nobody can ask for them.
func (s *Store) reuseIDs(through uint64) {
	for len(s.dropped) > 0 && s.dropped[0].checkpoint <= through {
		for _, id := range s.dropped[0].ids {
			s.table.set(id, 0)
			s.used.Remove(int(id))
		}
		s.dropped = s.dropped[1:]
	}
}

// locationOf is where row id lies in the state under construction.
func (b *Batch) locationOf(id uint64) location {
	if p, ok := b.changes[id]; ok {
		return p
	}
	return b.s.table.locationOf(id)
}

// Store stores a value and returns what refers to it. The value is not used after the return.
func (b *Batch) Store(value []byte) (page.Ref, error) {
	if len(value) > ValueMax {
		return page.Ref{}, fmt.Errorf("blob: value of %d bytes, the limit is %d", len(value), ValueMax)
	}
	r := ref{b.newID(), uint64(len(value)), crc32.Checksum(value, castagnoli)}
	b.state.Bytes += r.length
	if pages, remainder := split(len(value), b.s.pageSize); pages == 0 {
		b.enqueue(r.id, fragmentWhole, value)
	} else if err := b.storeOverflow(r.id, value, pages, remainder); err != nil {
		return page.Ref{}, err
	}
	return r.encode(), b.packWhileFull()
}

// newID takes the smallest row id that is not in use.
func (b *Batch) newID() uint64 {
	id := b.s.used.NextAbsent(b.nextID)
	b.s.used.Add(id)
	b.nextID = id + 1
	b.newIDs = append(b.newIDs, uint64(id))
	b.state.Blobs++
	return uint64(id)
}

// storeOverflow writes the bulk pages of a value, and lets its head wait.
func (b *Batch) storeOverflow(id uint64, value []byte, pages, remainder int) error {
	h := head{length: len(value), extents: b.ck.AllocPieces(pages), remainder: value[len(value)-remainder:]}
	bulk := value[:len(value)-remainder]
	var err error
	h.pages(func(at page.ID) {
		n := min(len(bulk), overflowBytes(b.s.pageSize))
		if err == nil {
			err = b.writeOverflow(at, id, bulk[:n])
		}
		bulk = bulk[n:]
	})
	b.state.OverflowPages += uint64(pages)
	b.enqueue(id, fragmentHead, h.encode())
	return err
}

func (b *Batch) writeOverflow(at page.ID, owner uint64, value []byte) error {
	buf, err := b.w.Page(at)
	if err != nil {
		return err
	}
	page.PutHeader(buf, page.Header{Type: page.TypeOverflow, ID: at, Checkpoint: b.ck.Number()})
	putOverflow(buf, owner, value)
	return nil
}

// Drop says that the state under construction does not refer to r any more. Of a row
// that cannot be read nobody knows what else belongs to it: it keeps its place, and an audit will say that nothing refers to it.
func (b *Batch) Drop(r page.Ref) error {
	ref, err := decodeRef(r)
	if err != nil {
		return err
	}
	if b.locationOf(ref.id) == locationQueued { // placed by this batch
		if err := b.packQueue(); err != nil {
			return err
		}
	}
	p := b.locationOf(ref.id)
	if !p.live() {
		return fmt.Errorf("%w: dropping row %d, which is not alive", ErrBadRef, ref.id)
	}
	if p.missing() {
		b.removeEntry(ref.id, ref.length)
		return nil
	}
	var h head
	if pages, _ := split(int(ref.length), b.s.pageSize); pages > 0 {
		h, err = b.headFragment(ref.id)
	}
	var tail uint64
	var at location
	if err == nil {
		tail, at, err = b.secondFragment(ref.id, p)
	}
	if errors.Is(err, pager.ErrCorrupt) {
		return nil
	}
	if err != nil {
		return err
	}
	h.pages(func(id page.ID) {
		b.ck.Free(id)
		b.state.OverflowPages--
	})
	if at != 0 {
		b.dropFragment(tail, at)
	}
	b.subtract(p)
	b.removeEntry(ref.id, ref.length)
	return nil
}

func (b *Batch) dropFragment(id uint64, p location) {
	b.subtract(p)
	b.removeEntry(id, 0)
}

// removeEntry takes a row out of the table, and so many bytes of values off the account.
func (b *Batch) removeEntry(id, bytes uint64) {
	b.changes[id] = 0
	b.dropped = append(b.dropped, id)
	b.state.Blobs--
	b.state.Bytes -= bytes
}

// secondFragment finds the second part of row id at p, if it has one: its place is not zero then.
func (b *Batch) secondFragment(id uint64, p location) (tail uint64, at location, err error) {
	if !p.continued() {
		return 0, 0, nil
	}
	row, err := b.s.readFragment(id, p, b)
	if err != nil {
		return 0, 0, err
	}
	tail = binary.LittleEndian.Uint64(row.data)
	if at = b.locationOf(tail); !at.live() || at.missing() {
		return 0, 0, b.s.pager.Corrupt(p.page(), fmt.Sprintf("row %d goes on in row %d, which is not alive", id, tail))
	}
	return tail, at, nil
}

// headFragment reads the head row id. It is valid until the next.
func (b *Batch) headFragment(id uint64) (h head, err error) {
	var kind fragmentKind
	if b.fragment, kind, err = b.s.appendFragments(b.fragment[:0], id, b, b); err != nil {
		return head{}, err
	}
	if h, err = decodeHead(b.fragment, b.s.pageSize); err != nil || kind != fragmentHead {
		return head{}, b.s.pager.Corrupt(b.locationOf(id).page(), fmt.Sprintf("row %d is no head: %v", id, err))
	}
	return h, nil
}

// BlobPage implements PageSource, for pages of the batch's own too. It is valid until the next call.
func (b *Batch) BlobPage(id page.ID) ([]byte, error) {
	if _, ok := b.fresh[id]; ok {
		if err := b.w.Flush(); err != nil {
			return nil, err
		}
	}
	return b.scratch, b.s.pager.ReadPage(id, b.scratch)
}

// subtract takes a row off its data page, and frees the page if it was the last.
func (b *Batch) subtract(p location) {
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
	b.state.BlobPages = uint64(b.s.fill.pages)
	if err := b.writeTable(limit); err != nil {
		return err
	}
	b.ck.SetBlobs(b.state)
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
	perLeaf := uint64(b.s.leafEntries())
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
	next, err := b.ck.UpdateArray(b.s.storedTable, b.s.leaves(b.state.Slots), &dirty, limit, leaf)
	if err != nil {
		return err
	}
	b.storedTable, b.state.Table = next, next.Root()
	return nil
}

// commit makes the batch's changes the store's. The state that has them is durable, and no reader has its root yet.
func (b *Batch) commit() {
	s := b.s
	// Whoever finds the first part of a row must find the second.
	for _, continued := range [...]bool{false, true} {
		for id, p := range b.changes {
			if p == 0 {
				p = s.table.locationOf(id) | locationDead // readers of older roots still find it
			}
			if p.continued() == continued {
				s.table.set(id, p)
			}
		}
	}
	if len(b.dropped) > 0 {
		s.dropped = append(s.dropped, droppedBlobs{b.ck.Number(), b.dropped})
	}
	if b.storedTable != nil {
		s.storedTable, s.state, s.rebuilt = b.storedTable, b.state, false
	}
	s.publishStats()
}

func (b *Batch) abort() {
	b.s.fill.undo()
	for _, id := range b.newIDs {
		b.s.used.Remove(int(id))
	}
}
