package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Execute takes one of two ways.
//
// Direct: conditions on keys, then puts and deletes. That is a write with preconditions, which the engine tests under the latches of
// their keys: no snapshot, no validation, no retry.
//
// As a transaction: everything else, serializable, and tried again with a fresh snapshot when others were faster. From the
// third attempt on the losers take turns, so that they do not defeat each other for ever.
const (
	executeAttempts  = 32
	executeAttempts1 = 2 // without waiting for a turn
)

// Execute implements Transactions.
func (s *txnService) Execute(ctx context.Context, req *pb.ExecuteRequest) (*pb.ExecuteResponse, error) {
	out := new(pb.ExecuteResponse)
	return out, s.run(ctx, func(c *caller) (settle, error) {
		if isDirect(req) {
			if w, done, err := c.executeDirect(ctx, req, out); done {
				return w, err
			}
		}
		return s.executeTransaction(ctx, c, req, out)
	})
}

// isDirect reports whether the first way is open.
func isDirect(req *pb.ExecuteRequest) bool {
	for _, c := range req.Conditions {
		if _, ok := c.GetCondition().(*pb.TxnCondition_Key); !ok {
			return false
		}
	}
	for _, o := range req.ThenOperations {
		if _, ok := o.GetOperation().(*pb.Operation_Write); !ok {
			return false
		}
	}
	return len(req.ThenOperations) > 0
}

// executeDirect is the first way. It is not done if the other operations have to be, or if a key is written twice.
func (c *caller) executeDirect(ctx context.Context, req *pb.ExecuteRequest, out *pb.ExecuteResponse) (w settle, done bool, err error) {
	if err := c.prepare(nil, req.Durability); err != nil {
		return w, true, err
	}
	for i, has := range req.Conditions {
		condition, err := toCondition(has.GetKey(), "conditions", i)
		if err != nil {
			return w, true, err
		}
		c.write.Conditions = append(c.write.Conditions, condition)
	}
	for i, o := range req.ThenOperations {
		if err := c.addMutation(o.GetWrite(), "then_operations", i); err != nil {
			return w, true, err
		}
	}
	w, err = c.commit(ctx)
	var failed *mvcc.PreconditionError
	var twice *batch.DuplicateKeyError
	switch {
	case errors.As(err, &twice):
		return w, false, nil
	case errors.As(err, &failed):
		return settle{}, len(req.ElseOperations) == 0, nil
	case err != nil:
		return w, true, err
	}
	out.Succeeded, out.Epoch = true, uint64(w.epoch)
	out.Results = wroteResults[:min(len(req.ThenOperations), len(wroteResults))]
	for len(out.Results) < len(req.ThenOperations) {
		out.Results = append(out.Results[:len(out.Results):len(out.Results)], wroteResult)
	}
	return w, true, nil
}

// wroteResult answers every write. It is never changed.
var (
	wroteResult  = &pb.OperationResult{Result: &pb.OperationResult_Write{Write: new(pb.WriteResponse)}}
	wroteResults = []*pb.OperationResult{wroteResult, wroteResult, wroteResult, wroteResult}
)

func (s *txnService) executeTransaction(ctx context.Context, c *caller, req *pb.ExecuteRequest, out *pb.ExecuteResponse) (settle, error) {
	s.transactions.started.Add(1)
	w, err := s.executeUntilDone(ctx, c, req, out)
	if err != nil {
		s.transactions.aborted[abortReason(err)].Add(1)
		return w, err
	}
	s.transactions.committed.Add(1)
	return w, nil
}

