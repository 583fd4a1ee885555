package blob

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// Known is how well the pages of a state are known from which a table is rebuilt.
type Known uint8

// If all live pages are known and could be read, the newest copy of a fragment is the one of the state. If only those that could be read are known,
// there may be newer copies on other pages. If free pages are among them, the newest copy may be one that a checkpoint left that a crash ended.
const (
	KnownLive   Known = iota // the pages are the live ones; those that cannot be read have no blobs
	KnownAll                 // free pages are among them; those that cannot be read have no blobs
	KnownPartly              // a page that cannot be read may have blobs
)

// unreferenced decides about the fragments to which no leaf refers that could be read. A leaf that becomes readable again may refer to them, and its
// checksum then tells whether a value is the right one. But a drop compares nothing. So a copy is kept only if its drop takes nothing from another
// blob: if its overflow pages are of its own, and if nothing else can have its second fragment.
type unreferenced struct {
	*repair
	owners map[uint64]uint64 // of second fragments: the blob that continues in it
	kept   bitset.Set
}

// severalOwners is the owner of a second fragment in which copies of several blobs continue.
const severalOwners = ^uint64(0)

// keepUnreferenced gives a location to each blob to which no leaf refers that has a copy that can be kept, and to no other. If pages are missing, none
// that continues is kept: its second fragment may be a blob of its own on one of them. Its id would be given again, and dropped twice.
func (r *repair) keepUnreferenced(known Known) error {
	u := unreferenced{repair: r}
	if known != KnownPartly {
		if err := u.findOwners(); err != nil {
			return err
		}
	}
	for id := range r.s.state.Slots {
		if !u.is(id) {
			continue
		}
		err := r.s.choose(id, r.src, func(c *choice) error {
			if err := u.check(c); err != nil {
				return err
			}
			if c.at.continued() {
				u.kept.Add(int(c.second))
				r.s.enterCopy(c.second, c.rest)
			}
			u.kept.Add(int(id))
			r.s.enterCopy(id, c.at)
			return nil
		})
		if err != nil && !errors.Is(err, pager.ErrCorrupt) && !errors.Is(err, ErrBadRef) {
			return err
		}
	}
	r.forget(&u.kept)
	return nil
}

// is reports whether a fragment was found to which no leaf refers.
func (u *unreferenced) is(id uint64) bool {
	return u.s.table.locationOf(id).page() != 0 && !u.fragments.Has(int(id))
}

// findOwners reads all copies that continue.
func (u *unreferenced) findOwners() error {
	u.owners = map[uint64]uint64{}
	for id := range u.s.state.Slots {
		if !u.is(id) {
			continue
		}
		for _, at := range u.s.locationsOf(id) {
			if !at.continued() {
				continue
			}
			fragment, err := u.s.readFragment(id, at, u.src)
			if errors.Is(err, pager.ErrCorrupt) {
				continue
			}
			if err != nil {
				return err
			}
			second := binary.LittleEndian.Uint64(fragment.data)
			if owner, owned := u.owners[second]; owned && owner != id {
				u.owners[second] = severalOwners
			} else {
				u.owners[second] = id
			}
		}
	}
	return nil
}

// check reports a copy as damage that cannot be kept.
func (u *unreferenced) check(c *choice) error {
	if c.at.continued() {
		if err := u.checkSecond(c); err != nil {
			return err
		}
	}
	fragment, kind, err := u.s.appendFragments(nil, c.id, c, u.src)
	switch {
	case err != nil || kind == fragmentWhole:
		return err
	case kind != fragmentHead:
		return u.s.pager.Corrupt(c.at.page(), fmt.Sprintf("fragment %d is of kind %d", c.id, kind))
	}
	if u.value, err = u.s.appendOverflow(u.value[:0], c.id, fragment); err != nil {
		return err
	}
	return u.checkLive(c.id, fragment)
}

// checkSecond reports as damage if the second fragment of a copy may be one of another blob, or a blob of its own.
func (u *unreferenced) checkSecond(c *choice) error {
	foreign := u.s.pager.Corrupt(c.at.page(), fmt.Sprintf("blob %d continues in fragment %d, which may be another one's", c.id, c.second))
	owner, owned := u.owners[c.second]
	if !owned || owner != c.id || c.second >= u.s.state.Slots || u.fragments.Has(int(c.second)) {
		return foreign
	}
	all := u.s.locationsOf(c.second)
	if len(all) > copiesMax { // there may be others
		return foreign
	}
	for _, at := range all {
		fragment, err := u.s.readFragment(c.second, at, u.src)
		if err != nil {
			return err
		}
		if fragment.kind != fragmentSecond {
			return foreign
		}
	}
	return nil
}
