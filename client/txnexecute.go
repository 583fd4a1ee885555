package client

import (
	"context"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Plan is "if these conditions hold, do this, else that", in one round trip and one atomic,
// serializable step.
//
//	done, err := c.Execute(ctx, client.When(client.WrittenAt(key, e)).Then(client.OpPut(key, value)).Else(client.OpGet(key)))
type Plan struct{ wire *kvpb.ExecuteRequest }

// Guard is a condition of a plan: a Condition on a key, or a RangeCondition.
type Guard interface{ guard() *kvpb.TxnCondition }

func (c Condition) guard() *kvpb.TxnCondition {
	return &kvpb.TxnCondition{Condition: &kvpb.TxnCondition_Key{Key: c.wire}}
}

// RangeCondition is a condition on all keys of a range.
type RangeCondition struct{ wire *kvpb.RangeCondition }

func (c RangeCondition) guard() *kvpb.TxnCondition {
	return &kvpb.TxnCondition{Condition: &kvpb.TxnCondition_Range{Range: c.wire}}
}

// Empty requires that r has no key.
func Empty(r Range) RangeCondition {
	return RangeCondition{&kvpb.RangeCondition{Range: r.wire(), Condition: &kvpb.RangeCondition_Empty{Empty: true}}}
}

// NotEmpty requires that r has a key.
func NotEmpty(r Range) RangeCondition {
	return RangeCondition{&kvpb.RangeCondition{Range: r.wire(), Condition: &kvpb.RangeCondition_Empty{Empty: false}}}
}

// UnchangedSince requires that nothing in r was written or deleted after epoch e, which must still
// be readable.
func UnchangedSince(r Range, e Epoch) RangeCondition {
	return RangeCondition{&kvpb.RangeCondition{
		Range: r.wire(), Condition: &kvpb.RangeCondition_UnchangedSince{UnchangedSince: uint64(e)},
	}}
}

// When begins a plan. Without conditions its first list is always performed.
func When(conditions ...Guard) Plan {
	p := Plan{new(kvpb.ExecuteRequest)}
	for _, c := range conditions {
		p.wire.Conditions = append(p.wire.Conditions, c.guard())
	}
	return p
}

// Op is an operation of a plan.
type Op struct{ wire *kvpb.Operation }

// OpGet reads a key.
func OpGet(key []byte) Op {
	return Op{&kvpb.Operation{Operation: &kvpb.Operation_Get{Get: &kvpb.KeyReadRequest{Key: key}}}}
}

// OpScan reads the first entries of a range, or with reverse the last; at most limit of them, or
// about 1 MiB for 0.
func OpScan(r Range, limit uint64, reverse bool) Op {
	return Op{&kvpb.Operation{Operation: &kvpb.Operation_Scan{
		Scan: &kvpb.RangeReadRequest{Range: r.wire(), Limit: limit, Reverse: reverse},
	}}}
}

// OpPut sets a key.
func OpPut(key, value []byte) Op {
	return Op{&kvpb.Operation{Operation: &kvpb.Operation_Write{
		Write: &kvpb.Mutation{Kind: kvpb.Mutation_KIND_PUT, Key: key, Value: value},
	}}}
}

// OpDelete removes a key.
func OpDelete(key []byte) Op {
	return Op{&kvpb.Operation{Operation: &kvpb.Operation_Write{Write: &kvpb.Mutation{Kind: kvpb.Mutation_KIND_DELETE, Key: key}}}}
}

// OpDeleteRange removes the keys of a range.
func OpDeleteRange(r Range) Op {
	return Op{&kvpb.Operation{Operation: &kvpb.Operation_DeleteRange{DeleteRange: &kvpb.RangeDeleteRequest{Range: r.wire()}}}}
}

// OpInvoke reads, changes and writes a key.
func OpInvoke(i Invocation) Op {
	return Op{&kvpb.Operation{Operation: &kvpb.Operation_Invoke{Invoke: i.wire}}}
}

// Then adds operations for the case that the conditions hold. Each sees those before it.
func (p Plan) Then(ops ...Op) Plan {
	for _, o := range ops {
		p.wire.ThenOperations = append(p.wire.ThenOperations, o.wire)
	}
	return p
}

// Else adds operations for the other case.
func (p Plan) Else(ops ...Op) Plan {
	for _, o := range ops {
		p.wire.ElseOperations = append(p.wire.ElseOperations, o.wire)
	}
	return p
}

// Executed is what a plan did.
type Executed struct {
	// Succeeded says whether the conditions held.
	Succeeded bool
	// Epoch of the write; zero if nothing was written.
	Epoch Epoch
	// Results of the list that was done, one for each operation.
	Results []Result
}

// Result of an operation has the fields of its kind.
type Result struct {
	Value   Value   // OpGet
	Entries []Entry // OpScan
	More    bool    // OpScan: the range may have more
	Deleted uint64  // OpDeleteRange
	Outcome Outcome // OpInvoke
}

// Execute executes a plan. The server tries it again by itself while others are faster; ErrConflict
// says that it gave up.
func (c *Client) Execute(ctx context.Context, p Plan, options ...WriteOption) (Executed, error) {
	o := newWriteOptions(options)
	request := &kvpb.ExecuteRequest{
		Conditions: p.wire.GetConditions(), ThenOperations: p.wire.GetThenOperations(), ElseOperations: p.wire.GetElseOperations(),
		Durability: o.durability,
	}
	response, err := writing(ctx, c, &o, c.transactions.Execute, request, &request.RequestId)
	if err != nil {
		return Executed{}, err
	}
	if response.GetResultDropped() {
		return Executed{Epoch: Epoch(response.GetEpoch())}, ErrResultDropped
	}
	out := Executed{Succeeded: response.GetSucceeded(), Epoch: Epoch(response.GetEpoch())}
	out.Results = make([]Result, len(response.GetResults()))
	for i, r := range response.GetResults() {
		out.Results[i] = resultOf(r)
	}
	return out, nil
}

func resultOf(r *kvpb.OperationResult) Result {
	switch is := r.GetResult().(type) {
	case *kvpb.OperationResult_Get:
		return Result{Value: valueOf(is.Get)}
	case *kvpb.OperationResult_Scan:
		return Result{Entries: entriesOf(is.Scan.GetEntries()), More: is.Scan.GetMore()}
	case *kvpb.OperationResult_DeleteRange:
		return Result{Deleted: is.DeleteRange.GetDeleted()}
	case *kvpb.OperationResult_Invoke:
		return Result{Outcome: outcomeOf(is.Invoke)}
	}
	return Result{}
}

func entriesOf(wire []*kvpb.Entry) []Entry {
	entries := make([]Entry, len(wire))
	for i, e := range wire {
		entries[i] = Entry{Key: e.GetKey(), Value: e.GetValue(), Epoch: Epoch(e.GetEpoch()), ExpiresAt: expiresAt(e.GetExpiresAtMs()), Lease: e.GetLeaseId()}
	}
	return entries
}
