// Package pin is the registry of readers: who is reading at which epoch, and who may be standing on memory that
// somebody wants to reuse.
//
// Each session owns one Slot, alone on its cache lines. A slot carries two words with different lives:
//
//	tick   physical protection, held for one operation: while it is set, no view, memtable, page frame, or
//	       recycled block that the operation could have reached is reused (epoch-based reclamation);
//	epoch  logical protection, held for a snapshot: while it is set, no version visible at that epoch is pruned.
//
// A long snapshot therefore delays version GC but never the reuse of frames and views, and a hot read writes only
// its own slot.
//
// Reclamation. Enter stores the current tick in the slot; Leave stores zero. Retiring an object advances the tick and
// remembers the tick before; the object may be reused when no slot holds that tick or an older one (OldestTick).
// Invariant: a reader entered before it loaded the pointer to the object, so its slot holds a tick <= the retirement.
//
// Fences. A collector must see a reader that has reached what it is about to reuse: either the reader's store of its tick comes before the
// collector's scan, or the reader's load comes after the object was taken away. That needs a full fence between the reader's store and its
// load, which Go's atomic stores have. ADR 0021 has the figures of what it costs, and of the alternative.
//
// Snapshots. The race between a reader that registers and a collector that computes the minimum is closed from both
// sides. The collector publishes the frontier and then scans the slots; a reader stores its epoch and then checks that it is
// not below the frontier, else takes a newer one. The same fences make one of them see the other.
// Epochs that no slot holds but that must stay readable (scan tokens, retention) are Holds, kept in the same registry.
package pin
