package blob

import (
	"cmp"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/epochkv/epochkv/internal/storage/pager"
)

// Several pages of a file may hold a fragment with the same id: copies from before it moved, and fragments of other
// blobs that had the id before. The numbers of the checkpoints that wrote the pages do not always tell which of them is
// in use: a checkpoint that was aborted, or that a crash ended, has the number of the next one, and a checkpoint may
// move a fragment twice. So Rebuild remembers all of them, and the checksum in a reference decides.

// copiesMax bounds the copies of one fragment that are remembered beside the newest one.
const copiesMax = 32

// copies are the fragments that Rebuild found. The newest of each is in the table.
type copies struct {
	written *indirectionTable         // in the place of a location, the checkpoint of the newest one: every fragment has one, as in the table
	others  map[uint64][]fragmentCopy // the newest first
}

func newCopies() *copies { return &copies{written: newTable(), others: map[uint64][]fragmentCopy{}} }

// fragmentCopy is where a page has a fragment, and the checkpoint that wrote the page.
type fragmentCopy struct {
	checkpoint uint64
	at         location
}

// compareCopies sorts the newer copy first. A checkpoint takes pages for fragments in ascending order, as a rule.
func compareCopies(a, b fragmentCopy) int {
	return cmp.Or(cmp.Compare(b.checkpoint, a.checkpoint), cmp.Compare(b.at.page(), a.at.page()), cmp.Compare(b.at.slot(), a.at.slot()))
}

// add enters a copy of fragment id, and returns the newest one; newest is the location of the newest one before, or zero.
func (c *copies) add(id uint64, newest location, found fragmentCopy) location {
	old := fragmentCopy{uint64(c.written.locationOf(id)), newest}
	if newest == 0 || newest == found.at {
		c.written.set(id, location(found.checkpoint))
		return found.at
	}
	if compareCopies(found, old) > 0 {
		found, old = old, found
	}
	c.written.set(id, location(found.checkpoint))
	all := c.others[id]
	if i, known := slices.BinarySearchFunc(all, old, compareCopies); !known {
		all = slices.Insert(all, i, old)
		c.others[id] = all[:min(len(all), copiesMax)]
	}
	return found.at
}

// locationsOf are the locations of all copies of fragment id, the newest first.
func (s *Store) locationsOf(id uint64) []location {
	all := []location{s.table.locationOf(id)}
	for _, other := range s.copies.others[id] {
		all = append(all, other.at)
	}
	return all
}

// enterCopy enters one of the copies of fragment id in the table. The one that was there stays a copy.
func (s *Store) enterCopy(id uint64, at location) {
	old, others := s.table.locationOf(id), s.copies.others[id]
	if old != 0 && old != at && !slices.ContainsFunc(others, func(c fragmentCopy) bool { return c.at == old }) {
		s.copies.others[id] = append(others, fragmentCopy{at: old})
	}
	s.table.set(id, at)
}

// choice is a table with one of the copies of each fragment of a blob.
type choice struct {
	table  *indirectionTable
	id     uint64
	at     location
	second uint64 // the id of the second fragment, if the first one is continued
	rest   location
}

func (c *choice) locationOf(id uint64) location {
	switch {
	case id == c.id:
		return c.at
	case id == c.second && c.at.continued():
		return c.rest
	}
	return c.table.locationOf(id)
}

// choose calls try for every combination of the copies of blob id, the newest first, until try returns no error, or one
// that is no damage. Otherwise it returns the first error.
func (s *Store) choose(id uint64, src PageSource, try func(c *choice) error) error {
	var first error
	for _, at := range s.locationsOf(id) {
		c := &choice{table: s.table, id: id, at: at}
		rests := []location{0}
		if at.continued() {
			fragment, err := s.readFragment(id, at, src)
			if err != nil {
				first = cmp.Or(first, err)
				continue
			}
			c.second = binary.LittleEndian.Uint64(fragment.data)
			rests = s.locationsOf(c.second)
		}
		for _, c.rest = range rests {
			err := try(c)
			if err == nil || !errors.Is(err, pager.ErrCorrupt) && !errors.Is(err, ErrBadRef) {
				return err
			}
			first = cmp.Or(first, err)
		}
	}
	return first
}
