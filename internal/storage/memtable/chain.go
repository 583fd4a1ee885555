package memtable

import (
	"sync/atomic"
	"unsafe"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// newVersion writes a version into reused or new memory, or returns zero.
func (t *Table) newVersion(in *Inserter, op *batch.Op, epoch keys.Epoch, flags uint32) uint32 {
	base := t.arena.base
	class, words := classOf(uint32(op.StoredBytes()) | flags)
	var v uint32
	if in.pooled != 0 && in.pooledClass == class || t.takeRun(in, class) {
		v = in.pooled
		in.pooled = versionOlder(base, v).Load()
	} else if v = in.alloc(words, 1); v == 0 {
		return 0
	}
	writeVersion(base, v, keys.MakeTrailer(epoch, op.Kind), flags, op.Value, op.Rest)
	return v
}

// takeRun gives in a run of free versions of a class, if there is one, in exchange for its run of
// another class.
func (t *Table) takeRun(in *Inserter, class int) bool {
	base := t.arena.base
	run := t.free.pop(base, class)
	if run == 0 {
		return false
	}
	if in.pooled != 0 {
		t.free.push(base, in.pooledClass, in.pooled, versionOlder(base, in.pooled).Load())
	}
	in.pooled, in.pooledClass = run, class
	return true
}

// install puts a version into the chain of node.
func (t *Table) install(in *Inserter, node, version uint32) {
	if hasSkip(t.arena.base, version) {
		t.installSkipping(in, node, version)
		return
	}
	t.link(in, node, version)
}

// link links a version into the chain of node: at the head, when commits of one key come in their
// order.
func (t *Table) link(in *Inserter, node, version uint32) {
	base := t.arena.base
	epoch := versionTrailer(base, version).Epoch()
	chain := word64(base, node)
	for {
		old := chain.Load()
		head := offsetIn(old)
		if (!in.Ordered || invariants.Enabled) && versionTrailer(base, head).Epoch() > epoch {
			if in.Ordered {
				panic("memtable: installed a version after a newer one of its key")
			}
			installLate(base, chain, head, version)
			return
		}
		setOlder(base, version, head)
		length := headIn(old) + 1
		if !chain.CompareAndSwap(old, pack(length, version)) {
			continue
		}
		if t.longChain != 0 && length%t.longChain == 0 && in.longChainCount < longChainsMax {
			in.longChains[in.longChainCount] = Chain{node}
			in.longChainCount++
		}
		return
	}
}

// installLate puts a version after newer ones. Commits never do that, because the latch orders
// them; replay by several workers may. It must not run during a Prune of the same chain.
func installLate(base unsafe.Pointer, chain *atomic.Uint64, head, version uint32) {
	epoch := versionTrailer(base, version).Epoch()
	for {
		newer, older := head, versionOlder(base, head).Load()
		for older != 0 && versionTrailer(base, older).Epoch() > epoch {
			newer, older = older, versionOlder(base, older).Load()
		}
		setOlder(base, version, older)
		if versionOlder(base, newer).CompareAndSwap(older, version) {
			break
		}
	}
	chain.Add(1 << 32)
}
