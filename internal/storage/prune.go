package storage

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

const (
	// longChainLength is the chain length at whose multiples a key is queued for pruning. A reader at an old snapshot walks
	// at most about this far. Other lengths were not measured.
	longChainLength = 64
	// pruneQueueLength bounds the requests; a dropped one is repeated at the next multiple.
	pruneQueueLength = 1024
)

// pruner drops dead versions from the chains of active memtables. Writers queue keys with long chains; one background
// goroutine serves them.
type pruner struct {
	queue chan PruneRequest

	mu      sync.Mutex     // held while chains are pruned; a checkpoint takes it to be alone with a sealed generation
	waiting []retiredBatch // unlinked versions, oldest first, until their readers have left
	// again holds chains that stayed long, because their versions were still needed; at most pruneQueueLength. retry is
	// its other half, kept for reuse.
	again, retry map[PruneRequest]struct{}
	// round holds the chains that the present call has pruned: a hot key fills the queue with requests for itself, and each
	// would walk the whole chain once more.
	round map[PruneRequest]struct{}

	queued, dropped, pruned, reclaimed, assisted atomic.Uint64

	chainLengths  [ChainBuckets]atomic.Uint64 // see ChainBound
	chainVersions atomic.Uint64
}

// PruneStats counts the garbage collection of versions in memtables since Open.
type PruneStats struct {
	Queued, Dropped uint64 // keys queued; requests dropped because the queue was full
	Assisted        uint64 // chains that a writer pruned itself
	Pruned          uint64 // versions unlinked
	Reclaimed       uint64 // versions whose memory was reclaimed after their readers had left

	ChainLengths  [ChainBuckets]uint64 // of chains about to be pruned, see ChainBound
	ChainVersions uint64               // their sum
}

func (p *pruner) stats() PruneStats {
	s := PruneStats{
		Queued: p.queued.Load(), Dropped: p.dropped.Load(), Assisted: p.assisted.Load(),
		Pruned: p.pruned.Load(), Reclaimed: p.reclaimed.Load(), ChainVersions: p.chainVersions.Load(),
	}
	for i := range s.ChainLengths {
		s.ChainLengths[i] = p.chainLengths[i].Load()
	}
	return s
}

// ChainBuckets is the number of buckets for the length of a chain that is about to be pruned: bucket i counts those of at most ChainBound(i)
// versions, the last one all longer ones.
const ChainBuckets = 12

// ChainBound is the upper bound of bucket i: 64, 128, ... The last bucket has none.
func ChainBound(i int) int { return longChainLength << i }

// prune prunes one chain and counts its length.
func (p *pruner) prune(t *memtable.Table, c memtable.Chain, h *memtable.GCWatermarks, retired *memtable.Retired) {
	length := t.ChainLength(c)
	p.chainLengths[min(bits.Len(uint((length-1)/longChainLength)), ChainBuckets-1)].Add(1)
	p.chainVersions.Add(uint64(length))
	p.pruned.Add(uint64(t.Prune(c, h, retired)))
}

// PruneRequest names a long chain.
type PruneRequest struct {
	generation *generation
	chain      memtable.Chain
}

type retiredBatch struct {
	generation *generation
	versions   memtable.Retired
	tick       uint64
}

func newPruner() *pruner {
	return &pruner{
		queue: make(chan PruneRequest, pruneQueueLength),
		again: map[PruneRequest]struct{}{}, retry: map[PruneRequest]struct{}{}, round: map[PruneRequest]struct{}{},
	}
}

// QueueLongChains requests the pruning of the chains that w's last commit made long. It is called after the epoch of the
// commit is visible. A full queue drops the request; the call never waits. It returns the length of the longest chain.
func (e *Engine) QueueLongChains(w *Writer) (longest int) {
	for _, c := range w.inserter.LongChains() {
		select {
		case e.pruner.queue <- PruneRequest{w.generation, c}:
			e.pruner.queued.Add(1)
		default:
			e.pruner.dropped.Add(1)
		}
		longest = max(longest, w.generation.mem.ChainLength(c))
	}
	return longest
}

