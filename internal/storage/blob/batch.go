package blob

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Batch is what one checkpoint does to the blobs. It is for one goroutine. The same calls on the same
// store write the same bytes to the same pages.
type Batch struct {
	s       *Store
	ck      *pager.Checkpoint
	w       *pager.Writer
	state   pager.BlobState
	changes map[uint64]location // the new location of each fragment that gets one
	earlier map[uint64]location // changes of older blobs that the stored table has; those in changes are newer
	byLeaf  map[int][]uint64    // ids of earlier, by the leaves of the stored table
	fresh   map[page.ID]int     // cost of live fragments on the blob pages that the fill does not know yet
	newIDs  []idRun             // ascending
	run     pager.Extent        // pages taken for blob pages

	queue    []queuedFragment
	queued   int    // cost of the queue
	arena    []byte // memory of queued fragments
	fragment []byte // one fragment
	pagesRead
	drops

	moves
	publishing bool // Publish does what commit would do for older blobs

	broken      error            // the first invariant that was found broken
	storedTable *pager.PageArray // the table of the new state, once Finish has written it
}

// idRun is ids that follow each other. A bulk load stores any number of values, most of them with such ids.
type idRun struct{ first, end uint64 }

// writeAt is how many changes a batch without a bound may have in memory.
const writeAt = 1 << 16

// queuedFragment is a fragment that has no page yet.
type queuedFragment struct {
	id   uint64
	kind fragmentKind
	data []byte
}

// locationQueued is the location of a queued fragment: neither zero nor live.
const locationQueued = locationDead

// Begin starts the batch of a checkpoint. The batch ends with the checkpoint.
func (s *Store) Begin(ck *pager.Checkpoint) *Batch {
	s.reuseIDs(ck.ReusedThrough())
	s.fill.begin()
	b := &Batch{
		s: s, ck: ck, w: ck.Writer(), state: s.state,
		changes: map[uint64]location{}, byLeaf: map[int][]uint64{}, fresh: map[page.ID]int{}, pagesRead: pagesRead{scratch: vfs.AlignedBuffer(s.pageSize)},
		drops: drops{unfreed: s.unfreed},
	}
	ck.OnEnd(b.commit, b.abort)
	return b
}

// reuseIDs makes the ids of dropped blobs usable again after their last readers are gone.
func (s *Store) reuseIDs(through uint64) {
	for len(s.dropped) > 0 && s.dropped[0].checkpoint <= through {
		s.dropped[0].each(func(id uint64) {
			s.table.set(id, 0)
			s.used.Remove(int(id))
		})
		s.dropped = s.dropped[1:]
	}
}

// locationOf is the location of blob id in the state under construction.
func (b *Batch) locationOf(id uint64) location {
	if b.dropped.has(id) {
		return 0
	}
	if p, ok := b.changes[id]; ok {
		return p
	}
	if p, ok := b.earlier[id]; ok {
		return p
	}
	return b.s.table.locationOf(id)
}

// Store stores a value and returns the reference to it. The batch copies the value.
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

// newID takes the smallest blob id that is not in use.
func (b *Batch) newID() uint64 {
	from := 0
	if n := len(b.newIDs); n > 0 {
		from = int(b.newIDs[n-1].end)
	}
	id := b.s.used.NextAbsent(from)
	b.s.used.Add(id)
	if b.locationOf(uint64(id)) != 0 {
		b.noteBroken("blob id %d is given to a new blob while it is in use", id)
	}
	if n := len(b.newIDs); n > 0 && from == id {
		b.newIDs[n-1].end++
	} else {
		b.newIDs = append(b.newIDs, idRun{uint64(id), uint64(id) + 1})
	}
	b.state.Blobs++
	return uint64(id)
}

