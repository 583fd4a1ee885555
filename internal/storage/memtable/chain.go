package memtable

import (
	"sync/atomic"
	"unsafe"

	"epochkv/internal/storage/keys"
)

// newVersion writes a version into a recycled or new piece of memory.
func (t *Table) newVersion(in *Inserter, trailer keys.Trailer, sync bool, value []byte) uint32 {
	class, words := classOf(len(value))
	v := t.free.pop(t.arena.base, class)
	if v == 0 {
		v = in.alloc(words, 1)
	}
	writeVersion(t.arena.base, v, trailer, sync, value)
	return v
}

// install puts a version into the chain of node: at the head, when commits of one key come in their order.
func (t *Table) install(in *Inserter, node, version uint32) {
	base := t.arena.base
	epoch := versionTrailer(base, version).Epoch()
	chain := word64(base, node)
	for {
		old := chain.Load()
		head := offsetIn(old)
		if versionTrailer(base, head).Epoch() > epoch {
			installLate(base, chain, head, version)
			return
		}
		versionOlder(base, version).Store(head)
		length := headIn(old) + 1
		if !chain.CompareAndSwap(old, pack(length, version)) {
			continue
		}
		if t.crowdedAt != 0 && length%t.crowdedAt == 0 && in.crowdedN < crowdedMax {
			in.crowded[in.crowdedN] = Chain{node}
			in.crowdedN++
		}
		return
	}
}

// installLate puts a version behind newer ones. Commits never do that, for the latch orders them; replay by several workers
// may. It must not run beside a Prune of the same chain.
func installLate(base unsafe.Pointer, chain *atomic.Uint64, head, version uint32) {
	epoch := versionTrailer(base, version).Epoch()
	for {
		newer, older := head, versionOlder(base, head).Load()
		for older != 0 && versionTrailer(base, older).Epoch() > epoch {
			newer, older = older, versionOlder(base, older).Load()
		}
		versionOlder(base, version).Store(older)
		if versionOlder(base, newer).CompareAndSwap(older, version) {
			break
		}
	}
	chain.Add(1 << 32)
}
