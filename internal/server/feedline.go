package server

import (
	"slices"
	"sync"
	"sync/atomic"
)

// watchLine gives streams of watches room for large responses. In their share a stream gets room at once if it leaves at least as much
// free as its connection then has, and a third of what its client, the network of its address, has. The others wait for the place beside
// the share, which one response has, whatever its size is. They get it first come, first served, one for each client in turn, and one for
// each of its connections. So no stream waits for what the clients of others do not take, as long as the share
// has room for it, and one that needs much is not kept waiting by many that need little.
type watchLine struct {
	admission *admission
	beside    largeSlot // its owner is a watchRoom

	mu      sync.Mutex // guards what follows; before the mutex of no other
	waiting []*watchRoom
	clients perClient // bytes in the share
}

// watchRoom is the place of a stream in the line, and then its room.
type watchRoom struct {
	line   *watchLine
	conn   *connection
	client string
	bytes  int
	given  chan struct{} // closed when there is room
	holds  *atomic.Bool  // that there is; nil: the caller has no use for it

	has bool // room; guarded by line.mu
}

// enter waits in the line for room. The caller calls leave in the end, whether there was room or not.
func (l *watchLine) enter(conn *connection, client string, bytes int, holds *atomic.Bool) *watchRoom {
	r := &watchRoom{line: l, conn: conn, client: client, bytes: bytes, given: make(chan struct{}), holds: holds}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = append(l.waiting, r)
	l.serveLocked()
	return r
}

// leave gives back the room, or the place in the line. Only the first call has an effect; that of nil has none.
func (r *watchRoom) leave() {
	if r == nil {
		return
	}
	l := r.line
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !r.has:
		l.waiting = slices.DeleteFunc(l.waiting, func(one *watchRoom) bool { return one == r })
	case l.beside.leave(r, int64(r.bytes)):
		l.yieldLocked(func(one *watchRoom) bool { return one.conn == r.conn })
		l.yieldLocked(func(one *watchRoom) bool { return one.client == r.client })
	default:
		l.uncountLocked(r.conn, r.client, r.bytes)
	}
	if r.has {
		r.has = false
		r.tell(false)
	}
	l.serveLocked()
}

// hold counts something that waits for its stream in the share, if there is room for it. The caller calls unhold then.
func (l *watchLine) hold(conn *connection, client string, bytes int) bool {
	if bytes < countedBytesMin {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.fitsLocked(conn, client, bytes) {
		return false
	}
	l.countLocked(conn, client, bytes)
	return true
}

func (l *watchLine) unhold(conn *connection, client string, bytes int) {
	if bytes < countedBytesMin {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.uncountLocked(conn, client, bytes)
	l.serveLocked()
}

// countLocked counts bytes of a client in the share.
func (l *watchLine) countLocked(conn *connection, client string, bytes int) {
	l.admission.count(conn, shareWatches, bytes)
	l.clients.add(client, int64(bytes))
}

func (l *watchLine) uncountLocked(conn *connection, client string, bytes int) {
	l.admission.leave(conn, shareWatches, bytes)
	l.clients.add(client, -int64(bytes))
}

// yieldLocked puts the streams of what has had its turn after those of others.
func (l *watchLine) yieldLocked(had func(*watchRoom) bool) {
	var own []*watchRoom
	l.waiting = slices.DeleteFunc(l.waiting, func(r *watchRoom) bool {
		if had(r) {
			own = append(own, r)
			return true
		}
		return false
	})
	l.waiting = append(l.waiting, own...)
}

func (r *watchRoom) tell(has bool) {
	if r.holds != nil {
		r.holds.Store(has)
	}
}

// serveLocked gives room to the streams for which there is some.
func (l *watchLine) serveLocked() {
	l.waiting = slices.DeleteFunc(l.waiting, func(r *watchRoom) bool {
		switch {
		case l.fitsLocked(r.conn, r.client, r.bytes):
			l.countLocked(r.conn, r.client, r.bytes)
		case !l.beside.take(r, nil, int64(r.bytes)):
			return false
		}
		r.has = true
		r.tell(true)
		close(r.given)
		return true
	})
}

// fitsLocked reports whether the share has room for a connection.
func (l *watchLine) fitsLocked(conn *connection, client string, bytes int) bool {
	w := &l.admission.words[shareWatches]
	free := w.limit.free(w.word.Load() + uint64(bytes))
	return conn.bytes(shareWatches)+int64(bytes) <= free && l.clients[client]+int64(bytes) <= watchClientParts*free
}

// awaiting is how many connections have streams that wait. It stops counting at slotParts: more make no turn shorter.
func (l *watchLine) awaiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	var conns [slotParts]*connection
	n := 0
	for _, r := range l.waiting {
		if !slices.Contains(conns[:n], r.conn) {
			conns[n] = r.conn
			n++
		}
		if n == len(conns) {
			break
		}
	}
	return n
}
