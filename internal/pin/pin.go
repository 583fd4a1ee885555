// Package pin is the registry of readers: at which epochs snapshots are open, and which retired
// memory a reader may still use.
//
// Each session owns one Slot, alone on its cache lines. A slot has two words, which protect
// different things for different times:
//
//	tick   protects memory for one operation: while the slot holds a reclamation tick, no view,
//	       memtable, page frame, or reclaimed block that the operation could reach is reused;
//	epoch  protects versions for the life of a snapshot: while the slot holds an epoch, no version
//	       that is visible at that epoch is pruned.
//
// A long snapshot therefore delays version GC but never the reuse of frames and views, and a hot
// read writes only its own slot.
//
// Reclamation by ticks (the technique known as epoch-based reclamation). Enter stores the current
// tick in the slot; Leave stores zero. Retire advances the tick and returns the previous tick for
// the retired object. The object may be reused when no slot holds that tick or an older one
// (OldestTick). Invariant: a reader that can reach the object entered before it loaded the pointer
// to the object, so its slot holds a tick that is not larger than the tick of the retirement.
//
// Fences. A collector must see every reader that has reached the object that it is about to reuse:
// either the reader's store of its tick comes before the collector's scan, or the reader's load
// comes after the object was unlinked. That needs a full fence between the reader's store and its
// load. Go's atomic stores have that fence. ADR 0021 has its cost, and the alternative.
//
// Snapshots. The registration of a reader may race with a collector that computes the min-visible
// epoch. Both sides close the race. The collector publishes the GC low watermark and then scans the
// slots. A reader stores its epoch and then checks that the epoch is not below the low watermark;
// if it is, the reader takes a newer epoch. The same fences guarantee that at least one of the two
// sees the other. Epochs that must stay readable although no slot holds them have snapshot leases
// (type Lease), which resume tokens use. The registry keeps the leases; the retention time is an
// argument of AdvanceLowWatermark.
package pin
