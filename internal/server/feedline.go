package server

import (
	"slices"
	"sync"
	"sync/atomic"
)

// watchLine gives streams of watches room for large responses in their share, first come, first served. A stream is overtaken only
// while its own connection has room of the share and gets no more: its client may take nothing, and the others do not wait for that.
type watchLine struct {
	admission *admission

	mu      sync.Mutex // guards what follows; before the mutex of no other
	waiting []*watchRoom
}

// watchRoom is the place of a stream in the line, and then its room.
type watchRoom struct {
	line  *watchLine
	conn  *connection
	bytes int
	given chan struct{} // closed when there is room
	holds *atomic.Bool  // that there is; nil: the caller has no use for it

	has bool // room; guarded by line.mu
}

// enter waits in the line for room. The caller calls leave in the end, whether there was room or not.
func (l *watchLine) enter(conn *connection, bytes int, holds *atomic.Bool) *watchRoom {
	r := &watchRoom{line: l, conn: conn, bytes: bytes, given: make(chan struct{}), holds: holds}
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
	if r.has {
		r.has = false
		r.tell(false)
		l.admission.leave(r.conn, shareWatches, r.bytes)
	} else {
		l.waiting = slices.DeleteFunc(l.waiting, func(one *watchRoom) bool { return one == r })
	}
	l.serveLocked()
}

func (r *watchRoom) tell(has bool) {
	if r.holds != nil {
		r.holds.Store(has)
	}
}

// serveLocked gives room to the first of the line, and to those after it, up to one for which the share has none.
func (l *watchLine) serveLocked() {
	for i := 0; i < len(l.waiting); {
		r := l.waiting[i]
		holds := r.conn.holds(shareWatches)
		switch {
		case l.admission.tryEnter(r.conn, shareWatches, 0, r.bytes):
			r.has = true
			r.tell(true)
			close(r.given)
			l.waiting = slices.Delete(l.waiting, i, i+1)
		case holds:
			i++
		default:
			return
		}
	}
}

// isAwaited reports whether some stream waits.
func (l *watchLine) isAwaited() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiting) > 0
}
