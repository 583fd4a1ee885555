package memtable

import (
	"github.com/epochkv/epochkv/internal/keys"
)

// GCWatermarks say which versions a reader may still read.
type GCWatermarks struct {
	// MinVisible is the smallest epoch at which any reader reads. Per key, everything older than
	// the newest version <= MinVisible is dropped.
	MinVisible keys.Epoch
	// LowWatermark is the smallest epoch that a later snapshot can have. It is not below
	// MinVisible.
	LowWatermark keys.Epoch
	// Snapshots are the epochs of all open snapshots from MinVisible to LowWatermark, ascending.
	// With it, versions between two neighbours that neither of them sees are dropped, too. A nil
	// Snapshots leaves the interior of chains as it is.
	Snapshots []keys.Epoch
}

// visible reports whether a version that was current from epoch from until before epoch to may be
// read. index is the last element of Snapshots that may matter; versions come newest first, so it
// only decreases.
func (h *GCWatermarks) visible(from, to keys.Epoch, index *int) bool {
	if to > h.LowWatermark {
		return true
	}
	for *index >= 0 && h.Snapshots[*index] >= to {
		*index--
	}
	return *index >= 0 && h.Snapshots[*index] >= from
}

// Retired holds versions that were unlinked from the interior of chains. Readers may still be at
// them: Reclaim makes their memory usable after every reader that was active has left its guard.
type Retired struct {
	versions []uint32
	skips    []uint32 // memory for skipAnew
}

// Count is the number of versions held.
func (r *Retired) Count() int { return len(r.versions) }

// Reclaim makes the memory of retired versions available again and empties r.
func (t *Table) Reclaim(r *Retired) {
	base, chain := t.arena.base, uint32(0)
	for _, v := range r.versions {
		setOlder(base, v, chain)
		chain = v
	}
	t.free.pushChain(base, chain)
	r.versions = r.versions[:0]
}

// chainBusy is the bit of a node's prune bound that is set during a Prune.
const chainBusy = 1 << 63

// ChainLength is the number of versions in the chain.
func (t *Table) ChainLength(c Chain) int {
	return int(headIn(word64(t.arena.base, c.node).Load()))
}

// Prune drops the versions of one key that no reader can see, and returns how many. It takes no
// lock: if another Prune is at work on the chain, it does nothing.
//
// The memory of the cut end of the chain is reused at once: a reader whose epoch is not below
// MinVisible stops at the version before the cut, or earlier. Interior versions go to retired.
// Installs of the key may happen at the same time, as long as they come in the order of their
// epochs; steps over all versions (Iter.Next, Iter.Prev) may not.
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
	t.checkChain(c.node)
	if h.Snapshots != nil {
		freed = t.pruneInterior(c, h, retired)
	}
	interior := freed
	cut, next := t.cutOlder(c, h.MinVisible)
	freed += cut
	if interior > 0 {
		t.skipAnew(c.node, retired)
	}
	if freed > 0 {
		word64(base, c.node).Add(-(uint64(freed) << 32))
		t.stripes[0].packed.Add(-uint64(freed))
	}
	t.checkChain(c.node)
	bound.Store(uint64(next))
	return freed
}

// pruneInterior unlinks the versions between the newest one and the newest one <= MinVisible that
// no snapshot sees. It leaves one version with a skip link among skipEvery, whatever sees it.
func (t *Table) pruneInterior(c Chain, h *GCWatermarks, retired *Retired) (freed int) {
	base := t.arena.base
	kept := offsetIn(word64(base, c.node).Load())
	index, until := len(h.Snapshots)-1, versionTrailer(base, kept).Epoch()
	without := 0 // versions kept since the last one with a skip link
	for v := versionOlder(base, kept).Load(); v != 0 && until > h.MinVisible; {
		from, older := versionTrailer(base, v).Epoch(), versionOlder(base, v).Load()
		skips := hasSkip(base, v)
		if from <= h.MinVisible || h.visible(from, until, &index) || skips && without >= skipEvery {
			kept = v
			if without++; skips {
				without = 0
			}
		} else {
			// v keeps its own link for readers that are at v. The link leads to a version that is
			// not older than MinVisible's version, or that leads back to it.
			versionOlder(base, kept).Store(older)
			retired.versions = append(retired.versions, v)
			freed++
		}
		v, until = older, from
	}
	return freed
}

// cutOlder frees everything older than the newest version <= minVisible, and returns the smallest
// watermark at which there may be more to free: the epoch of the second oldest version left. A
// later version has an epoch above minVisible.
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
		unskip(base, v, minVisible)
		v = older
	}
	unskip(base, v, minVisible)
	return t.free.pushChain(base, versionOlder(base, v).Swap(0)), next
}