// PruneLongChains drops the dead versions of chains that w's last commit made long and that have minLength versions or more.
// It is called after the epoch of the commit is entered in the ring; before that, every later commit would wait for the
// walk. A sealed generation is left alone, because a checkpoint may walk it. While another goroutine prunes the call does
// nothing: the next one will.
func (e *Engine) PruneLongChains(w *Writer, minLength int) {
	p := e.pruner
	if !p.mu.TryLock() {
		return
	}
	defer p.mu.Unlock()
	if w.generation.sealed() {
		return
	}
	h := memtable.GCWatermarks{MinVisible: e.registry.MinVisible()}
	for _, c := range w.inserter.LongChains() {
		if w.generation.mem.ChainLength(c) >= minLength {
			p.assisted.Add(1)
			p.prune(w.generation.mem, c, &h, nil)
		}
	}
}

// AssistLength is the chain length from which writers prune themselves, so that a hot chain stays short although the
// collector is late.
const AssistLength = 2 * longChainLength

// MadeLongChain reports whether w's last commit made a chain long.
func (w *Writer) MadeLongChain() bool { return len(w.inserter.LongChains()) > 0 }

// PruneRequests delivers when there is something to prune.
func (e *Engine) PruneRequests() <-chan PruneRequest { return e.pruner.queue }

// Prune serves the first request and all that are queued; with again also those whose chains stayed long. It reclaims the
// versions that earlier calls unlinked and no reader can reach any more. The tables stay mapped because the call is inside
// the guard of the caller's slot.
func (e *Engine) Prune(slot *pin.Slot, first *PruneRequest, h memtable.GCWatermarks, again bool) {
	p := e.pruner
	slot.Enter()
	defer slot.Leave()
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.round)
	p.reclaimLocked(e.registry)
	if first != nil {
		p.pruneLocked(e.registry, *first, &h)
	}
	if again {
		p.again, p.retry = p.retry, p.again
		for q := range p.retry {
			p.pruneLocked(e.registry, q, &h)
		}
		clear(p.retry)
	}
	for {
		select {
		case q := <-p.queue: // the collector's goroutine may take requests too, so their number says nothing
			p.pruneLocked(e.registry, q, &h)
		default:
			return
		}
	}
}

func (p *pruner) pruneLocked(r *pin.Registry, q PruneRequest, h *memtable.GCWatermarks) {
	if _, done := p.round[q]; done {
		return
	}
	p.round[q] = struct{}{}
	if q.generation.sealed() {
		return // the checkpoint drops dead versions, and no other goroutine may change the table then
	}
	var retired memtable.Retired
	p.prune(q.generation.mem, q.chain, h, &retired)
	if retired.Count() > 0 {
		p.waiting = append(p.waiting, retiredBatch{q.generation, retired, r.Retire()})
	}
	if len(p.again) < pruneQueueLength && q.generation.mem.ChainLength(q.chain) >= longChainLength {
		p.again[q] = struct{}{}
	}
}

// reclaimLocked reclaims what was retired before the oldest reader entered its guard.
func (p *pruner) reclaimLocked(r *pin.Registry) {
	oldest := r.OldestTick()
	n := 0
	for n < len(p.waiting) && p.waiting[n].tick < oldest {
		if b := &p.waiting[n]; !b.generation.sealed() {
			p.reclaimed.Add(uint64(b.versions.Count()))
			b.generation.mem.Reclaim(&b.versions)
		}
		n++
	}
	p.waiting = slices.Delete(p.waiting, 0, n)
}

// quiesce waits until no goroutine prunes; generations that are sealed by now are left alone from then on.
func (p *pruner) quiesce() {
	p.mu.Lock()
	p.mu.Unlock() //nolint:staticcheck // the empty critical section is the point
}
