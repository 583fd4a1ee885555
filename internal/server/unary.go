package server

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "epochkv/api/proto/epochkv/v1"
	"epochkv/internal/telemetry"
)

// kvService implements the KV service.
type kvService struct {
	pb.UnimplementedKVServer
	*Server
}

// Get implements KV.
func (s *kvService) Get(ctx context.Context, req *pb.GetRequest) (*pb.GetResponse, error) {
	out := new(pb.GetResponse)
	return out, s.run(ctx, func(c *caller) (settle, error) { return c.get(req, out, nil) })
}

// Put implements KV.
func (s *kvService) Put(ctx context.Context, req *pb.PutRequest) (*pb.PutResponse, error) {
	out := new(pb.PutResponse)
	return out, s.run(ctx, func(c *caller) (settle, error) {
		w, err := c.put(ctx, req)
		out.Epoch = uint64(w.epoch)
		return w, err
	})
}

// Delete implements KV.
func (s *kvService) Delete(ctx context.Context, req *pb.DeleteRequest) (*pb.DeleteResponse, error) {
	out := new(pb.DeleteResponse)
	return out, s.run(ctx, func(c *caller) (settle, error) {
		w, err := c.delete(ctx, req)
		out.Epoch = uint64(w.epoch)
		return w, err
	})
}

// BatchGet implements KV.
func (s *kvService) BatchGet(ctx context.Context, req *pb.BatchGetRequest) (*pb.BatchGetResponse, error) {
	out := &pb.BatchGetResponse{Results: newResults(min(len(req.Keys), s.limits.BatchOps))}
	return out, s.run(ctx, func(c *caller) (settle, error) { return c.batchGet(ctx, req, out, &s.limits) })
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
	return out, s.run(ctx, func(c *caller) (settle, error) {
		w, err := c.batchWrite(ctx, req)
		out.Epoch = uint64(w.epoch)
		return w, err
	})
}

// DeleteRange implements KV.
func (s *kvService) DeleteRange(ctx context.Context, req *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	out := new(pb.DeleteRangeResponse)
	return out, s.run(ctx, func(c *caller) (settle, error) { return c.deleteRange(ctx, req, out) })
}

// run executes one request with a caller, gives the caller back, and waits until the answer may be sent: who waits for the
// disk holds no session.
func (s *Server) run(ctx context.Context, execute func(*caller) (settle, error)) error {
	c, err := s.callers.take()
	if err != nil {
		return err
	}
	w, err := c.outcome(execute(c))
	s.callers.release(c)
	if failed := w.wait(ctx, s.store); failed != nil {
		return failed // and not what err would reveal
	}
	return err
}

// unary surrounds every unary request: it is admitted or refused before work begins, counted, and its error mapped.
func (s *Server) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method, ours := methodOf(req)
	if !ours {
		return handler(ctx, req) // health and reflection must answer when nothing else does
	}
	start := s.clock.now()
	conn := connectionOf(ctx)
	size := requestSize(req)
	err := s.admit(ctx, conn, size)
	if err == nil {
		var out any
		out, err = handler(ctx, req)
		s.admission.leave(size)
		if err == nil {
			conn.shard.Observe(method, codes.OK, s.clock.now()-start)
			return out, nil
		}
	}
	st := statusOf(err)
	conn.shard.Observe(method, st.Code(), s.clock.now()-start)
	return nil, st.Err()
}

// admit checks everything that can be known before work begins. After nil the caller must leave the admission.
func (s *Server) admit(ctx context.Context, conn *connection, size int) error {
	switch {
	case conn.refused:
		return errTooManyConns
	case s.draining.Load():
		return errShuttingDown
	}
	if ctx.Err() != nil {
		s.expired.Add(1)
		return errExpired
	}
	// A context's timer fires late on a busy machine; the clock tells.
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
		s.expired.Add(1)
		return errExpired
	}
	if !s.admission.enter(size) {
		return errOverloaded
	}
	return nil
}

// methodOf finds the method by the request's type, which is cheaper than by its name. Status is counted but never refused,
// so it is not here.
func methodOf(req any) (telemetry.Method, bool) {
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
	}
	return 0, false
}

// requestSize is the encoded size of a request that methodOf knows.
func requestSize(req any) int {
	if m, ok := req.(interface{ SizeVT() int }); ok {
		return m.SizeVT()
	}
	return 0
}
