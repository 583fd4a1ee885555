package pin

import (
	"container/heap"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// Lease is a snapshot lease: an epoch that stays readable without a slot.
type Lease struct {
	ID           uint64
	Epoch        keys.Epoch
	Since, Until time.Time
}

// AddLease takes a snapshot lease: it keeps a readable epoch readable until the given time, for a
// reader of the owner that will come back with a resume token. leasesMax bounds the number of epochs
// with a lease. One more ends, of the owner that has the most, what ends first, so that no owner
// keeps others out, or ends what they have. A slot of the caller holds e.
func (r *Registry) AddLease(e keys.Epoch, owner string, until time.Time, leasesMax int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.leases.parts[partKey{e, owner}]; p != nil {
		r.leases.extend(p, until)
		return
	}
	r.leases.makeRoom(e, owner, leasesMax)
	if r.leases.epochs[e] == nil {
		r.leases.epochs[e] = &leasedEpoch{id: r.NextID(), since: time.Now()}
	}
	r.leases.add(partKey{e, owner}, until)
}

// Leases returns the snapshot leases, in no order.
func (r *Registry) Leases() []Lease {
	r.mu.Lock()
	defer r.mu.Unlock()
	until := make(map[keys.Epoch]time.Time, len(r.leases.epochs))
	for key, p := range r.leases.parts {
		if p.until.After(until[key.epoch]) {
			until[key.epoch] = p.until
		}
	}
	list := make([]Lease, 0, len(r.leases.epochs))
	for e, l := range r.leases.epochs {
		list = append(list, Lease{ID: l.id, Epoch: e, Since: l.since, Until: until[e]})
	}
	return list
}

// EndLease ends a snapshot lease before its deadline, for all owners. It reports false if there is
// no such lease.
func (r *Registry) EndLease(id uint64) (lease Lease, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for e, l := range r.leases.epochs {
		if l.id == id {
			lease, found = Lease{ID: id, Epoch: e, Since: l.since}, true
		}
	}
	if !found {
		return Lease{}, false
	}
	for key, p := range r.leases.parts {
		if key.epoch != lease.Epoch {
			continue
		}
		if p.until.After(lease.Until) {
			lease.Until = p.until
		}
		r.leases.end(p)
	}
	return lease, true
}

// partsPerLease bounds the parts, together with the bound of leases: so many owners may have a part
// in each lease, on average.
const partsPerLease = 4

// leases are the snapshot leases of a registry, which has a mutex for them. Each owner that asked for
// an epoch has a part of its lease, and the lease lasts as long as any part. With one owner for each
// lease, an owner with few could take over those of another, and then lose them with its own.
type leases struct {
	epochs map[keys.Epoch]*leasedEpoch
	parts  map[partKey]*leasePart
	owners map[string]*leaseOwner
	most   indexedHeap[*leaseOwner] // the one with the most parts first
}

func newLeases() leases {
	return leases{epochs: map[keys.Epoch]*leasedEpoch{}, parts: map[partKey]*leasePart{}, owners: map[string]*leaseOwner{}}
}

// leasedEpoch is the lease of an epoch.
type leasedEpoch struct {
	id    uint64
	since time.Time
	parts int
}

type partKey struct {
	epoch keys.Epoch
	owner string
}

// leasePart is what an owner has of a lease.
type leasePart struct {
	key   partKey
	until time.Time
	index int // in the heap of the owner
}

// Before is for indexedHeap.
func (p *leasePart) Before(other *leasePart) bool { return p.until.Before(other.until) }

// Moved is for indexedHeap.
func (p *leasePart) Moved(index int) { p.index = index }

// leaseOwner is an owner that has parts of leases.
type leaseOwner struct {
	parts indexedHeap[*leasePart] // the one that ends first is the first
	index int                     // in the heap of owners
}

// Before is for indexedHeap.
func (o *leaseOwner) Before(other *leaseOwner) bool {
	if len(o.parts) != len(other.parts) {
		return len(o.parts) > len(other.parts)
	}
	return o.parts[0].Before(other.parts[0])
}

// Moved is for indexedHeap.
func (o *leaseOwner) Moved(index int) { o.index = index }

// add adds a part to the lease of an epoch.
func (l *leases) add(key partKey, until time.Time) {
	p := &leasePart{key: key, until: until}
	l.parts[key] = p
	l.epochs[key.epoch].parts++
	if o := l.owners[key.owner]; o != nil {
		heap.Push(&o.parts, p)
		heap.Fix(&l.most, o.index)
		return
	}
	o := &leaseOwner{parts: indexedHeap[*leasePart]{p}}
	l.owners[key.owner] = o
	heap.Push(&l.most, o)
}

// extend moves the end of a part to a later time, if it is one.
func (l *leases) extend(p *leasePart, until time.Time) {
	if !until.After(p.until) {
		return
	}
	p.until = until
	o := l.owners[p.key.owner]
	heap.Fix(&o.parts, p.index)
	heap.Fix(&l.most, o.index)
}

// end ends a part, and the lease if it was the last one.
func (l *leases) end(p *leasePart) {
	delete(l.parts, p.key)
	o := l.owners[p.key.owner]
	heap.Remove(&o.parts, p.index)
	if len(o.parts) > 0 {
		heap.Fix(&l.most, o.index)
	} else {
		heap.Remove(&l.most, o.index)
		delete(l.owners, p.key.owner)
	}
	leased := l.epochs[p.key.epoch]
	if leased.parts--; leased.parts == 0 {
		delete(l.epochs, p.key.epoch)
	}
}

// makeRoom ends parts until an owner may have another one, of e. Each part that it ends was added
// once, so that a call ends at most one on average.
func (l *leases) makeRoom(e keys.Epoch, owner string, leasesMax int) {
	for l.full(e, leasesMax) {
		from := l.most[0]
		if o := l.owners[owner]; o != nil && len(o.parts)+1 >= len(from.parts) {
			from = o // it would have the most
		}
		l.end(from.parts[0])
	}
}

// full reports whether there is no room for another part of the lease of e.
func (l *leases) full(e keys.Epoch, leasesMax int) bool {
	if len(l.parts) >= partsPerLease*leasesMax {
		return true
	}
	return l.epochs[e] == nil && len(l.epochs) >= leasesMax
}

// expire ends the parts whose deadline has passed.
func (l *leases) expire(now time.Time) {
	for _, o := range l.owners {
		for len(o.parts) > 0 && now.After(o.parts[0].until) {
			l.end(o.parts[0])
		}
	}
}

// indexedHeap is a heap whose elements know where they are in it. It implements heap.Interface.
type indexedHeap[T interface {
	Before(other T) bool
	Moved(index int)
}] []T

func (h indexedHeap[T]) Len() int           { return len(h) }
func (h indexedHeap[T]) Less(i, j int) bool { return h[i].Before(h[j]) }
func (h indexedHeap[T]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].Moved(i)
	h[j].Moved(j)
}

// Push implements heap.Interface.
func (h *indexedHeap[T]) Push(e any) {
	element := e.(T) //nolint:forcetypeassert // by this package alone
	element.Moved(len(*h))
	*h = append(*h, element)
}

// Pop implements heap.Interface.
func (h *indexedHeap[T]) Pop() any {
	n := len(*h) - 1
	last := (*h)[n]
	clear((*h)[n:])
	*h = (*h)[:n]
	return last
}
