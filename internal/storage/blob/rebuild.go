package blob

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// Rebuild makes a read-only store from the blob pages themselves, for a file whose indirection table
// cannot be read. pages calls its argument for pages of the file: any type, any order, any number of
// times. Of several copies of a fragment a reader gets the one that its reference means.
func Rebuild(p *pager.Reader, pages func(each func(id page.ID, buf []byte)) error) (*Store, error) {
	s := &Store{
		pager: p, pageSize: p.PageSize(), table: newTable(), storedTable: &pager.PageArray{},
		copies: newCopies(),
	}
	s.fill.capacity = capacity(s.pageSize)
	bound := (uint64(p.PageCount()) + 1) * slotsMax // no file of so many pages ever had more blobs
	err := pages(func(id page.ID, buf []byte) {
		n, err := fragmentCount(buf)
		if err != nil {
			return
		}
		for slot := range n {
			r, err := fragmentAt(buf, slot, n)
			if err != nil || r.id >= bound {
				continue
			}
			at := makeLocation(id, slot, cost(len(r.data), s.pageSize), r.kind)
			s.table.set(r.id, s.copies.add(r.id, s.table.locationOf(r.id), fragmentCopy{page.ReadHeader(buf).Checkpoint, at}))
		}
	})
	s.publishStats()
	return s, err
}

// Repair opens the blobs of a state whose indirection table is damaged, so that the store can be used
// again. pages calls its argument for the live pages of the state that can be read, except those in but;
// live reports whether a page is one of them. refs calls its argument for each reference of the
// trees, and reports whether it could read all of them; known, which is called last, reports what pages of blobs these were.
// If a reference may be missing, Repair keeps every blob that a live page holds, and every id: a leaf that becomes readable again may refer to it. If
// pages of blobs may be missing as well, or free ones are among them, the copy that a page holds may be a foreign one: see unreferenced. The next
// batch writes the whole table.
//
// If a live page is missing, or if all pages may be live, the newest copy of a fragment may be a foreign one: of the same blob
// before it moved, or of another blob that had the id before. Its overflow pages and its second fragment
// may belong to other blobs now. So each value is read and compared with its reference, and a blob
// of which no copy is the one that its leaf refers to counts as lost: nothing is freed for it, ever.
//
// The state's own copies are on the device. Other copies may not be: the kernel shows pages of a checkpoint whose sync has failed, and never writes
// them. So Repair drops what the kernel has cached of the file, and reads what the device has.
//
// A page that the device fails to read may be intact, and readable later. If there is one, the table is doubtful: Repair gives
// up nothing (see doubt), and the table is to be rebuilt again (see RebuildAgain). The pages of the table itself do not count.
func Repair(p *pager.Reader, pages func(but *bitset.Set, each func(id page.ID, buf []byte)) error, live func(page.ID) bool,
	refs func(each func(page.Ref) error) (complete bool, err error), known func() Known,
) (*Store, error) {
	p.DropCache()
	state := p.Blobs()
	leaves := (&Store{pageSize: p.PageSize()}).leaves(state.Slots)
	stored := p.PartialArray(pager.ArrayIndirectionTable, state.Table, leaves, live)
	var own bitset.Set
	stored.Pages(func(id page.ID) { own.Add(int(id)) })
	own.Add(int(p.MapRoot())) // whatever it has: RebuildMap overwrites it
	others := func(each func(id page.ID, buf []byte)) error { return pages(&own, each) }
	before := p.Unreadable()
	s, err := Rebuild(p, others)
	if err != nil {
		return nil, err
	}
	s.state, s.rebuilt, s.storedTable = state, true, stored
	used := &repair{s: s, src: s.Direct(), live: func(id page.ID) bool { return !own.Has(int(id)) && live(id) }}
	complete, err := refs(used.ref)
	if err != nil {
		return nil, err
	}
	if pages := known(); !complete && pages != KnownLive {
		if err := used.keepUnreferenced(pages); err != nil {
			return nil, err
		}
	}
	if p.Unreadable() != before {
		complete = false
		used.doubt()
	}
	for id := range s.state.Slots {
		if s.table.locationOf(id) == 0 && (!complete || used.fragments.Has(int(id))) {
			s.table.set(id, locationMissing)
		}
	}
	s.state.Blobs = 0
	for id := range uint64(len(*s.table.chunks.Load())) * chunkEntries {
		at := s.table.locationOf(id)
		if at == 0 {
			continue
		}
		if id >= s.state.Slots || complete && !used.fragments.Has(int(id)) {
			s.table.set(id, 0)
			continue
		}
		s.used.Add(int(id))
		s.state.Blobs++
		if at != locationMissing {
			s.fill.put(at.page(), uint16(s.fill.of(at.page())+at.cost()))
		}
	}
	if complete {
		s.state.Bytes, s.state.OverflowPages = used.bytes, used.overflowPages
	}
	if s.doubtful {
		if err := s.pinPages(others); err != nil {
			return nil, err
		}
	}
	s.state.BlobPages = uint64(s.fill.pages)
	s.copies = nil // the table is complete
	s.fill.begin()
	s.publishStats()
	return s, nil
}

