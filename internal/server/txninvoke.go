package server

import (
	"context"
	"fmt"
	"math"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Invoke implements KV.
func (s *kvService) Invoke(ctx context.Context, req *pb.InvokeRequest) (*pb.InvokeResponse, error) {
	out := new(pb.InvokeResponse)
	return out, s.run(ctx, func(c *executor) (ackWait, error) {
		return c.invoke(ctx, req, admittedBytes(req, kindWriteAndRead), out)
	})
}

// InvokeAll implements KV.
func (s *kvService) InvokeAll(ctx context.Context, req *pb.InvokeAllRequest) (*pb.InvokeAllResponse, error) {
	out := new(pb.InvokeAllResponse)
	return out, s.run(ctx, func(c *executor) (ackWait, error) {
		return c.invokeAll(ctx, req, admittedBytes(req, kindWriteAndRead), out)
	})
}

// invocations are an executor's buffers for Invoke and InvokeAll.
type invocations struct {
	ops      []mvcc.Invoke
	outcomes []mvcc.Invoked
}

// invocationsKept is how many invocations an executor keeps buffers for. The messages of more are dropped before they are executed.
const invocationsKept = 1024

func (b *invocations) reset(n int) {
	if cap(b.ops) > invocationsKept {
		*b = invocations{}
	}
	clear(b.ops) // they refer to memory of the last request
	clear(b.outcomes)
	if n > cap(b.ops) {
		b.ops, b.outcomes = make([]mvcc.Invoke, n), make([]mvcc.Invoked, n)
	}
	b.ops, b.outcomes = b.ops[:n], b.outcomes[:n]
}

// forget drops what the last request has left: its operands, and values in memory of its session. Executors are pooled, and some are kept for as
// long as a stream is open. It follows the last check of the request's rights, see dropInvocations.
func (b *invocations) forget() { b.reset(0) }

// invoke executes a request that is admitted with so many bytes.
func (c *executor) invoke(ctx context.Context, req *pb.InvokeRequest, size int, out *pb.InvokeResponse) (ackWait, error) {
	c.invoked.reset(1)
	if err := toInvoke(&c.invoked.ops[0], req.Invocation, nowMillis(c.session.Store()), "invocation"); err != nil {
		return ackWait{}, err
	}
	request, err := c.toRequest(req, recordInvoke)
	if err != nil {
		return ackWait{}, err
	}
	if request != nil {
		request.Result = func() []byte {
			return resultOf(&pb.InvokeResponse{Result: invokeResult(&c.invoked.outcomes[0], req.Invocation.ReturnOld, req.Invocation.ReturnNew)})
		}
	}
	w, err := c.invokeFilled(ctx, request, req, size, &out.Epoch)
	if before, w, ok := c.before(err, c.write.Durability); ok {
		out.ResultDropped, err = decodeResult(before, out, &out.Epoch)
		out.Deduplicated = true
		return w, err
	}
	if err != nil {
		return ackWait{}, err
	}
	out.Result = invokeResult(&c.invoked.outcomes[0], req.Invocation.ReturnOld, req.Invocation.ReturnNew)
	return w, nil
}

// invokeAll executes a request that is admitted with so many bytes.
func (c *executor) invokeAll(ctx context.Context, req *pb.InvokeAllRequest, size int, out *pb.InvokeAllResponse) (ackWait, error) {
	c.invoked.reset(len(req.Invocations))
	for i, in := range req.Invocations {
		if err := toInvoke(&c.invoked.ops[i], in, nowMillis(c.session.Store()), fmt.Sprintf("invocations[%d]", i)); err != nil {
			return ackWait{}, err
		}
	}
	request, err := c.toRequest(req, recordInvokeAll)
	if err != nil {
		return ackWait{}, err
	}
	if request != nil {
		request.Result = func() []byte { return resultOf(&pb.InvokeAllResponse{Results: c.invokeResults()}) }
	}
	c.dropInvocations(req)
	w, err := c.invokeFilled(ctx, request, req, size, &out.Epoch)
	if before, w, ok := c.before(err, c.write.Durability); ok {
		out.ResultDropped, err = decodeResult(before, out, &out.Epoch)
		out.Deduplicated = true
		return w, err
	}
	if err != nil {
		return ackWait{}, err
	}
	if len(c.invoked.ops) > invocationsKept {
		c.session.Trim() // what the commit has used would be in memory beside the answer, which is made now
	}
	out.Results = c.invokeResults()
	return w, nil
}

// dropInvocations drops the messages of many invocations, whose operations are in the executor's buffers. They are a sixth of what the largest request
// has in memory while it commits. Its rights may have to be checked again until then: from now on the operations say what it names.
func (c *executor) dropInvocations(req *pb.InvokeAllRequest) {
	if len(req.Invocations) <= invocationsKept {
		return
	}
	if c.access != nil {
		c.access.invoked = &c.invoked
	}
	req.Invocations = nil
}

// invokeResults copies the outcomes of an InvokeAll.
func (c *executor) invokeResults() []*pb.InvokeResult {
	results := make([]*pb.InvokeResult, len(c.invoked.ops))
	for i := range results {
		op := &c.invoked.ops[i]
		results[i] = invokeResult(&c.invoked.outcomes[i], op.ReturnOld, op.ReturnNew)
	}
	return results
}

// invokeFilled applies the operations in the executor's buffers.
func (c *executor) invokeFilled(
	ctx context.Context, request *mvcc.Request, req conditional, size int, epoch *uint64,
) (ackWait, error) {
	if err := c.prepare(req); err != nil {
		return ackWait{}, err
	}
	own := connectionOf(ctx).owns(ownedWrites)
	if err := c.admission.holdWrite(own); err != nil {
		return ackWait{}, err
	}
	defer c.admission.sessions.writes.release(own, 1)
	c.made.begin(size)
	defer c.releaseMade()
	at, err := c.session.InvokeRequest(ctx, request, c.invoked.ops, c.write.Conditions, c.write.Durability, c.invoked.outcomes)
	if err != nil {
		return ackWait{}, err
	}
	*epoch = uint64(at)
	return ackCommit(at, c.write.Durability), nil
}

// ackCommit is the acknowledgement wait of a commit. A zero epoch needs no wait.
func ackCommit(epoch keys.Epoch, d mvcc.Durability) ackWait {
	if epoch == 0 {
		return ackWait{}
	}
	return ackWait{epoch: epoch, durability: d, write: true}
}

// toInvoke reads an invocation into op, which must be zero. Bytes alias the request. now is the store's clock.
func toInvoke(op *mvcc.Invoke, in *pb.Invocation, now uint64, field string) (err error) {
	op.Key, op.ReturnOld, op.ReturnNew = in.GetKey(), in.GetReturnOld(), in.GetReturnNew()
	if op.ExpiresAt, err = toDeadline(in, now, field+"."); err != nil {
		return err
	}
	switch is := in.GetOperation().(type) {
	case *pb.Invocation_Increment:
		op.Kind, op.Delta = mvcc.InvokeAdd, is.Increment.GetDelta()
		op.Min, op.Max = math.MinInt64, math.MaxInt64
		if is.Increment.Min != nil {
			op.Bounded, op.Min = true, *is.Increment.Min
		}
		if is.Increment.Max != nil {
			op.Bounded, op.Max = true, *is.Increment.Max
		}
		if op.Min > op.Max {
			return invalid(field+".increment.min", "is larger than max")
		}
	case *pb.Invocation_Append:
		op.Kind, op.Operand = mvcc.InvokeAppend, is.Append
	case *pb.Invocation_Min:
		op.Kind, op.Delta = mvcc.InvokeMin, is.Min
	case *pb.Invocation_Max:
		op.Kind, op.Delta = mvcc.InvokeMax, is.Max
	case *pb.Invocation_CompareAndSet:
		op.Kind, op.Expect, op.Operand = mvcc.InvokeCompareSet, is.CompareAndSet.GetExpect(), is.CompareAndSet.GetValue()
	case *pb.Invocation_PutIfAbsent:
		op.Kind, op.Operand = mvcc.InvokePutIfAbsent, is.PutIfAbsent
	case *pb.Invocation_GetAndSet:
		op.Kind, op.Operand = mvcc.InvokeGetAndSet, is.GetAndSet
	case *pb.Invocation_GetAndDelete:
		if !is.GetAndDelete {
			return invalid(field+".get_and_delete", "must be true")
		}
		op.Kind = mvcc.InvokeGetAndDelete
		return noLifetime(in, field+".")
	case *pb.Invocation_Touch:
		if !is.Touch {
			return invalid(field+".touch", "must be true")
		}
		if op.Kind = mvcc.InvokeTouch; op.ExpiresAt == 0 {
			return invalidTTL(field+".ttl_ms", "is missing; give it, or expires_at_ms")
		}
	case *pb.Invocation_Persist:
		if !is.Persist {
			return invalid(field+".persist", "must be true")
		}
		op.Kind = mvcc.InvokePersist
		return noLifetime(in, field+".")
	default:
		return invalid(field+".operation", "is missing, or of a kind that this server does not know")
	}
	return nil
}

// invokeResult is an outcome for an answer. It copies values that are in buffers of the session or of the request.
func invokeResult(from *mvcc.Invoked, returnOld, returnNew bool) *pb.InvokeResult {
	out := &pb.InvokeResult{
		Applied: from.Applied, OldFound: from.OldFound, OldEpoch: uint64(from.OldEpoch), NewFound: from.NewFound,
		ExpiresAtMs: from.ExpiresAt,
	}
	if returnOld && from.OldFound {
		out.Old = from.TakeOld()
	}
	if returnNew && from.NewFound {
		out.New = from.TakeNew()
	}
	return out
}
