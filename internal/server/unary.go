package server

import (
	"context"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// kvService implements KVService.
type kvService struct {
	pb.UnimplementedKVServiceServer
	*Server
}

// Get implements KV.
func (s *kvService) Get(ctx context.Context, req *pb.GetRequest) (*pb.GetResponse, error) {
	out := new(pb.GetResponse)
	return out, s.run(ctx, func(c *executor) (ackWait, error) {
		return c.tryFirst(func(c *executor) (ackWait, error) { return c.get(req, out, nil) })
	})
}

// Put implements KV.
func (s *kvService) Put(ctx context.Context, req *pb.PutRequest) (*pb.PutResponse, error) {
	out := new(pb.PutResponse)
	return out, s.run(ctx, func(c *executor) (ackWait, error) {
		w, err := c.put(ctx, req)
		out.Epoch, out.Deduplicated = uint64(w.epoch), w.deduplicated
		return w, err
	})
}

// Delete implements KV.
func (s *kvService) Delete(ctx context.Context, req *pb.DeleteRequest) (*pb.DeleteResponse, error) {
	out := new(pb.DeleteResponse)
	return out, s.run(ctx, func(c *executor) (ackWait, error) {
		w, err := c.delete(ctx, req)
		out.Epoch, out.Deduplicated = uint64(w.epoch), w.deduplicated
		return w, err
	})
}

// BatchGet implements KV.
func (s *kvService) BatchGet(ctx context.Context, req *pb.BatchGetRequest) (*pb.BatchGetResponse, error) {
	out := &pb.BatchGetResponse{Results: newResults(min(len(req.Keys), s.limits.BatchOps))}
	return out, s.run(ctx, func(c *executor) (ackWait, error) {
		return c.tryFirst(func(c *executor) (ackWait, error) { return c.batchGet(ctx, req, out, s.Server) })
	})
}

// newResults makes room for n results with two allocations instead of n.
func newResults(n int) []*pb.BatchGetResult {
	slab, results := make([]pb.BatchGetResult, n), make([]*pb.BatchGetResult, n)
	for i := range slab {
		results[i] = &slab[i]
	}
	return results[:0]
}

// BatchWrite implements KV.
func (s *kvService) BatchWrite(ctx context.Context, req *pb.BatchWriteRequest) (*pb.BatchWriteResponse, error) {
	out := new(pb.BatchWriteResponse)
	return out, s.run(ctx, func(c *executor) (ackWait, error) {
		w, err := c.batchWrite(ctx, req)
		out.Epoch, out.Deduplicated = uint64(w.epoch), w.deduplicated
		return w, err
	})
}

// DeleteRange implements KV.
func (s *kvService) DeleteRange(ctx context.Context, req *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	out := new(pb.DeleteRangeResponse)
	return out, s.run(ctx, func(c *executor) (ackWait, error) { return c.deleteRange(ctx, req, out) })
}

// pending is the outcome of a request that must not be sent or counted yet. A handler returns it as its error,
// so that unary, which surrounds all handlers, waits and counts the answer meanwhile.
type pending struct {
	ackWait ackWait
	err     error         // to return after the wait; nil: the answer
	held    *memoryCharge // for large values of the answer
	details details       // what the request has collected
}

func (*pending) Error() string { return "not acknowledged yet" }

// run executes one request with an executor and releases the executor, so that a request that waits
// for the disk has no session.
func (s *Server) run(ctx context.Context, execute func(*executor) (ackWait, error)) error {
	c, err := s.takeExecutor()
	if err != nil {
		return err
	}
	c.ctx, c.access = ctx, accessOf(ctx)
	w, err := c.outcome(execute(c))
	var held *memoryCharge
	if err == nil {
		held = c.takeCharge()
	}
	var d details
	c.takeDetails(&d)
	c.release()
	if held != nil || d.collected() || !w.ready(s.store) {
		return &pending{ackWait: w, err: err, held: held, details: d}
	}
	return err
}

// finish waits until the outcome of a handler may be sent, and counts an answer until it is sent.
// The answer to a write is never refused.
func (s *Server) finish(ctx context.Context, conn *connection, sh share, out any, err error) (any, error) {
	p, waits := err.(*pending) //nolint:errorlint // made by run, and returned as it is
	var held *memoryCharge
	if waits {
		err, held = p.err, p.held
	}
	m, ours := out.(encoder)
	if err == nil && ours {
		held, err = s.admission.chargeAnswer(held, conn, m.SizeVT(), sh.writes())
	}
	if waits && !p.ackWait.ready(s.store) {
		p.details.executed = s.clock.now()
		failed := s.admission.beginWait(conn, sh)
		if failed == nil {
			failed = p.ackWait.wait(ctx, s.store)
			s.admission.endWait(conn, sh)
		}
		if failed != nil {
			err = failed // instead of an error that would reveal the commit
		}
	}
	if err != nil {
		held.release()
		return nil, err
	}
	if held == nil {
		return out, nil
	}
	return held.of(m), nil
}

// unary surrounds every unary request: it is admitted or refused before work begins, counted, and
// its error mapped.
func (s *Server) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method, known := methodOf(req)
	if !known {
		return handler(ctx, req) // health and reflection must answer in overload, too
	}
	kind := kindOf(method)
	conn := connectionOf(ctx)
	size := admittedBytes(req, kind)
	end := requestEnd{method: method, start: s.clock.now(), size: size, origin: origin{ctx: ctx}}
	sh := shareOf(kind.writes(), size)
	var d *details
	err := s.admitDecoded(ctx, conn, kind, sh, size, req)
	s.admission.decoding.end(req)
	if err == nil {
		var out any
		out, err = handler(ctx, req)
		if err == nil && s.gate.table.Load() != nil {
			if m, ours := out.(encoder); ours {
				accessOf(ctx).sent(m)
			}
		}
		if p, ok := err.(*pending); ok { //nolint:errorlint // made by run, and returned as it is
			d = &p.details
		}
		out, err = s.finish(ctx, conn, sh, out, err)
		s.admission.leave(conn, sh, size)
		if err == nil {
			end.epoch = commitEpoch(out)
			s.ended(conn, &end, accessOf(ctx).details(d))
			return out, nil
		}
	}
	st := s.failed(method, err)
	end.code = st.Code()
	s.ended(conn, &end, accessOf(ctx).details(d))
	return nil, st.Err()
}

