package server

import (
	"context"
	"fmt"
	"slices"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// Execute implements Transactions. mvcc evaluates it; the functions here convert.
func (s *txnService) Execute(ctx context.Context, req *pb.ExecuteRequest) (*pb.ExecuteResponse, error) {
	out := new(pb.ExecuteResponse)
	return out, s.run(ctx, func(c *executor) (ackWait, error) {
		return s.execute(ctx, c, req, admittedBytes(req, kindOf(telemetry.MethodExecute)), out)
	})
}

// execute executes a request that is admitted with so many bytes.
func (s *txnService) execute(ctx context.Context, c *executor, req *pb.ExecuteRequest, size int, out *pb.ExecuteResponse) (ackWait, error) {
	e := mvcc.Execution{Write: &c.write, Otherwise: len(req.ElseOperations) > 0}
	if err := c.toExecution(&e, req, out); err != nil {
		return ackWait{}, err
	}
	e.Operate = func(ctx context.Context, t *mvcc.Txn, holds bool) error {
		out.Reset()
		c.releaseCharge() // of an attempt before
		c.forgetMade()
		c.made.begin(size)
		out.Succeeded = holds
		if holds {
			return s.operate(ctx, c, t, req.ThenOperations, "then_operations", out)
		}
		return s.operate(ctx, c, t, req.ElseOperations, "else_operations", out)
	}
	defer c.forgetMade()
	if mayWrite(req) {
		own := connectionOf(ctx).owns(ownedWrites)
		if err := c.admission.holdWrite(own); err != nil {
			return ackWait{}, err
		}
		defer c.admission.sessions.writes.release(own, 1)
	}
	done, err := c.session.Execute(ctx, &e)
	if done.Transaction {
		s.countExecuted(err)
	}
	if before, w, ok := c.before(err, c.write.Durability); ok {
		out.Reset()
		out.ResultDropped, err = decodeResult(before, out, &out.Epoch)
		if e.Direct && out.Succeeded {
			out.Results = wroteAll(len(req.ThenOperations))
		}
		out.Deduplicated = true
		return w, err
	}
	if err != nil {
		return ackWait{}, err
	}
	if done.Direct {
		out.Results = wroteAll(len(req.ThenOperations))
	}
	if done.Epoch == 0 { // no commit has checked the rights after all of it was read
		if err := c.checkAgain(); err != nil {
			return ackWait{}, err
		}
	}
	out.Succeeded, out.Epoch = done.Holds, uint64(done.Epoch)
	return ackCommit(done.Epoch, c.write.Durability), nil
}

// mayWrite reports whether an execution may commit something: an operation that writes, or the record of a request.
func mayWrite(req *pb.ExecuteRequest) bool {
	writes := func(o *pb.Operation) bool { return o.GetGet() == nil && o.GetScan() == nil }
	return len(req.RequestId) > 0 || slices.ContainsFunc(req.ThenOperations, writes) || slices.ContainsFunc(req.ElseOperations, writes)
}

// countExecuted counts a transaction that has ended.
func (s *txnService) countExecuted(err error) {
	s.transactions.started.Add(1)
	if err != nil {
		s.transactions.aborted[abortReason(err)].Add(1)
		return
	}
	s.transactions.committed.Add(1)
}

// toExecution reads the conditions, and the operations if all of them write. The record of a request has the answer in out;
// that of operations which only write follows from the request.
func (c *executor) toExecution(e *mvcc.Execution, req *pb.ExecuteRequest, out *pb.ExecuteResponse) error {
	c.write.Reset()
	var err error
	if c.write.Durability, err = toDurability(req.Durability); err != nil {
		return err
	}
	request, err := c.toRequest(req, recordExecute)
	if err != nil {
		return err
	}
	if request != nil {
		out.Succeeded = true // unless a transaction finds otherwise
		request.Result = func() []byte { return resultOf(out) }
		c.write.Identify(request)
	}
	for i, has := range req.Conditions {
		if err := c.addCondition(e, has, i); err != nil {
			return err
		}
	}
	e.Direct = len(req.ThenOperations) > 0 && len(e.Ranges) == 0
	for _, o := range req.ThenOperations {
		if _, writes := o.GetOperation().(*pb.Operation_Write); !writes {
			e.Direct = false
		}
	}
	if e.Direct {
		if err := c.admitGrowing(len(req.ThenOperations) * wroteBytes); err != nil {
			return err
		}
	}
	for i := 0; e.Direct && i < len(req.ThenOperations); i++ {
		if err := c.addMutation(req.ThenOperations[i].GetWrite(), "then_operations", i); err != nil {
			return err
		}
	}
	return nil
}

func (c *executor) addCondition(e *mvcc.Execution, has *pb.TxnCondition, i int) error {
	switch is := has.GetCondition().(type) {
	case *pb.TxnCondition_Key:
		condition, err := toCondition(is.Key, "conditions", i)
		c.write.Conditions = append(c.write.Conditions, condition)
		return err
	case *pb.TxnCondition_Range:
		condition, err := toRangeCondition(is.Range, i)
		e.Ranges = append(e.Ranges, condition)
		return err
	}
	return invalid(fmt.Sprintf("conditions[%d].condition", i), "is missing; give exactly one")
}

func toRangeCondition(r *pb.RangeCondition, i int) (c mvcc.RangeCondition, err error) {
	if r.GetRange() == nil {
		return c, invalidRange("is missing; an empty range means all keys")
	}
	b, err := toBounds(r.Range)
	if err != nil {
		return c, err
	}
	c.Lower, c.Upper = b.lower, b.upper
	switch is := r.GetCondition().(type) {
	case *pb.RangeCondition_Empty:
		c.Empty = is.Empty
	case *pb.RangeCondition_UnchangedSince:
		if c.UnchangedSince = keys.Epoch(is.UnchangedSince); c.UnchangedSince == 0 {
			return c, invalid("unchanged_since", "is 0, which is not an epoch")
		}
	default:
		return c, invalid(fmt.Sprintf("conditions[%d].range.condition", i), "is missing; give exactly one")
	}
	return c, nil
}

// operationFrames is what an operation of a transaction counts before others run, in frames: it may walk a range. A key that is read, or written, counts
// as one.
const operationFrames = 4

// operate does the operations of a list in the transaction and appends their results. What these take in memory counts as the answer: a scan of short
// keys has hundreds of bytes for an entry that is encoded in ten.
func (s *txnService) operate(ctx context.Context, c *executor, t *mvcc.Txn, list []*pb.Operation, name string, out *pb.ExecuteResponse) error {
	size := 0
	var yielder transport.Yielder
	admit := func(bytes int) error {
		if bytes += size; bytes > s.limits.BatchBytes {
			return &mvcc.LimitError{What: "batch bytes", Limit: s.limits.BatchBytes, Got: bytes}
		}
		return c.admitGrowing(bytes)
	}
	for i, o := range list {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		yielder.Did(operationFrames)
		before := t.Size()
		r, err := executeOperation(ctx, t, o, name, i, admit)
		if err == nil && (o.GetDeleteRange() != nil || o.GetInvoke() != nil) { // which makes more than the request has
			c.made.before += t.Size() - before
			err = c.admitMade(0)
		}
		if err == nil {
			err = t.CheckOperations(len(list))
		}
		took := 0
		if err == nil {
			took = resultMemory(r)
			err = admit(took)
		}
		if err != nil {
			return fmt.Errorf("%s[%d]: %w", name, i, err)
		}
		out.Results = append(out.Results, r)
		size += took
	}
	return c.admitAnswer(size)
}

// resultMemory is what a result takes beside what each operation of a request does.
func resultMemory(r *pb.OperationResult) int {
	return r.SizeVT() + entryMemory*len(r.GetScan().GetEntries())
}

// wroteResult answers every write. It is never changed.
var (
	wroteResult  = &pb.OperationResult{Result: &pb.OperationResult_Write{Write: new(pb.WriteResponse)}}
	wroteResults = []*pb.OperationResult{wroteResult, wroteResult, wroteResult, wroteResult}
)

// wroteBytes is what wroteResult takes in an answer.
const wroteBytes = 4

// wroteAll returns the results of n writes.
func wroteAll(n int) []*pb.OperationResult {
	if n <= len(wroteResults) {
		return wroteResults[:n:n]
	}
	return slices.Repeat(wroteResults[:1], n)
}

func executeOperation(ctx context.Context, t *mvcc.Txn, o *pb.Operation, list string, i int, admit func(bytes int) error) (*pb.OperationResult, error) {
	switch is := o.GetOperation().(type) {
	case *pb.Operation_Get:
		m, err := txnGet(t, is.Get)
		return &pb.OperationResult{Result: &pb.OperationResult_Get{Get: m}}, err
	case *pb.Operation_Scan:
		m, err := txnScan(ctx, t, is.Scan, admit)
		return &pb.OperationResult{Result: &pb.OperationResult_Scan{Scan: m}}, err
	case *pb.Operation_Write:
		return wroteResult, txnWrite(t, is.Write, fmt.Sprintf("%s[%d].write", list, i))
	case *pb.Operation_DeleteRange:
		m, err := txnDeleteRange(ctx, t, is.DeleteRange)
		return &pb.OperationResult{Result: &pb.OperationResult_DeleteRange{DeleteRange: m}}, err
	case *pb.Operation_Invoke:
		m, err := txnInvoke(t, is.Invoke)
		return &pb.OperationResult{Result: &pb.OperationResult_Invoke{Invoke: m}}, err
	}
	return nil, invalid(fmt.Sprintf("%s[%d].operation", list, i), "is missing, or of a kind that this server does not know")
}