// storeOverflow writes the overflow pages of a value, and queues its head.
func (b *Batch) storeOverflow(id uint64, value []byte, pages, remainder int) error {
	h := head{length: len(value), extents: b.ck.AllocPieces(pages), remainder: value[len(value)-remainder:]}
	overflow := value[:len(value)-remainder]
	var err error
	h.pages(func(at page.ID) {
		n := min(len(overflow), overflowBytes(b.s.pageSize))
		if err == nil {
			err = b.writeOverflow(at, id, overflow[:n])
		}
		overflow = overflow[n:]
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

// Drop removes the reference r from the state under construction. If the blob cannot be read, the pages
// that belong to it are unknown. Then the blob stays in the table, and an audit reports that nothing
// refers to it; see unfreed.
func (b *Batch) Drop(r page.Ref) error {
	ref, err := decodeRef(r)
	if err != nil {
		return err
	}
	if b.mayBeQueued(b.locationOf(ref.id)) {
		if err := b.packQueue(); err != nil {
			return err
		}
	}
	p := b.locationOf(ref.id)
	if !p.live() {
		return fmt.Errorf("%w: dropping blob %d, which is not live", ErrBadRef, ref.id)
	}
	if p.missing() {
		b.removeEntry(ref.id, ref.length)
		return nil
	}
	pages, _ := split(int(ref.length), b.s.pageSize)
	if pages == 0 && !p.continued() && p.cost() != cost(int(ref.length), b.s.pageSize) {
		return fmt.Errorf("%w: dropping blob %d of %d bytes, which has another length", ErrBadRef, ref.id, ref.length)
	}
	var h head
	b.unread = false
	if pages > 0 {
		if h, err = b.headFragment(ref.id); err == nil && uint64(h.length) != ref.length {
			err = b.s.pager.Corrupt(p.page(), fmt.Sprintf("blob %d has %d bytes, and its leaf refers to %d", ref.id, h.length, ref.length))
		}
	}
	var second uint64
	var at location
	if err == nil {
		second, at, err = b.secondFragment(ref.id, p)
	}
	unread := b.unread // of the fragments
	o := overflow{ref.id, page.ReadHeader(b.scratch).Checkpoint, h.extents}
	if err == nil && pages > 0 {
		err = b.checkOwner(&o)
	}
	if errors.Is(err, pager.ErrCorrupt) {
		b.s.failedDrops.Add(1)
		if unread {
			b.keepUnfreed(r)
		}
		return nil
	}
	if err != nil {
		return err
	}
	if at != 0 {
		b.dropFragment(second, at)
	}
	b.subtract(p)
	b.removeEntry(ref.id, ref.length)
	if pages > 0 {
		b.freeAll(&o)
	}
	return nil
}

// mayBeQueued reports whether a fragment of the blob at p may have no page yet: the blob was stored by this batch, and if
// its first fragment has a page, the second one may still be queued.
func (b *Batch) mayBeQueued(p location) bool {
	if p == locationQueued {
		return true
	}
	_, written := b.fresh[p.page()]
	return written && p.continued() && len(b.queue) > 0
}

func (b *Batch) dropFragment(id uint64, p location) {
	b.subtract(p)
	b.removeEntry(id, 0)
}

// removeEntry removes a blob from the table, and subtracts bytes from the sum of value bytes.
func (b *Batch) removeEntry(id, bytes uint64) {
	delete(b.changes, id)
	delete(b.earlier, id)
	b.dropped.add(id)
	b.outdated.Add(int(id) / b.s.leafEntries())
	b.state.Blobs--
	b.state.Bytes -= bytes
}

// secondFragment finds the second fragment of blob id, whose first one is at p. Its location is zero if
// there is none.
func (b *Batch) secondFragment(id uint64, p location) (second uint64, at location, err error) {
	if !p.continued() {
		return 0, 0, nil
	}
	fragment, err := b.s.readFragment(id, p, b)
	if err != nil {
		return 0, 0, err
	}
	second = binary.LittleEndian.Uint64(fragment.data)
	if at = b.locationOf(second); !at.found() {
		return 0, 0, b.s.pager.Corrupt(p.page(), fmt.Sprintf("blob %d continues in fragment %d, which is not live", id, second))
	}
	return second, at, nil
}

// headFragment reads the head fragment of blob id. It is valid until the next call.
func (b *Batch) headFragment(id uint64) (h head, err error) {
	var kind fragmentKind
	if b.fragment, kind, err = b.s.appendFragments(b.fragment[:0], id, b, b); err != nil {
		return head{}, err
	}
	if h, err = decodeHead(b.fragment, b.s.pageSize); err != nil || kind != fragmentHead {
		return head{}, b.s.pager.Corrupt(b.locationOf(id).page(), fmt.Sprintf("fragment of blob %d is not a head: %v", id, err))
	}
	return h, nil
}

// subtract removes a fragment from the fill of its blob page, and frees the page if it was the last.
func (b *Batch) subtract(p location) {
	id := p.page()
	if live, ok := b.fresh[id]; ok {
		if live < p.cost() {
			b.noteBroken("page %d loses %d bytes of fragments and has %d", id, p.cost(), live)
			return
		}
		b.fresh[id] = live - p.cost()
		if live == p.cost() {
			delete(b.fresh, id)
			b.ck.Free(id)
		}
		return
	}
	live := b.s.fill.of(id) - p.cost()
	if live < 0 {
		b.noteBroken("page %d loses %d bytes of fragments and has %d", id, p.cost(), live+p.cost())
		return
	}
	b.s.fill.set(id, live)
	if live == 0 {
		b.ck.Free(id)
	}
}

// Prepare does what Finish would do for the blobs that were stored and dropped so far, so that Finish has
// work for the later ones only. From then on sparse pages stay as they are, and the owner calls Publish after
// the commit. Prepare may be called again.
func (b *Batch) Prepare(ctx context.Context) error {
	if err := b.evacuateSparse(ctx); err != nil {
		return err
	}
	b.keepSparse = true
	return b.write()
}

// Relieve does what Prepare does, except for sparse pages, once there is much to do: so a batch with any number of new values
// takes little memory. Prepare must follow.
func (b *Batch) Relieve() error {
	if len(b.changes) < writeAt {
		return nil
	}
	return b.relieve()
}

func (b *Batch) relieve() error {
	b.s.fill.relieved += len(b.fresh)
	return b.write()
}

// write gives all queued fragments their pages, and writes the table.
func (b *Batch) write() error {
	if err := b.packQueue(); err != nil {
		return err
	}
	if err := b.w.Flush(); err != nil {
		return err
	}
	b.publishing = true
	b.fillFresh()
	if err := b.check(); err != nil {
		return b.ck.Fail(err)
	}
	return b.writeTable(0)
}

// Prepared reports whether nothing was stored, dropped or moved since the last call of Prepare.
func (b *Batch) Prepared() bool {
	return len(b.queue)+len(b.changes)+len(b.fresh)+b.outdated.Count() == 0
}

// fillFresh lets the fill know the pages that were written. Their fragments have no second parts in the queue.
func (b *Batch) fillFresh() {
	for id, live := range b.fresh {
		b.s.fill.set(id, live)
	}
	clear(b.fresh)
}

// Finish writes the queued fragments, moves fragments off pages at or past limit (zero for none) and
// off sparse pages, and gives the new blob state to the checkpoint.
func (b *Batch) Finish(ctx context.Context, limit page.ID) error {
	if err := b.writePages(ctx, limit); err != nil {
		return err
	}
	b.fillFresh()
	b.state.BlobPages = uint64(b.s.fill.pages)
	if err := b.check(); err != nil {
		return b.ck.Fail(err)
	}
	if err := b.writeTable(limit); err != nil {
		return err
	}
	b.ck.SetBlobs(b.s.stored(b.state))
	return nil
}

// writePages writes all fragments that have no page or must leave theirs.
func (b *Batch) writePages(ctx context.Context, limit page.ID) error {
	if !b.keepSparse {
		if err := b.freeUnfreed(); err != nil {
			return err
		}
	}
	if limit > 0 {
		if err := b.relocate(ctx, limit); err != nil {
			return err
		}
	}
	if err := b.evacuateSparse(ctx); err != nil {
		return err
	}
	if err := b.packQueue(); err != nil {
		return err
	}
	return b.w.Flush()
}

// packQueue gives each queued fragment its page.
func (b *Batch) packQueue() error {
	for len(b.queue) > 0 {
		if err := b.packPage(); err != nil {
			return err
		}
	}
	return nil
}

// writeTable writes the leaves of the indirection table that change.
func (b *Batch) writeTable(limit page.ID) error {
	b.state.Slots = uint64(b.s.used.Last(b.s.used.Len()) + 1)
	perLeaf := uint64(b.s.leafEntries())
	dirty := b.outdated
	b.outdated = bitset.Set{}
	for id := range b.changes {
		dirty.Add(int(id / perLeaf))
	}
	b.addNew()
	base := b.storedTable
	if base == nil {
		base = b.s.storedTable
		for i := 0; b.s.rebuilt && i < b.s.leaves(b.state.Slots); i++ {
			dirty.Add(i)
		}
	}
	leaf := func(i int, payload []byte) {
		b.s.table.encodeLeaf(i, payload)
		for _, id := range b.byLeaf[i] {
			putTableEntry(payload, int(id%perLeaf), b.locationOf(id))
		}
		first := uint64(i) * perLeaf
		b.dropped.eachIn(first, first+perLeaf, func(id uint64) { putTableEntry(payload, int(id-first), 0) })
	}
	next, err := b.ck.UpdateArray(base, b.s.leaves(b.state.Slots), &dirty, limit, leaf)
	if err != nil {
		return err
	}
	b.storedTable, b.state.Table = next, next.Root()
	return nil
}

// addNew enters the blobs that are new in the table in memory, before the state that has them is durable: no
// reader has a reference to them. What changes for older blobs waits for commit or Publish.
func (b *Batch) addNew() {
	for id, p := range b.changes {
		if b.s.table.locationOf(id) == 0 {
			b.s.table.set(id, p)
			continue
		}
		if b.earlier == nil {
			b.earlier = map[uint64]location{}
		}
		if _, known := b.earlier[id]; !known {
			leaf := int(id / uint64(b.s.leafEntries()))
			b.byLeaf[leaf] = append(b.byLeaf[leaf], id)
		}
		b.earlier[id] = p
	}
	b.changes = map[uint64]location{}
}

// commit publishes the batch's changes in the store. The state that has them is durable, and no reader
// has its root yet.
func (b *Batch) commit() {
	s := b.s
	if !b.publishing {
		b.Publish()
	}
	if b.dropped.count > 0 {
		s.dropped = append(s.dropped, newDroppedBlobs(b.ck.Number(), b.dropped))
	}
	s.unfreed = b.unfreed
	if b.storedTable != nil {
		s.storedTable, s.state, s.rebuilt = b.storedTable, b.state, false
	}
	s.publishStats()
}

// Publish gives readers the new locations of blobs that earlier states have. The checkpoint has committed. After a
// Prepare the owner calls it, before the next checkpoint and before the pages that this one freed may be reused: until
// then readers use the old locations, whose pages are unchanged.
func (b *Batch) Publish() {
	s := b.s
	// A reader that finds the first part of a blob must find the second. So second fragments come first.
	for _, continued := range [...]bool{false, true} {
		for id, p := range b.earlier {
			if p.continued() == continued {
				s.table.set(id, p)
			}
		}
	}
	b.earlier = nil
	b.dropped.each(func(id uint64) { s.table.set(id, s.table.locationOf(id)|locationDead) }) // readers of older roots still find it
}

func (b *Batch) abort() {
	b.s.fill.undo()
	for _, run := range b.newIDs {
		for id := run.first; id < run.end; id++ {
			b.s.used.Remove(int(id))
			if b.s.table.locationOf(id) != 0 {
				b.s.table.set(id, 0)
			}
		}
	}
}