func (s *txnService) executeUntilDone(ctx context.Context, c *caller, req *pb.ExecuteRequest, out *pb.ExecuteResponse) (settle, error) {
	var conflict *mvcc.ConflictError
	for attempt := 1; ; attempt++ {
		w, err := s.executeOnce(ctx, c, req, out)
		if !errors.As(err, &conflict) || attempt == executeAttempts {
			return w, err
		}
		if attempt == executeAttempts1 {
			select {
			case s.executeTurn <- struct{}{}:
				defer func() { <-s.executeTurn }()
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			return w, ctx.Err()
		}
	}
}

// executeOnce runs the request as one transaction.
func (s *txnService) executeOnce(ctx context.Context, c *caller, req *pb.ExecuteRequest, out *pb.ExecuteResponse) (w settle, err error) {
	durability, err := toDurability(req.Durability)
	if err != nil {
		return settle{}, err
	}
	t, err := c.session.Begin(mvcc.TxnOptions{Durability: durability})
	if err != nil {
		return settle{}, err
	}
	defer func() {
		w = w.revealing(t.Await()) // however it ends
		t.Rollback()
	}()
	out.Reset()
	if out.Succeeded, err = s.allHold(ctx, t, req.Conditions); err != nil {
		return settle{}, err
	}
	list, name := req.ThenOperations, "then_operations"
	if !out.Succeeded {
		list, name = req.ElseOperations, "else_operations"
	}
	size := 0
	for i, o := range list {
		r, err := executeOperation(ctx, t, o, name, i)
		if err != nil {
			return settle{}, fmt.Errorf("%s[%d]: %w", name, i, err)
		}
		out.Results = append(out.Results, r)
		if size += r.SizeVT(); size > s.limits.BatchBytes {
			return settle{}, &mvcc.LimitError{What: "batch bytes", Limit: s.limits.BatchBytes, Got: size}
		}
		if err := c.admitAnswer(size); err != nil {
			return settle{}, err
		}
	}
	at := t.At()
	epoch, err := t.Commit(ctx)
	if err != nil {
		return settle{}, err
	}
	if epoch == at {
		epoch = 0 // nothing was written
	}
	out.Epoch = uint64(epoch)
	return settleCommit(epoch, durability), nil
}

func executeOperation(ctx context.Context, t *mvcc.Txn, o *pb.Operation, list string, i int) (*pb.OperationResult, error) {
	switch is := o.GetOperation().(type) {
	case *pb.Operation_Get:
		m, err := txnGet(t, is.Get)
		return &pb.OperationResult{Result: &pb.OperationResult_Get{Get: m}}, err
	case *pb.Operation_Scan:
		m, err := txnScan(ctx, t, is.Scan)
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

// allHold evaluates the conditions in the transaction, so that what they read is validated when it commits.
func (s *txnService) allHold(ctx context.Context, t *mvcc.Txn, conditions []*pb.TxnCondition) (bool, error) {
	all := true
	for i, c := range conditions {
		holds := false
		var err error
		switch is := c.GetCondition().(type) {
		case *pb.TxnCondition_Key:
			holds, err = keyHolds(t, is.Key, i)
		case *pb.TxnCondition_Range:
			holds, err = s.rangeHolds(ctx, t, is.Range, i)
		default:
			err = invalid(fmt.Sprintf("conditions[%d].condition", i), "is missing; give exactly one")
		}
		if err != nil {
			return false, err
		}
		all = all && holds // bad input behind a condition that fails is bad input all the same
	}
	return all, nil
}

func keyHolds(t *mvcc.Txn, p *pb.Precondition, i int) (bool, error) {
	c, err := toCondition(p, "conditions", i)
	if err != nil {
		return false, err
	}
	v, err := t.Get(nil, c.Key)
	if err != nil {
		return false, err
	}
	switch c.Kind {
	case mvcc.KeyAbsent:
		return !v.Found, nil
	case mvcc.KeyPresent:
		return v.Found, nil
	case mvcc.ValueEquals:
		return v.Found && bytes.Equal(v.Data, c.Value), nil
	}
	return v.Found && v.Epoch == c.Epoch, nil
}

func (s *txnService) rangeHolds(ctx context.Context, t *mvcc.Txn, r *pb.RangeCondition, i int) (bool, error) {
	if r.GetRange() == nil {
		return false, invalidRange("is missing; an empty range means all keys")
	}
	b, err := toBounds(r.Range)
	if err != nil {
		return false, err
	}
	switch is := r.GetCondition().(type) {
	case *pb.RangeCondition_Empty:
		c, err := t.Scan(mvcc.ScanOptions{Lower: b.lower, Upper: b.upper, KeysOnly: true, Context: ctx})
		if err != nil {
			return false, err
		}
		defer c.Close()
		return c.Next() != is.Empty, c.Err()
	case *pb.RangeCondition_UnchangedSince:
		if is.UnchangedSince == 0 {
			return false, invalid("unchanged_since", "is 0, which is no epoch")
		}
		return t.UnchangedSince(b.lower, b.upper, keys.Epoch(is.UnchangedSince))
	}
	return false, invalid(fmt.Sprintf("conditions[%d].range.condition", i), "is missing; give exactly one")
}
