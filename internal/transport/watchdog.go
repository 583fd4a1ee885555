package transport

import (
	"context"
	"sync"
	"time"
)

// watchdog gives the reader role of a connection to another goroutine when the one that has it
// executes a request for long. It looks at connections that have executed requests of late only.
type watchdog struct {
	every time.Duration // between two looks
	wake  chan struct{} // a token when the list is no longer empty

	mu   sync.Mutex
	list []*watchedConn
}

type watchedConn struct {
	conn *Conn
	role uint64 // as of the last tick
}

// watch adds a connection to the list.
func (w *watchdog) watch(c *Conn) {
	if c.watched.Swap(true) {
		return
	}
	w.mu.Lock()
	w.list = append(w.list, &watchedConn{conn: c, role: c.role.Load() - 1}) // so it has a whole tick
	first := len(w.list) == 1
	w.mu.Unlock()
	if first {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

func (w *watchdog) run(ctx context.Context) {
	ticker := time.NewTicker(w.every)
	defer ticker.Stop()
	for {
		if w.tick() == 0 {
			ticker.Stop()
			select {
			case <-ctx.Done():
				return
			case <-w.wake:
			}
			ticker.Reset(w.every)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// tick looks at each connection of the list, and returns the list's length.
func (w *watchdog) tick() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	kept := w.list[:0]
	for _, at := range w.list {
		role := at.conn.role.Load()
		switch {
		case role != at.role: // it proceeds
			at.role = role
		case role%2 == 0: // it rests
			at.conn.watched.Store(false)
			if at.conn.role.Load() == role || at.conn.watched.Swap(true) {
				continue
			} // it has begun to execute meanwhile, and has not seen that it is not watched
		case at.conn.role.CompareAndSwap(role, role+1):
			at.conn.beside.Add(1)
			at.conn.server.goroutines.Go(at.conn.takeRole)
			at.role = role + 1
		}
		kept = append(kept, at)
	}
	clear(w.list[len(kept):])
	w.list = kept
	return len(kept)
}

// takeRole goes on reading a connection in the place of a goroutine that executes a request. That
// goroutine keeps the buffer in which its message is. The answers of before are sent first: each of those requests that follow may wait, too.
func (c *Conn) takeRole() {
	c.in.renew()
	if c.rest() {
		c.serve()
	}
}