// doubt keeps every id in use. An id without a fragment may have one on a page that the device failed to read. A fragment to
// which no leaf refers that could be read may be an older copy: its id loses the location, so that nothing is freed for it.
func (r *repair) doubt() {
	r.s.doubtful, r.s.again = true, true
	r.forget(&bitset.Set{})
}

// forget keeps every id in use, and gives a location only to fragments to which a leaf refers, and to those in kept.
func (r *repair) forget(kept *bitset.Set) {
	for id := range r.s.state.Slots {
		if r.s.table.locationOf(id) == 0 || !r.fragments.Has(int(id)) && !kept.Has(int(id)) {
			r.s.table.set(id, locationMissing)
		}
	}
}

// pinPages pins the blob pages that have fragments that are not in the table, and those that can no longer be read: the next
// rebuild may need them.
func (s *Store) pinPages(pages func(each func(id page.ID, buf []byte)) error) error {
	var known bitset.Set
	if err := pages(func(id page.ID, buf []byte) {
		if s.hasNoOther(id, buf) {
			known.Add(int(id))
		}
	}); err != nil {
		return err
	}
	for id := range page.ID(len(s.fill.regions) * regionPages) {
		if s.fill.of(id) > 0 && !known.Has(int(id)) {
			s.fill.pin(id)
		}
	}
	return nil
}

// hasNoOther reports whether a blob page has no other fragments than those in the table, and of ids that are not in use.
func (s *Store) hasNoOther(id page.ID, buf []byte) bool {
	n, err := fragmentCount(buf)
	for slot := 0; slot < n && err == nil; slot++ {
		var r slotFragment
		if r, err = fragmentAt(buf, slot, n); err != nil || r.id >= s.state.Slots {
			continue
		}
		if at := s.table.locationOf(r.id); at.page() != id || at.slot() != slot {
			return false
		}
	}
	return err == nil
}

// repair collects the blobs that a state refers to.
type repair struct {
	s             *Store
	src           *Direct
	live          func(page.ID) bool
	fragments     bitset.Set
	leaves        bitset.Set          // ids to which leaves refer: no second fragment has one of them
	seconds       map[uint64]page.Ref // of second fragments that find has entered: the reference of their blob
	bytes         uint64
	overflowPages uint64
	value         []byte // the last one that was read
}

func (r *repair) ref(to page.Ref) error {
	ref, err := decodeRef(to)
	if err != nil {
		return err
	}
	r.fragments.Add(int(ref.id))
	r.leaves.Add(int(ref.id))
	r.bytes += ref.length
	pages, _ := split(int(ref.length), r.s.pageSize)
	r.overflowPages += uint64(pages)
	if r.s.table.locationOf(ref.id).page() == 0 {
		return nil
	}
	if of, entered := r.seconds[ref.id]; entered { // an older copy of that blob was entered
		delete(r.seconds, ref.id)
		if err := r.find(of); err != nil {
			return err
		}
	}
	return r.find(to)
}

// find enters the copies of the fragments of a blob that are the value that its leaf refers to. If there are none, the
// blob is lost.
func (r *repair) find(to page.Ref) error {
	ref, err := decodeRef(to)
	if err != nil {
		return err
	}
	err = r.enter(to, ref.id, map[uint64]bool{})
	if errors.Is(err, pager.ErrCorrupt) || errors.Is(err, ErrBadRef) {
		r.s.table.set(ref.id, 0)
		return nil
	}
	return err
}

// enter enters the first copy of blob id that is the value that its leaf refers to, and whose second fragment, if it has one, can have
// its id: see enterSecond.
func (r *repair) enter(to page.Ref, id uint64, tried map[uint64]bool) error {
	return r.s.choose(id, r.src, func(c *choice) error {
		if err := r.compare(to, c); err != nil {
			return err
		}
		if c.at.continued() {
			if err := r.enterSecond(to, c, tried); err != nil {
				return err
			}
		}
		r.s.enterCopy(id, c.at)
		return nil
	})
}

