package btree

import (
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Policy says which versions somebody can still see.
//
// A version is seen by the snapshots from its epoch up to, not including, that of the next newer version of its key. It is
// dropped if that interval ends at or before the largest snapshot known and holds none of them: in particular everything
// older than the newest version <= MinVisible goes, and so do interior versions between two snapshots. What is newer
// than every known snapshot stays, because a snapshot not yet taken may see it.
type Policy struct {
	// MinVisible is the smallest epoch that anybody may still read.
	MinVisible keys.Epoch
	// Live holds the epochs of live snapshots, ascending, all >= MinVisible. To have interior versions dropped up to the
	// frontier (the least epoch that a new snapshot can get), the caller makes it the last element.
	Snapshots []keys.Epoch
	// KeepDeletes keeps the newest version of every key, also if it is a tombstone: older ones may lie elsewhere.
	RetainTombstones bool
}

// history follows the versions of one key, newest first.
type keyHistory struct {
	newer keys.Epoch // epoch of the next newer version, valid if any
	any   bool       // a newer version exists
	done  bool       // nobody sees anything older
}

// over reports whether the leaf behind s begins with versions that nobody sees any more: the version in front of s, which is
// newer, is not newer than MinVisible. A merge takes such leaves along wherever it opens their parents. Or else a key that once had many
// versions would keep them, since new ones touch only its first leaf, and dropping its tombstone would bring them back.
func (p *Policy) past(s *page.Separator) bool {
	return s.Trailer != page.NoTrailer && (s.Trailer+1).Epoch() <= p.MinVisible
}

// historyAfter is the history of a key whose older versions begin in a leaf with this lower bound: the bound stands directly
// behind the version before.
func historyAfter(t keys.Trailer) keyHistory { return keyHistory{newer: (t + 1).Epoch(), any: true} }

// keep decides whether somebody can see the version of epoch e, the next older one of h.
func (p *Policy) retains(h *keyHistory, e keys.Epoch) bool {
	if h.done {
		return false
	}
	kept := !h.any || p.visible(e, h.newer)
	h.newer, h.any = e, true
	h.done = e <= p.MinVisible
	return kept
}

// seen reports whether a snapshot, live or still to come, is in [e, newer).
func (p *Policy) visible(e, newer keys.Epoch) bool {
	if newer <= p.MinVisible {
		return false
	}
	if e <= p.MinVisible {
		return true
	}
	i, _ := slices.BinarySearch(p.Snapshots, e)
	return i == len(p.Snapshots) || p.Snapshots[i] < newer
}
