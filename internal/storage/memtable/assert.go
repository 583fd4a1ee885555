package memtable

import (
	"unsafe"

	"github.com/epochkv/epochkv/internal/invariants"
)

// The checks of this file are compiled in with the tag `invariants` only: they read whole chains and
// blocks. Release builds find a chain that is out of order when it is merged (btree.ErrInputOrder).

// checkChain checks that the versions of a node's chain descend by epoch and are as many as the node
// says. The caller holds the busy bit of the chain, so that no other Prune changes it.
func (t *Table) checkChain(node uint32) {
	if !invariants.Enabled {
		return
	}
	base := t.arena.base
	word := word64(base, node).Load()
	count := uint32(0)
	for v := offsetIn(word); v != 0; v = versionOlder(base, v).Load() {
		count++
		older := versionOlder(base, v).Load()
		if older != 0 && versionTrailer(base, older).Epoch() > versionTrailer(base, v).Epoch() {
			invariants.Fail("key %q: version %d is older in its chain than version %d", nodeKey(base, node),
				versionTrailer(base, older).Epoch(), versionTrailer(base, v).Epoch())
		}
	}
	checkSkips(base, node)
	if count != headIn(word) {
		invariants.Fail("key %q: a chain of %d versions counts %d", nodeKey(base, node), count, headIn(word))
	}
}

// checkSkips checks that every skip link of a chain leads to an older version in it that has one, too.
func checkSkips(base unsafe.Pointer, node uint32) {
	place := map[uint32]int{}
	for v := offsetIn(word64(base, node).Load()); v != 0; v = versionOlder(base, v).Load() {
		place[v] = len(place)
	}
	for v, at := range place {
		if !hasSkip(base, v) {
			continue
		}
		epoch, target := skipWords(base, v)
		e, to := epoch.Load(), offsetIn(target.Load())
		if e == 0 {
			continue
		}
		if there, ok := place[to]; !ok || there <= at || !hasSkip(base, to) || uint64(versionTrailer(base, to).Epoch()) != e {
			invariants.Fail("key %q: the skip link of version %d leads to %d, which is not in the chain after it", nodeKey(base, node),
				versionTrailer(base, v).Epoch(), e)
		}
	}
}

// checkSplit checks a block that is to be split: its keys ascend strictly, both halves have some,
// and none is before the anchor of the tower.
func (t *Table) checkSplit(tower uint32, ordered []uint64, cut int) {
	if !invariants.Enabled {
		return
	}
	base := t.arena.base
	if cut < 1 || cut >= len(ordered) {
		invariants.Fail("a block of %d slots is split at %d", len(ordered), cut)
	}
	for i := 1; i < len(ordered); i++ {
		if compareWords(base, ordered[i-1], ordered[i]) >= 0 {
			invariants.Fail("slot %d of a block, key %q, is not after %q", i, nodeKey(base, offsetIn(ordered[i])),
				nodeKey(base, offsetIn(ordered[i-1])))
		}
	}
	if anchor := towerAnchor(base, tower); anchor != 0 && compareNode(base, anchor, nodeKey(base, offsetIn(ordered[0]))) > 0 {
		invariants.Fail("key %q is before the anchor %q of its block", nodeKey(base, offsetIn(ordered[0])), nodeKey(base, anchor))
	}
}