// enterSecond enters the second fragment of a copy. A checkpoint that was aborted, or that a crash ended, may have moved a blob and given its
// second fragment an id that a later one gave to another blob, or to none. Such a copy is the value, and cannot be used. If a copy of
// another blob was entered that has the same second id, that blob gets another copy if it has one. In the state each blob has a copy of its own,
// so this way finds a copy for each. tried are the second ids that are looked at already.
func (r *repair) enterSecond(to page.Ref, c *choice, tried map[uint64]bool) error {
	if c.second >= r.s.state.Slots || r.leaves.Has(int(c.second)) || tried[c.second] {
		return r.s.pager.Corrupt(c.at.page(), fmt.Sprintf("blob %d continues in fragment %d, which is another one's", c.id, c.second))
	}
	if other, entered := r.seconds[c.second]; entered && other != to {
		tried[c.second] = true
		ref, err := decodeRef(other)
		if err != nil {
			return err
		}
		if err := r.enter(other, ref.id, tried); err != nil {
			return err
		}
	}
	if r.seconds == nil {
		r.seconds = map[uint64]page.Ref{}
	}
	r.seconds[c.second] = to
	r.fragments.Add(int(c.second))
	r.s.enterCopy(c.second, c.rest)
	return nil
}

// compare reads a value, and reports as damage if it is not the one that its leaf refers to, or if it
// takes pages that are not live: these hold an older copy of the same blob.
func (r *repair) compare(to page.Ref, c *choice) error {
	ref, err := decodeRef(to)
	if err != nil {
		return err
	}
	if r.value, err = r.s.appendValue(r.value[:0], ref, c, r.src); err != nil {
		return err
	}
	fragment, kind, err := r.s.appendFragments(nil, c.id, c, r.src)
	if err != nil || kind != fragmentHead {
		return err
	}
	return r.checkLive(c.id, fragment)
}

// checkLive reports as damage if blob id, which has this head, takes pages that are not live.
func (r *repair) checkLive(id uint64, fragment []byte) error {
	h, err := decodeHead(fragment, r.s.pageSize)
	if err != nil {
		return err
	}
	h.pages(func(at page.ID) {
		if err == nil && !r.live(at) {
			err = r.s.pager.Corrupt(at, fmt.Sprintf("page of an older copy of blob %d", id))
		}
	})
	return err
}

// Reach calls each for every page that the blobs and their table take, as far as they can be read, and
// reports whether these are all: all of them could be read, and the table is not doubtful.
func (s *Store) Reach(each func(page.ID) error) (complete bool, err error) {
	s.storedTable.Pages(func(id page.ID) {
		if err == nil {
			err = each(id)
		}
	})
	complete = !s.doubtful
	src := s.Direct()
	for id := page.ID(0); err == nil && id < page.ID(len(s.fill.regions)*regionPages); id++ {
		if s.fill.of(id) == 0 {
			continue
		}
		if err = each(id); err != nil {
			break
		}
		buf, unreadable := src.BlobPage(id)
		if unreadable != nil {
			complete = false
			continue
		}
		if unreadable = s.reachOverflow(id, append([]byte(nil), buf...), each); unreadable != nil {
			complete = false
		}
	}
	return complete, err
}

// reachOverflow calls each for the overflow pages of the blobs whose heads are in a blob page.
func (s *Store) reachOverflow(id page.ID, buf []byte, each func(page.ID) error) error {
	n, err := fragmentCount(buf)
	for slot := 0; slot < n && err == nil; slot++ {
		var fragment slotFragment
		if fragment, err = fragmentAt(buf, slot, n); err != nil || fragment.kind&^fragmentContinued != fragmentHead {
			continue
		}
		if at := s.table.locationOf(fragment.id); at.page() != id || at.slot() != slot {
			continue // a fragment that is no longer in the table
		}
		var whole []byte
		var h head
		if whole, _, err = s.appendFragments(nil, fragment.id, s.table, s.Direct()); err != nil {
			continue
		}
		if h, err = decodeHead(whole, s.pageSize); err != nil {
			continue
		}
		h.pages(func(at page.ID) {
			if err == nil {
				err = each(at)
			}
		})
	}
	return err
}
