package lease

import (
	"container/heap"
	"time"
)

// deadlines are leases by time, as a heap. A keep-alive does not move its lease in the heap: when the time has come, the
// expirer finds the later deadline, and enters it. So a keep-alive costs the same whatever the number of leases.
type deadlines []*entry

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].at < d[j].at }
func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].index, d[j].index = i, j
}

// Push implements heap.Interface.
func (d *deadlines) Push(e any) {
	into := e.(*entry) //nolint:forcetypeassert // by this package alone
	into.index = len(*d)
	*d = append(*d, into)
}

// Pop implements heap.Interface.
func (d *deadlines) Pop() any {
	last := (*d)[len(*d)-1]
	(*d)[len(*d)-1] = nil
	*d = (*d)[:len(*d)-1]
	last.index = notScheduled
	return last
}

const notScheduled = -1

// schedule enters a lease, and reports whether it is the first. Manager.mu is held.
func (m *Manager) schedule(e *entry, at time.Duration) (first bool) {
	e.at = at
	heap.Push(&m.deadlines, e)
	return e.index == 0
}

// unschedule removes a lease. Manager.mu is held.
func (m *Manager) unschedule(e *entry) {
	if e.index >= 0 && e.index < len(m.deadlines) && m.deadlines[e.index] == e {
		heap.Remove(&m.deadlines, e.index)
	}
}

// wakeUp makes the expirer look again.
func (m *Manager) wakeUp() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}
