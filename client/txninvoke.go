package client

import (
	"context"
	"fmt"
	"strconv"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Invocation is a read-modify-write of one key that the server does in one step. It never
// conflicts, and needs no transaction, though a transaction may hold some.
//
// Integers are stored as decimal text. A value that is none, and a result out of bounds, is a
// *Error with reason TYPE_ERROR.
type Invocation struct{ wire *kvpb.Invocation }

// Increment adds delta to the integer at key; a missing key counts as 0.
func Increment(key []byte, delta int64) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_Increment{Increment: &kvpb.Increment{Delta: delta}}}}
}

// IncrementWithin is Increment whose result must be within [low, high].
func IncrementWithin(key []byte, delta, low, high int64) Invocation {
	i := Increment(key, delta)
	n := i.wire.GetIncrement()
	n.Min, n.Max = &low, &high
	return i
}

// Append adds bytes to the end of the value; a missing key starts empty.
func Append(key, suffix []byte) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_Append{Append: suffix}}}
}

// Min lowers the integer at key to n if it is larger; a missing key becomes n.
func Min(key []byte, n int64) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_Min{Min: n}}}
}

// Max raises the integer at key to n if it is smaller; a missing key becomes n.
func Max(key []byte, n int64) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_Max{Max: n}}}
}

// CompareAndSet sets key to value if it has the value expect; else Outcome.Applied is false.
func CompareAndSet(key, expect, value []byte) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_CompareAndSet{
		CompareAndSet: &kvpb.CompareAndSet{Expect: expect, Value: value},
	}}}
}

// PutIfAbsent sets key to value if it is missing; else Outcome.Applied is false.
func PutIfAbsent(key, value []byte) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_PutIfAbsent{PutIfAbsent: value}}}
}

// GetAndSet sets key to value and returns its previous value.
func GetAndSet(key, value []byte) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_GetAndSet{GetAndSet: value}, ReturnOld: true}}
}

// GetAndDelete removes key and returns its previous value.
func GetAndDelete(key []byte) Invocation {
	return Invocation{&kvpb.Invocation{Key: key, Operation: &kvpb.Invocation_GetAndDelete{GetAndDelete: true}, ReturnOld: true}}
}

// ReturnOld asks for the value before the operation.
func (i Invocation) ReturnOld() Invocation {
	i.wire.ReturnOld = true
	return i
}

// ReturnNew asks for the value after the operation.
func (i Invocation) ReturnNew() Invocation {
	i.wire.ReturnNew = true
	return i
}

// Outcome is what an Invocation did.
type Outcome struct {
	// Applied is false if a comparison did not hold and nothing changed.
	Applied bool
	// OldFound and NewFound say whether the key had a value before and has one after; Old and New
	// are set only with ReturnOld and ReturnNew.
	OldFound, NewFound bool
	Old, New           []byte
	// OldEpoch wrote the previous value.
	OldEpoch Epoch
	// ExpiresAt is when the key expires after the operation; zero if it does not.
	ExpiresAt time.Time
}

func outcomeOf(r *kvpb.InvokeResult) Outcome {
	return Outcome{
		Applied: r.GetApplied(), OldFound: r.GetOldFound(), NewFound: r.GetNewFound(), Old: r.GetOld(), New: r.GetNew(),
		OldEpoch: Epoch(r.GetOldEpoch()), ExpiresAt: expiresAt(r.GetExpiresAtMs()),
	}
}

// Invoke performs one read-modify-write. The epoch is zero if nothing was written.
func (c *Client) Invoke(ctx context.Context, i Invocation, options ...WriteOption) (Outcome, Epoch, error) {
	o := newWriteOptions(options)
	request := &kvpb.InvokeRequest{Invocation: i.wire, Preconditions: o.preconditions, ReturnCurrent: o.current, Durability: o.durability}
	response, err := writing(ctx, c, &o, c.kv.Invoke, request, &request.RequestId)
	if err != nil {
		return Outcome{}, 0, err
	}
	if response.GetResultDropped() {
		return Outcome{}, Epoch(response.GetEpoch()), ErrResultDropped
	}
	return outcomeOf(response.GetResult()), Epoch(response.GetEpoch()), nil
}

// InvokeAll performs several, each of another key, atomically at one epoch. The outcomes are in
// their order.
func (c *Client) InvokeAll(ctx context.Context, all []Invocation, options ...WriteOption) ([]Outcome, Epoch, error) {
	o := newWriteOptions(options)
	request := &kvpb.InvokeAllRequest{Preconditions: o.preconditions, ReturnCurrent: o.current, Durability: o.durability}
	for _, i := range all {
		request.Invocations = append(request.Invocations, i.wire)
	}
	response, err := writing(ctx, c, &o, c.kv.InvokeAll, request, &request.RequestId)
	if err != nil {
		return nil, 0, err
	}
	if response.GetResultDropped() {
		return nil, Epoch(response.GetEpoch()), ErrResultDropped
	}
	outcomes := make([]Outcome, len(response.GetResults()))
	for n, r := range response.GetResults() {
		outcomes[n] = outcomeOf(r)
	}
	return outcomes, Epoch(response.GetEpoch()), nil
}

// Increment adds delta to the integer at key and returns the sum.
func (c *Client) Increment(ctx context.Context, key []byte, delta int64, options ...WriteOption) (int64, error) {
	out, _, err := c.Invoke(ctx, Increment(key, delta).ReturnNew(), options...)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(string(out.New), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("client: the sum at %q: %w", key, err)
	}
	return n, nil
}

// CompareAndSet sets key to value if it has the value expect, and reports whether it had.
func (c *Client) CompareAndSet(ctx context.Context, key, expect, value []byte, options ...WriteOption) (bool, error) {
	out, _, err := c.Invoke(ctx, CompareAndSet(key, expect, value), options...)
	return out.Applied, err
}

// Invoke performs one read-modify-write.
func (p *Pipeline) Invoke(i Invocation, done func(Outcome, Epoch, error), options ...WriteOption) error {
	o := newWriteOptions(options)
	request := &kvpb.PipelineRequest{Request: &kvpb.PipelineRequest_Invoke{
		Invoke: &kvpb.InvokeRequest{Invocation: i.wire, Preconditions: o.preconditions, ReturnCurrent: o.current, Durability: o.durability, RequestId: o.wireID()},
	}}
	if done == nil {
		return p.send(request, nil)
	}
	return p.send(request, func(r *kvpb.PipelineResponse, err error) {
		answer := r.GetInvoke()
		if err == nil && answer.GetResultDropped() {
			err = ErrResultDropped
		}
		done(outcomeOf(answer.GetResult()), Epoch(answer.GetEpoch()), err)
	})
}
