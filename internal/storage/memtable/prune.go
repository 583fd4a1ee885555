package memtable

import (
	"github.com/epochkv/epochkv/internal/keys"
)

// Horizon says which versions somebody may still read.
type GCWatermarks struct {
	// MinVisible is the smallest epoch that any reader reads at. Per key, what is older than the newest version <= it goes.
	MinVisible keys.Epoch
	// Frontier is an epoch that no snapshot to come will be below. It is not below MinVisible.
	LowWatermark keys.Epoch
	// Live holds the epochs of all live snapshots from MinVisible to Frontier, ascending. With it, versions that lie between
	// two neighbours and are seen by neither go too. A nil Live leaves the interior alone.
	Snapshots []keys.Epoch
}

// sees reports whether a version that was current from epoch from until before epoch to may be read. place is where the
// search for Live's element starts from the end; versions come newest first, so it only moves down.
func (h *GCWatermarks) visible(from, to keys.Epoch, place *int) bool {
	if to > h.LowWatermark {
		return true
	}
	for *place >= 0 && h.Snapshots[*place] >= to {
		*place--
	}
	return *place >= 0 && h.Snapshots[*place] >= from
}

// Retired holds versions that were taken out of the interior of chains. Readers may be standing on them: Recycle gives
// them back once every reader that was under way has moved on.
type Retired struct{ versions []uint32 }

// Count is the number of versions held.
func (r *Retired) Count() int { return len(r.versions) }

// Recycle makes the memory of retired versions available again and empties r.
func (t *Table) Reclaim(r *Retired) {
	base, chain := t.arena.base, uint32(0)
	for _, v := range r.versions {
		setOlder(base, v, chain)
		chain = v
	}
	t.free.pushChain(base, chain)
	r.versions = r.versions[:0]
}

// chainBusy is the bit of a node's prune bound that a Prune under way has set.
const chainBusy = 1 << 63

// ChainLength is the number of versions in the chain.
func (t *Table) ChainLength(c Chain) int {
	return int(headIn(word64(t.arena.base, c.node).Load()))
}

// Prune drops the versions of one key that nobody can read, and returns how many. It takes no lock: if another Prune is at the
// chain, it leaves it alone.
//
// The cut tail is reused at once: a reader whose epoch is not below MinVisible stops at the version that was kept, or
// before. Interior versions go to retired. Installs of the key meanwhile are welcome, as long as they come in the order of their
// epochs; steps over all versions (Iter.Next, Iter.Prev) are not.
func (t *Table) Prune(c Chain, h *GCWatermarks, retired *Retired) (freed int) {
	base := t.arena.base
	bound := word64(base, c.node+nodeBoundWord)
	known := bound.Load()
	if known&chainBusy != 0 || keys.Epoch(known) > h.MinVisible && h.Snapshots == nil {
		return 0
	}
	if !bound.CompareAndSwap(known, known|chainBusy) {
		return 0
	}
	if h.Snapshots != nil {
		freed = t.pruneInterior(c, h, retired)
	}
	cut, next := t.cutOlder(c, h.MinVisible)
	freed += cut
	if freed > 0 {
		word64(base, c.node).Add(-(uint64(freed) << 32))
		t.stripes[0].packed.Add(-uint64(freed))
	}
	bound.Store(uint64(next))
	return freed
}

// pruneInterior takes out what lies between the newest version and the newest one <= MinVisible and is seen by nobody.
func (t *Table) pruneInterior(c Chain, h *GCWatermarks, retired *Retired) (freed int) {
	base := t.arena.base
	kept := offsetIn(word64(base, c.node).Load())
	place, until := len(h.Snapshots)-1, versionTrailer(base, kept).Epoch()
	for v := versionOlder(base, kept).Load(); v != 0 && until > h.MinVisible; {
		from, older := versionTrailer(base, v).Epoch(), versionOlder(base, v).Load()
		if from <= h.MinVisible || h.visible(from, until, &place) {
			kept = v
		} else {
			// Its own link stays, for whoever stands on it. What it leads to is not below MinVisible's version, or comes back to it.
			versionOlder(base, kept).Store(older)
			retired.versions = append(retired.versions, v)
			freed++
		}
		v, until = older, from
	}
	return freed
}

// cutTail frees everything older than the newest version <= minVisible, and returns the smallest horizon at which there may
// be more: the epoch of the second oldest version left. A version still to come has an epoch above minVisible.
func (t *Table) cutOlder(c Chain, minVisible keys.Epoch) (freed int, next keys.Epoch) {
	base := t.arena.base
	next = minVisible + 1
	v := offsetIn(word64(base, c.node).Load())
	for versionTrailer(base, v).Epoch() > minVisible {
		older := versionOlder(base, v).Load()
		if older == 0 {
			return 0, next
		}
		next = versionTrailer(base, v).Epoch()
		v = older
	}
	return t.free.pushChain(base, versionOlder(base, v).Swap(0)), next
}
