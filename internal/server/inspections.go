package server

import (
	"context"
	"errors"
	"sync"
)

// inspections are requests that read the whole store past its caches: each keeps a processor busy, and memory for a value and a record of the log. Of
// each kind one works at a time, and the others wait for their turn.
type inspections struct{ verifications, walks turnLine }

// turnLine gives one turn at a time. Of each client one request waits for it, in the order in which they came, and the client's others wait for
// that one: so a client waits for at most one request of each other client. An inspection that waits keeps a stream of those that all connections share,
// and has nothing else yet; a call of the console keeps a connection of HTTP.
type turnLine struct {
	most int // requests that wait or work; 0 where something else bounds them, and none can be refused any more

	mu       sync.Mutex // a leaf; guards clients and requests
	clients  map[string]*clientLine
	requests int           // of all clients
	turn     chan struct{} // has one while a request works
}

// inspectionsMax is how many requests of each kind wait or work. A client may have one of them, and more while it leaves as many places free as it has.
const inspectionsMax = 64

// errTooManyInspections refuses one that would have to wait with so many others.
var errTooManyInspections = errors.New("too many requests of this kind wait, and one works at a time")

// clientLine is that of one client.
type clientLine struct {
	requests int           // that wait or work; guarded by the mutex of the turnLine
	first    chan struct{} // has one while a request waits for the turn or works
}

func (l *turnLine) init(most int) {
	l.most, l.clients, l.turn = most, map[string]*clientLine{}, make(chan struct{}, 1)
}

// enter waits for the turn. After nil the caller calls leave.
func (l *turnLine) enter(ctx context.Context, client string) (leave func(), err error) {
	own, err := l.join(client)
	if err != nil {
		return nil, err
	}
	if err := take(ctx, own.first); err != nil {
		l.quit(client, own)
		return nil, err
	}
	if err := take(ctx, l.turn); err != nil {
		<-own.first
		l.quit(client, own)
		return nil, err
	}
	return func() {
		<-l.turn
		<-own.first
		l.quit(client, own)
	}, nil
}

// take waits for room in a channel. If there is room, it does not matter whether the context has ended.
func take(ctx context.Context, turn chan<- struct{}) error {
	select {
	case turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// join takes a place of a client, if there is one for it.
func (l *turnLine) join(client string) (*clientLine, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := l.clients[client]
	has, free := 1, l.most-l.requests-1
	if own != nil {
		has += own.requests
	}
	if l.most > 0 && (free < 0 || has > 1 && has > free) {
		return nil, errTooManyInspections
	}
	if own == nil {
		own = &clientLine{first: make(chan struct{}, 1)}
		l.clients[client] = own
	}
	own.requests++
	l.requests++
	return own, nil
}

func (l *turnLine) quit(client string, own *clientLine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.requests--
	if own.requests--; own.requests == 0 {
		delete(l.clients, client)
	}
}

// inspect waits until the request has the turn, which it gives back with leave; or until it ends, the server stops, or its caller has lost the
// right to it.
func (s *Server) inspect(ctx context.Context, line *turnLine) (leave func(), err error) {
	waiting, mended, stop := s.untilDenied(ctx)
	defer stop()
	leave, err = line.enter(waiting, networkOf(ctx))
	return leave, mended(s.drainError(err))
}
