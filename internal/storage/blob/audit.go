package blob

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// ErrAccounts means that the blobs and their accounts disagree.
var ErrAccounts = errors.New("blob: the accounts are wrong")

// ErrUnreferenced is an ErrAccounts that costs space and no data: nothing refers to some blobs, which could not be read when they were dropped. All else
// fits.
var ErrUnreferenced = fmt.Errorf("%w: nothing refers to some blobs", ErrAccounts)

// Length is the length of the value that r refers to.
func Length(r page.Ref) int { return int(binary.LittleEndian.Uint64(r[8:])) }

// SameValue reports whether two references are to values of the same length and checksum.
func SameValue(a, b page.Ref) bool { return bytes.Equal(a[8:], b[8:]) }

// Direct reads blob pages from the file, past any cache, into one buffer: for verification, and where
// there is no cache.
type Direct struct {
	pager *pager.Reader
	buf   []byte
}

// Direct returns a source whose pages are valid until its next call.
func (s *Store) Direct() *Direct { return &Direct{pager: s.pager, buf: vfs.AlignedBuffer(s.pageSize)} }

// BlobPage implements PageSource.
func (d *Direct) BlobPage(id page.ID) ([]byte, error) { return d.buf, d.pager.ReadPage(id, d.buf) }

// Audit reads every blob and compares all blobs with the accounts. refs calls its argument once for each
// reference of the newest root. Audit calls reach for every page that the blobs and their table take. No
// batch may be open.
func (s *Store) Audit(refs func(each func(page.Ref) error) error, reach func(page.ID) error) error {
	a := &audit{s: s, src: s.Direct(), reach: reach}
	if err := refs(a.ref); err != nil {
		return err
	}
	err := a.sums()
	if a.lost = errors.Is(err, ErrUnreferenced); err != nil && !a.lost {
		return err
	}
	if err := a.table(); err != nil {
		return err
	}
	return cmp.Or(a.pages(), err)
}

// sums compares what the tree refers to with the accounts.
func (a *audit) sums() error {
	s := &a.s.state
	ids, kind := uint64(a.fragments.Count())+a.spare(), ErrAccounts
	switch n := a.unreferenced(); {
	case ids == s.Blobs && a.bytes == s.Bytes && a.overflowPages == s.OverflowPages:
		return nil
	case n > 0 && ids+n == s.Blobs && a.bytes <= s.Bytes && a.overflowPages <= s.OverflowPages:
		kind = ErrUnreferenced
	}
	return fmt.Errorf("%w: the tree refers to %d blobs of %d bytes in %d overflow pages, the accounts say %d of %d in %d",
		kind, ids, a.bytes, a.overflowPages, s.Blobs, s.Bytes, s.OverflowPages)
}

type audit struct {
	s             *Store
	src           *Direct
	reach         func(page.ID) error
	fragments     bitset.Set
	live          fill // bytes that the fragments found take on each page
	bytes         uint64
	overflowPages uint64
	value         []byte
	lost          bool // nothing refers to some blobs, and that is all that differs so far
}

// ref reads one value.
func (a *audit) ref(r page.Ref) (err error) {
	if a.value, err = a.s.Append(a.value[:0], r, a.src); err != nil {
		return err
	}
	ref, _ := decodeRef(r) // Append has decoded it
	if err := a.fragment(ref.id); err != nil {
		return err
	}
	p := a.s.table.locationOf(ref.id)
	a.bytes += ref.length
	if p.continued() {
		fragment, err := a.s.readFragment(ref.id, p, a.src)
		if err != nil {
			return err
		}
		if err := a.fragment(binary.LittleEndian.Uint64(fragment.data)); err != nil {
			return err
		}
	}
	if pages, _ := split(int(ref.length), a.s.pageSize); pages > 0 {
		return a.reachOverflow(ref.id)
	}
	return nil
}

// fragment adds one fragment to the sums.
func (a *audit) fragment(id uint64) error {
	p := a.s.table.locationOf(id)
	if !p.live() {
		return fmt.Errorf("%w: blob %d was dropped", ErrBadRef, id)
	}
	if !a.fragments.Add(int(id)) {
		return fmt.Errorf("%w: blob %d has two references", ErrBadRef, id)
	}
	a.live.capacity = a.s.fill.capacity
	a.live.put(p.page(), uint16(a.live.of(p.page())+p.cost()))
	return nil
}

// spare counts the ids that are in use and have no blob: a rebuild of the table could not read every leaf. No leaf has one of them, or ref had failed.
func (a *audit) spare() (ids uint64) {
	for id := range a.s.state.Slots {
		if at := a.s.table.locationOf(id); at.live() && at.missing() {
			ids++
		}
	}
	return ids
}

// unreferenced counts the live blobs to which nothing refers.
func (a *audit) unreferenced() (ids uint64) {
	for id := range a.s.state.Slots {
		if a.isUnreferenced(id) {
			ids++
		}
	}
	return ids
}

func (a *audit) isUnreferenced(id uint64) bool {
	return a.s.table.locationOf(id).found() && !a.fragments.Has(int(id))
}

func (a *audit) reachOverflow(id uint64) error {
	fragment, _, err := a.s.appendFragments(nil, id, a.s.table, a.src)
	if err != nil {
		return err
	}
	h, err := decodeHead(fragment, a.s.pageSize)
	if err != nil {
		return err
	}
	h.pages(func(at page.ID) {
		a.overflowPages++
		if err == nil {
			err = a.reach(at)
		}
	})
	return err
}

// table checks that the tree refers to every live blob.
func (a *audit) table() error {
	var err error
	for id := range a.s.state.Slots {
		if !a.lost && a.isUnreferenced(id) {
			return fmt.Errorf("%w: blob %d is live and nothing refers to it", ErrAccounts, id)
		}
	}
	a.s.storedTable.Pages(func(id page.ID) {
		if err == nil {
			err = a.reach(id)
		}
	})
	return err
}

// pages checks the fill of every blob page.
func (a *audit) pages() error {
	regions := max(len(a.live.regions), len(a.s.fill.regions))
	for id := range page.ID(regions * regionPages) {
		got, want := a.live.of(id), a.s.fill.of(id)
		if got != want && (!a.lost || got > want) {
			return fmt.Errorf("%w: live fragments take %d bytes of page %d, the accounts say %d", ErrAccounts, got, id, want)
		}
		if want == 0 {
			continue
		}
		if err := a.reach(id); err != nil {
			return err
		}
	}
	return nil
}
