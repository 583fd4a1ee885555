package lease

import (
	"container/heap"
	"errors"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// tried are leases whose revocation goes on or is tried again, by deadline, as a heap: on a full disk all that have ended may be, and only the first tells how
// late they are. Their deadlines do not change any more. Guarded by Manager.mu.
type tried struct {
	leases  []*entry
	damaged map[*entry]error // those that have met damage
}

// add notes why the revocation of a lease has not ended.
func (t *tried) add(e *entry, err error) {
	if e.tried == 0 {
		heap.Push(t, e)
	}
	delete(t.damaged, e)
	if errors.Is(err, mvcc.ErrDamaged) {
		if t.damaged == nil {
			t.damaged = map[*entry]error{}
		}
		t.damaged[e] = err
	}
}

func (t *tried) remove(e *entry) {
	delete(t.damaged, e)
	if e.tried != 0 {
		heap.Remove(t, e.tried-1)
	}
}

// oldest is the lease with the first deadline, if there is any.
func (t *tried) oldest() []*entry { return t.leases[:min(1, len(t.leases))] }

// Len implements heap.Interface.
func (t *tried) Len() int { return len(t.leases) }

// Less implements heap.Interface.
func (t *tried) Less(i, j int) bool { return t.leases[i].deadline < t.leases[j].deadline }

// Swap implements heap.Interface.
func (t *tried) Swap(i, j int) {
	t.leases[i], t.leases[j] = t.leases[j], t.leases[i]
	t.leases[i].tried, t.leases[j].tried = i+1, j+1
}

// Push implements heap.Interface.
func (t *tried) Push(e any) {
	into := e.(*entry) //nolint:forcetypeassert // by this package alone
	t.leases = append(t.leases, into)
	into.tried = len(t.leases)
}

// Pop implements heap.Interface.
func (t *tried) Pop() any {
	last := t.leases[len(t.leases)-1]
	t.leases[len(t.leases)-1] = nil
	t.leases = t.leases[:len(t.leases)-1]
	last.tried = 0
	return last
}
