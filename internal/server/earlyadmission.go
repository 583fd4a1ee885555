package server

import (
	"context"
	"sync"
	"sync/atomic"
)

// earlyAdmissions are large unary requests that are admitted before they are decoded, with the bytes of their encoded messages. Decoding copies
// the message, with gRPC's own transport twice: a request that is going to be refused must not take that memory beside the one that has the large slot.
// With --memory 64MiB, where the bound is 368 MiB, batches beside invocations took up to 409 MiB of resident memory, and take up to 308. A request takes
// its admission over when it is decoded, with the size that it has then.
//
// Invariant: what is held here is admitted, and is no longer held once its request has ended.
type earlyAdmissions struct {
	count atomic.Int64 // of held: most requests are small, and must find that out cheaply

	mu   sync.Mutex // a leaf; guards held
	held map[any]earlyAdmission
}

// earlyAdmission is that of one request.
type earlyAdmission struct {
	conn  *connection
	share share
	bytes int
}

func (e *earlyAdmissions) put(request any, held earlyAdmission) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.held == nil {
		e.held = map[any]earlyAdmission{}
	}
	e.held[request] = held
	e.count.Add(1)
}

// take removes the admission of a request, if it has one, and returns it.
func (e *earlyAdmissions) take(request any) (held earlyAdmission, ok bool) {
	if e.count.Load() == 0 {
		return held, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if held, ok = e.held[request]; ok {
		delete(e.held, request)
		e.count.Add(-1)
	}
	return held, ok
}

// admitEarly admits a request whose encoded message has so many bytes, if that is large for its share, or refuses it. After nil the caller calls
// leaveEarly once the request has ended.
func (s *Server) admitEarly(ctx context.Context, request any, bytes int) error {
	method, known := methodOf(request)
	if !known {
		return nil
	}
	conn, kind := connectionOf(ctx), kindOf(method)
	sh := shareOf(kind.writes(), bytes)
	if !s.admission.words[sh].limit.isLarge(int64(bytes)) {
		return nil
	}
	if err := s.admit(ctx, conn, kind, sh, bytes); err != nil {
		return err
	}
	s.admission.early.put(request, earlyAdmission{conn, sh, bytes})
	return nil
}

// admitDecoded is admit for a request that has been decoded, and may have been admitted before.
func (s *Server) admitDecoded(ctx context.Context, conn *connection, k kind, sh share, size int, request any) error {
	early, ok := s.admission.early.take(request)
	if !ok {
		return s.admit(ctx, conn, k, sh, size)
	}
	if early.share == sh && s.admission.resize(conn, sh, early.bytes, size) {
		return nil
	}
	s.admission.leave(conn, early.share, early.bytes)
	return s.admit(ctx, conn, k, sh, size)
}

// resize changes the size of an admitted request. It reports false if the request is in the share, and would be larger.
func (a *admission) resize(conn *connection, sh share, from, to int) bool {
	if from >= to {
		a.shrink(conn, sh, from, to)
		return true
	}
	return a.words[sh].large.change(conn, int64(from), int64(to))
}

// leaveEarly leaves the admission of a request that was not decoded, or was refused afterwards. For other requests it does nothing.
func (s *Server) leaveEarly(request any) {
	if early, ok := s.admission.early.take(request); ok {
		s.admission.leave(early.conn, early.share, early.bytes)
	}
}
