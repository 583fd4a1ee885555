package btree

import (
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Avoided are pages that merges do not read, with the upper bounds of their keys; nil for no bound.
type Avoided map[page.ID]*page.Separator

// ends are the upper bounds, sorted.
func (a Avoided) ends() (ends []page.Separator) {
	for _, upper := range a {
		if upper != nil {
			ends = append(ends, *upper)
		}
	}
	slices.SortFunc(ends, func(a, b page.Separator) int { return a.Compare(b.Key, b.Trailer) })
	return ends
}

// mustCover reports whether the keys from lower on would get into the range of an avoided page if the
// leaf that begins there disappeared.
func (m *merge) mustCover(lower *page.Separator) bool {
	if len(m.Avoid) == 0 {
		return false
	}
	if len(lower.Key) == 0 {
		return true // the next leaf of the tree would get its keys
	}
	_, found := slices.BinarySearchFunc(m.avoided, lower, func(end page.Separator, lower *page.Separator) int {
		return end.Compare(lower.Key, lower.Trailer)
	})
	return found
}

// coveredRun is a run of rewritten leaves of which something must stay, because the run begins where the
// range of an avoided page ends.
type coveredRun struct {
	open    bool // a run is under way
	needed  bool // something of it must stay
	lower   page.Separator
	dropped page.Entry // a tombstone that can stay; its key is empty if there is none

	wasTombstone bool // it was one before
}

// beginLeaf begins a leaf of a run, and returns where the new leaf begins if it is the first of the run.
func (r *coveredRun) beginLeaf(m *merge, lower page.Separator) page.Separator {
	if !r.open {
		*r = coveredRun{open: true, needed: m.mustCover(&lower), lower: lower, dropped: page.Entry{Key: r.dropped.Key[:0]}}
	}
	if r.needed {
		return r.lower
	}
	return lower
}

// drop sees a version of key that no snapshot can see, and that can therefore stay as a tombstone. The trailer of the
// tombstone is smaller, and may be past the upper bound of the leaf.
func (r *coveredRun) drop(key []byte, t keys.Trailer, upper *page.Separator) {
	tombstone := keys.MakeTrailer(t.Epoch(), keys.KindDelete)
	if len(r.dropped.Key) > 0 || upper != nil && upper.Compare(key, tombstone) <= 0 {
		return
	}
	r.dropped.Key, r.dropped.Trailer = append(r.dropped.Key, key...), tombstone
	r.wasTombstone = t == tombstone
}

// endRun ends the run before the partition continues with a leaf that stays, or ends.
func (w *worker) endRun() {
	r := &w.pack.covered
	if r.needed && w.pack.empty() && len(r.dropped.Key) > 0 {
		if r.wasTombstone {
			w.stats.TombstonesDropped--
		}
		w.stats.VersionsDropped--
		w.stats.Versions++
		w.stats.Bytes += int64(len(r.dropped.Key))
		w.pack.begin(r.lower)
		e := r.dropped // the packer lets the key of its argument point into its own buffer
		w.pack.add(&e, true)
	}
	r.open, r.needed = false, false
}