// admit checks everything that can be checked before work begins. After nil the caller must leave
// the admission. While the server drains, requests are admitted until the transport takes no more
// of them: their clients do not know of the drain.
func (s *Server) admit(ctx context.Context, conn *connection, k kind, sh share, size int) error {
	if s.connections.refuses(conn) {
		return errTooManyConns
	}
	// A context's timer fires late on a busy machine, so compare the deadline with the clock.
	if deadline, _ := ctx.Deadline(); ctx.Err() != nil || isPast(deadline) {
		s.counters.expired.Add(1)
		return errExpired
	}
	if !s.admission.enterKind(conn, k, sh, size) {
		return errOverloaded
	}
	return nil
}

// isPast reports whether a deadline has passed; zero is none.
func isPast(deadline time.Time) bool { return !deadline.IsZero() && !time.Now().Before(deadline) }

// kind says how a request is counted: whether it writes, and whether its answer may be large. A
// request that only reads is refused after execution if its answer does not fit, so that small
// answers continue when the share of answers is used up. A request that may write is refused before
// it is executed.
type kind uint8

const (
	kindWrite kind = iota
	kindRead
	kindWriteAndRead
)

func (k kind) writes() bool  { return k != kindRead }
func (k kind) answers() bool { return k != kindWrite }

// kindOf is the kind of a unary or pipelined request of the method.
func kindOf(method telemetry.Method) kind {
	switch method {
	case telemetry.MethodGet, telemetry.MethodBatchGet, telemetry.MethodHistory, telemetry.MethodDiff:
		return kindRead
	case telemetry.MethodInvoke, telemetry.MethodInvokeAll, telemetry.MethodExecute:
		return kindWriteAndRead
	}
	return kindWrite
}

// methodOf finds the method by the type of the request, which is cheaper than by its name. Status
// is counted but never refused, so it is not here.
func methodOf(req any) (method telemetry.Method, known bool) {
	switch req.(type) {
	case *pb.GetRequest:
		return telemetry.MethodGet, true
	case *pb.PutRequest:
		return telemetry.MethodPut, true
	case *pb.DeleteRequest:
		return telemetry.MethodDelete, true
	case *pb.BatchGetRequest:
		return telemetry.MethodBatchGet, true
	case *pb.BatchWriteRequest:
		return telemetry.MethodBatchWrite, true
	case *pb.DeleteRangeRequest:
		return telemetry.MethodDeleteRange, true
	case *pb.InvokeRequest:
		return telemetry.MethodInvoke, true
	case *pb.InvokeAllRequest:
		return telemetry.MethodInvokeAll, true
	case *pb.ExecuteRequest:
		return telemetry.MethodExecute, true
	case *pb.HistoryRequest:
		return telemetry.MethodHistory, true
	case *pb.DiffRequest:
		return telemetry.MethodDiff, true
	case *pb.GetOutcomeRequest:
		return telemetry.MethodGetOutcome, true
	}
	return 0, false
}

// commitEpoch is the epoch in an answer; of a read it is that of a version, and means nothing.
func commitEpoch(out any) uint64 {
	if c, ok := out.(*chargedMessage); ok {
		out = c.encoder
	}
	if m, ok := out.(interface{ GetEpoch() uint64 }); ok {
		return m.GetEpoch()
	}
	return 0
}
