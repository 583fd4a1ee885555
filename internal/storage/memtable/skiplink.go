package memtable

import (
	"sync/atomic"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
)

// A read of an old version passes all newer ones of its key, and a key that is overwritten all the time has very many if a
// snapshot or the history needs them. So every skipEvery-th version of a long chain has a skip link: two words after its value.
//
//	versions    ... ─► 320 ─► ... ─► 288 ─► ... ─► 256 ─► ... ─► 224 ─► ... ─► 192 ─► ...
//	skip links          └─────────────┘ └─────────────────────────────────────────┘
//
// A link leads to the version with a link before it, or over two neighbouring spans of equal length to the end of both (the
// jump pointers of Myers, "An applicative random-access stack", 1983). So a read among n versions takes about skipEvery ·
// log n steps, and each link is made from the three before it and stays as it is.
//
// Invariants
//   - A link leads to an older version of the same key, and all versions in between are newer than its target.
//   - A link has its target's epoch. A reader follows it only if that is above the epoch that it reads, and the target is then
//     still in the chain, or was retired while this reader was active: the end of a chain is cut below what anyone reads.
//   - While the chain's busy bit is held, every link leads to a version in the chain: Prune takes away those to versions that
//     it cuts off, and makes the links anew after it has unlinked others. So a new link is made under the busy bit.
//   - Among the versions that Prune leaves within a chain, about one of skipEvery has a link.
const (
	skipEvery = 32
	// skipFrom is the length from which a chain gets links. Chains whose old versions have no reader are pruned before.
	skipFrom = 128
	// skipSearchMax is how many versions a new link looks back for the link before it.
	skipSearchMax = 4 * skipEvery
	skipBytes     = 2 * wordBytes
)

// skipsAt reports whether the version that makes a chain so long has a link.
func skipsAt(length uint32) bool { return length%skipEvery == 0 && length >= skipFrom }

func hasSkip(base unsafe.Pointer, version uint32) bool {
	return versionLength(base, version)&versionSkips != 0
}

// skipWords are the words of a version's link: the epoch of its target, or zero if it leads nowhere, and the target's offset
// below the number of links that the version's link was made after.
func skipWords(base unsafe.Pointer, version uint32) (epoch, target *atomic.Uint64) {
	at := version + uint32(versionHeaderBytes+versionValueLen(base, version)+wordBytes-1)/wordBytes
	return word64(base, at), word64(base, at+1)
}

// skipPast follows the link of a version if it leads to one that is newer than at; else it returns zero. The link may change
// meanwhile: its epoch is taken away first.
func skipPast(base unsafe.Pointer, version uint32, at keys.Epoch) uint32 {
	epoch, target := skipWords(base, version)
	e := epoch.Load()
	if keys.Epoch(e) <= at {
		return 0
	}
	w := target.Load()
	if epoch.Load() != e {
		return 0
	}
	return offsetIn(w)
}

// skipTarget is where a version's link leads, or zero, and its depth. The caller holds the busy bit.
func skipTarget(base unsafe.Pointer, version uint32) (target, depth uint32) {
	epoch, word := skipWords(base, version)
	w := word.Load()
	if epoch.Load() == 0 {
		return 0, headIn(w)
	}
	return offsetIn(w), headIn(w)
}

// newSkip is where the link of the version after before leads, and its depth.
func newSkip(base unsafe.Pointer, before uint32) (to, depth uint32) {
	if before == 0 {
		return 0, 0
	}
	first, d := skipTarget(base, before)
	if first == 0 {
		return before, d + 1
	}
	second, f := skipTarget(base, first)
	if second == 0 {
		return before, d + 1
	}
	if _, s := skipTarget(base, second); d-f == f-s {
		return second, d + 1
	}
	return before, d + 1
}

// setSkip links a version, given the next older one with a link, or zero. The caller holds the busy bit.
func setSkip(base unsafe.Pointer, version, before uint32) {
	to, depth := newSkip(base, before)
	epoch, target := skipWords(base, version)
	epoch.Store(0)
	target.Store(pack(depth, to))
	if to != 0 {
		epoch.Store(uint64(versionTrailer(base, to).Epoch()))
	}
}

// installSkipping is install of a version with a link. If the chain is busy, or if commits do not come in order, the link leads
// nowhere.
func (t *Table) installSkipping(in *Inserter, node, version uint32) {
	base, bound := t.arena.base, word64(t.arena.base, node+nodeBoundWord)
	known := bound.Load()
	if known&chainBusy != 0 || !bound.CompareAndSwap(known, known|chainBusy) {
		t.link(in, node, version)
		return
	}
	newest := offsetIn(word64(base, node).Load())
	if versionTrailer(base, newest).Epoch() < versionTrailer(base, version).Epoch() {
		setSkip(base, version, nearestSkip(base, newest))
	}
	t.link(in, node, version)
	bound.Store(known)
}

// nearestSkip is the first version with a link, from v on; zero if it is not near.
func nearestSkip(base unsafe.Pointer, v uint32) uint32 {
	for range skipSearchMax {
		if v == 0 || hasSkip(base, v) {
			return v
		}
		v = versionOlder(base, v).Load()
	}
	return 0
}

// unskip takes away the link of a version if it leads to one that is not newer than epoch. The caller holds the busy bit.
func unskip(base unsafe.Pointer, version uint32, to keys.Epoch) {
	if !hasSkip(base, version) {
		return
	}
	if epoch, _ := skipWords(base, version); keys.Epoch(epoch.Load()) <= to {
		epoch.Store(0)
	}
}

// skipAnew makes the links of a chain again, after versions were unlinked from it. The caller holds the busy bit.
func (t *Table) skipAnew(node uint32, r *Retired) {
	base, with := t.arena.base, r.skips[:0]
	for v := offsetIn(word64(base, node).Load()); v != 0; v = versionOlder(base, v).Load() {
		if hasSkip(base, v) {
			with = append(with, v)
		}
	}
	before := uint32(0)
	for i := len(with) - 1; i >= 0; i-- {
		setSkip(base, with[i], before)
		before = with[i]
	}
	r.skips = with
}
