package btree

import (
	"bytes"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Policy says which versions a snapshot can still see.
//
// A version is seen by the snapshots from its epoch up to, not including, the epoch of the next
// newer version of its key. The version is dropped if that interval ends at or before the largest
// known snapshot and contains none of them. So everything older than the newest version <=
// MinVisible is dropped, and so are interior versions between two snapshots. What is newer than
// every known snapshot stays, because a later snapshot may see it.
type Policy struct {
	// MinVisible is the smallest epoch at which a reader may still read.
	MinVisible keys.Epoch
	// Snapshots are the epochs of open snapshots, ascending, all >= MinVisible. To have interior
	// versions dropped up to the GC low watermark (the smallest epoch that a new snapshot can get),
	// the caller makes it the last element.
	Snapshots []keys.Epoch
	// System is the same for keys in keys.SpaceSystem, of which the past is not kept for as long; nil if Snapshots
	// is for all keys.
	System []keys.Epoch
	// RetainTombstones retains the newest version of every key, also if it is a tombstone: another
	// tree may have older versions.
	RetainTombstones bool
	// Expired are keys that no reader asks for any more: all their versions are dropped, whatever the snapshots.
	Expired Range
}

// Range is the keys in [Lower, Upper).
type Range struct{ Lower, Upper []byte }

// Has reports whether key is in the range. All keys of a range have the same keyspace, so that for most keys one byte
// decides.
func (r *Range) Has(key []byte) bool {
	return len(r.Upper) > 0 && key[0] == r.Upper[0] && bytes.Compare(key, r.Upper) < 0 && bytes.Compare(key, r.Lower) >= 0
}

// meets reports whether the range has keys from lower up to upper, of which nil is the end.
func (r *Range) meets(lower, upper *page.Separator) bool {
	return len(r.Upper) > 0 && bytes.Compare(lower.Key, r.Upper) < 0 && (upper == nil || bytes.Compare(upper.Key, r.Lower) > 0)
}

// keyHistory follows the versions of one key, newest first.
type keyHistory struct {
	newer  keys.Epoch   // epoch of the next newer version, valid if any
	any    bool         // a newer version exists
	least  keys.Epoch   // the smallest epoch at which a reader may read the key
	epochs []keys.Epoch // that snapshots of the key can have
	done   bool         // no snapshot sees anything older
}

// past reports whether the leaf after s begins with dead versions: the version before s, which is
// newer, is not newer than MinVisible. A merge rewrites such leaves wherever it opens their
// parents. Otherwise a key that once had many versions would keep them, because new ones change
// only its first leaf, and dropping its tombstone would bring them back.
func (p *Policy) past(s *page.Separator) bool {
	return s.Trailer != page.NoTrailer && (s.Trailer+1).Epoch() <= p.begin(s.Key).least
}

// begin begins the history of a key.
func (p *Policy) begin(key []byte) keyHistory {
	if p.System != nil && len(key) > 0 && keys.SpaceOf(key) == keys.SpaceSystem {
		return keyHistory{least: p.System[0], epochs: p.System}
	}
	return keyHistory{least: p.MinVisible, epochs: p.Snapshots}
}

// historyAfter is the history of a key whose older versions begin in a leaf with this lower bound:
// the bound is directly after the version before it.
func (p *Policy) historyAfter(s *page.Separator) keyHistory {
	h := p.begin(s.Key)
	h.newer, h.any = (s.Trailer + 1).Epoch(), true
	return h
}

// retains decides whether a snapshot can see the version of epoch e, which is the next older one of
// h.
func (p *Policy) retains(h *keyHistory, e keys.Epoch) bool {
	if h.done {
		return false
	}
	kept := !h.any || h.visible(e)
	h.newer, h.any = e, true
	h.done = e <= h.least
	return kept
}

// visible reports whether a snapshot, open or still to come, is in [e, newer).
func (h *keyHistory) visible(e keys.Epoch) bool {
	if h.newer <= h.least {
		return false
	}
	if e <= h.least {
		return true
	}
	i, _ := slices.BinarySearch(h.epochs, e)
	return i == len(h.epochs) || h.epochs[i] < h.newer
}
