package lease

import (
	"container/heap"
	"context"
	"hash/maphash"
	"time"
)

// Clients have turns: when the leases of several have to be revoked, some of each are, for as long as a turn takes, and then the next ones of each. So a
// client whose leases end together delays its own ends, and those of another client only by a turn of each of both; and leases of one key need not wait for
// one of a thousand keys each time.
//
//	line of a client ─► its leases, by time
//	turns            ─► the lines, by the time since when each waits for its turn
//
// A client is a number of its name, by a secret hash: two with the same number would share their turns. Zero are all that are not known: a lease is of the
// client that granted it or kept it alive last, and after a restart of none until it is kept alive.

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

// line has the leases of a client, at least one.
type line struct {
	client uint64
	leases deadlines
	served time.Duration // when it had a turn last, or began to wait for one
	spent  time.Duration // on its leases since then
	index  int           // in turns
}

// lines are those of all clients.
type lines struct {
	all   map[uint64]*line
	turns turns // the same
}

// since is when the line began to wait for its turn, or will begin to.
func (l *line) since() time.Duration { return max(l.leases[0].at, l.served) }

// turns are lines by the times since when they wait, as a heap.
type turns []*line

func (t turns) Len() int           { return len(t) }
func (t turns) Less(i, j int) bool { return t[i].since() < t[j].since() }
func (t turns) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].index, t[j].index = i, j
}

// Push implements heap.Interface.
func (t *turns) Push(l any) {
	into := l.(*line) //nolint:forcetypeassert // by this package alone
	into.index = len(*t)
	*t = append(*t, into)
}

// Pop implements heap.Interface.
func (t *turns) Pop() any {
	last := (*t)[len(*t)-1]
	(*t)[len(*t)-1] = nil
	*t = (*t)[:len(*t)-1]
	return last
}

// schedule enters a lease, and reports whether it is the first. A line that did not wait begins to now, also with a lease that comes before all others of
// the client. Manager.mu is held.
func (m *Manager) schedule(e *entry, at time.Duration) (first bool) {
	e.at = at
	now := m.options.Elapsed()
	l := m.lines.all[e.client.Load()]
	if l != nil && l.since() > now {
		l.served = now
	}
	if l == nil {
		l = &line{client: e.client.Load(), served: now}
		m.lines.all[l.client] = l
		heap.Push(&l.leases, e)
		heap.Push(&m.lines.turns, l)
	} else {
		heap.Push(&l.leases, e)
		heap.Fix(&m.lines.turns, l.index)
	}
	return e.index == 0 && l.index == 0
}

// unschedule removes a lease. Manager.mu is held.
func (m *Manager) unschedule(e *entry) {
	l := m.lines.all[e.client.Load()]
	if l == nil || e.index < 0 || e.index >= len(l.leases) || l.leases[e.index] != e {
		return
	}
	if len(l.leases) == 1 {
		heap.Remove(&m.lines.turns, l.index)
		delete(m.lines.all, l.client)
	}
	if heap.Remove(&l.leases, e.index); len(l.leases) > 0 {
		heap.Fix(&m.lines.turns, l.index)
	}
}

// passTo makes a lease that was kept alive one of another client.
func (m *Manager) passTo(e *entry, client uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	scheduled, at := e.index != notScheduled, e.at
	e.mu.Lock()
	if !e.revoking {
		at = e.deadline
	}
	e.mu.Unlock()
	m.unschedule(e)
	if e.client.Store(client); scheduled {
		m.schedule(e, at)
	}
}

// passOver reports whether the first lease of a line was kept alive, and then enters it for its deadline. That is no turn of the client. Manager.mu is held.
func (m *Manager) passOver(l *line, now time.Duration) bool {
	e := l.leases[0]
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.revoking || e.deadline <= now {
		return false
	}
	e.at = e.deadline
	heap.Fix(&l.leases, 0)
	heap.Fix(&m.lines.turns, l.index)
	return true
}

// charge counts what a commit for a lease took as time of the client, which waits for its next turn when it has had as much as a turn takes.
func (m *Manager) charge(e *entry, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.lines.all[e.client.Load()]
	if l == nil { // when it has leases again, it waits anew
		return
	}
	if l.spent += took; l.spent >= m.turnTime/turnsAtOnce {
		l.spent, l.served = 0, m.options.Elapsed()
		heap.Fix(&m.lines.turns, l.index)
	}
}

// clientNumber is the client of a request.
func (m *Manager) clientNumber(ctx context.Context) uint64 {
	name := m.clientOf(ctx)
	if name == "" {
		return 0
	}
	return maphash.String(m.seed, name)
}

// wakeUp makes the expirer look again.
func (m *Manager) wakeUp() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}
