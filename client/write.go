package client

import (
	"context"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// WriteOption changes one write.
type WriteOption func(*writeOptions)

type writeOptions struct {
	preconditions []*kvpb.Precondition
	durability    kvpb.Durability
	id            RequestID
	lease         uint64
	lifetime      Lifetime
	current       bool
}

func newWriteOptions(options []WriteOption) writeOptions {
	var o writeOptions
	for _, option := range options {
		option(&o)
	}
	return o
}

// Sync acknowledges the write when it survives any crash.
func Sync() WriteOption { return durability(kvpb.Durability_DURABILITY_SYNC) }

// Async acknowledges the write when it is visible; a crash may lose it until the server's next
// sync.
func Async() WriteOption { return durability(kvpb.Durability_DURABILITY_ASYNC) }

func durability(d kvpb.Durability) WriteOption { return func(o *writeOptions) { o.durability = d } }

// If makes the write depend on conditions: all hold, or nothing is written and the error is
// ErrPreconditionFailed.
func If(conditions ...Condition) WriteOption {
	return func(o *writeOptions) {
		for _, c := range conditions {
			o.preconditions = append(o.preconditions, c.wire)
		}
	}
}

// ReturnCurrent makes the error of a failed precondition have the current value; see Error.Current.
func ReturnCurrent() WriteOption { return func(o *writeOptions) { o.current = true } }

// Condition is a precondition of a write, on the newest committed version of a key.
type Condition struct{ wire *kvpb.Precondition }

// Absent requires that key has no value.
func Absent(key []byte) Condition {
	return Condition{&kvpb.Precondition{Key: key, Condition: &kvpb.Precondition_Exists{Exists: false}}}
}

// Present requires that key has a value.
func Present(key []byte) Condition {
	return Condition{&kvpb.Precondition{Key: key, Condition: &kvpb.Precondition_Exists{Exists: true}}}
}

// ValueIs requires that key has this value.
func ValueIs(key, value []byte) Condition {
	return Condition{&kvpb.Precondition{Key: key, Condition: &kvpb.Precondition_ValueEquals{ValueEquals: value}}}
}

// WrittenAt requires that the value of key was written at epoch e: there is no later write.
func WrittenAt(key []byte, e Epoch) Condition {
	return Condition{&kvpb.Precondition{Key: key, Condition: &kvpb.Precondition_EpochEquals{EpochEquals: uint64(e)}}}
}

// Put sets key to value and returns the epoch of the write.
func (c *Client) Put(ctx context.Context, key, value []byte, options ...WriteOption) (Epoch, error) {
	o := newWriteOptions(options)
	request := putRequest(key, value, &o)
	response, err := writing(ctx, c, &o, c.kv.Put, request, &request.RequestId)
	return Epoch(response.GetEpoch()), err
}

// Delete removes key, present or not, and returns the epoch of the write.
func (c *Client) Delete(ctx context.Context, key []byte, options ...WriteOption) (Epoch, error) {
	o := newWriteOptions(options)
	request := deleteRequest(key, &o)
	response, err := writing(ctx, c, &o, c.kv.Delete, request, &request.RequestId)
	return Epoch(response.GetEpoch()), err
}

// Write applies a batch atomically and returns its epoch.
func (c *Client) Write(ctx context.Context, b *Batch, options ...WriteOption) (Epoch, error) {
	o := newWriteOptions(options)
	request := b.request(&o)
	response, err := writing(ctx, c, &o, c.kv.BatchWrite, request, &request.RequestId)
	return Epoch(response.GetEpoch()), err
}

// RangeDeleted is what DeleteRange did.
type RangeDeleted struct {
	// Epoch of the write; zero if there was nothing to delete.
	Epoch Epoch
	// Count of the keys that were deleted.
	Count uint64
	// More is set if the limit was reached and keys are left.
	More bool
}

// DeleteRange removes the keys of r atomically, at most limit of them (0: all), in key order.
func (c *Client) DeleteRange(ctx context.Context, r Range, limit uint64, options ...WriteOption) (RangeDeleted, error) {
	o := newWriteOptions(options)
	request := &kvpb.DeleteRangeRequest{Range: r.wire(), Limit: limit, Preconditions: o.preconditions, ReturnCurrent: o.current, Durability: o.durability}
	response, err := writing(ctx, c, &o, c.kv.DeleteRange, request, &request.RequestId)
	if err != nil {
		return RangeDeleted{}, err
	}
	return RangeDeleted{Epoch: Epoch(response.GetEpoch()), Count: response.GetDeleted(), More: response.GetMore()}, nil
}

func putRequest(key, value []byte, o *writeOptions) *kvpb.PutRequest {
	ttl, at := o.lifetime.wire()
	return &kvpb.PutRequest{
		Key: key, Value: value, Preconditions: o.preconditions, ReturnCurrent: o.current, Durability: o.durability, LeaseId: o.lease, TtlMs: ttl, ExpiresAtMs: at, RequestId: o.wireID(),
	}
}

func deleteRequest(key []byte, o *writeOptions) *kvpb.DeleteRequest {
	return &kvpb.DeleteRequest{Key: key, Preconditions: o.preconditions, ReturnCurrent: o.current, Durability: o.durability, RequestId: o.wireID()}
}

// Batch collects puts and deletes that are applied together. It keeps the given slices without
// copying them: do not change them until the batch is written. The zero Batch is ready to use.
type Batch struct {
	mutations []*kvpb.Mutation
	bytes     int
}

// Put adds "key becomes value".
func (b *Batch) Put(key, value []byte) {
	b.add(&kvpb.Mutation{Kind: kvpb.Mutation_KIND_PUT, Key: key, Value: value})
}

// Delete adds "key is removed".
func (b *Batch) Delete(key []byte) {
	b.add(&kvpb.Mutation{Kind: kvpb.Mutation_KIND_DELETE, Key: key})
}

// Reset empties the batch for another use.
func (b *Batch) Reset() {
	clear(b.mutations) // they refer to keys and values
	b.mutations, b.bytes = b.mutations[:0], 0
}

// Len is the number of operations.
func (b *Batch) Len() int { return len(b.mutations) }

// Bytes is the number of bytes in keys and values.
func (b *Batch) Bytes() int { return b.bytes }

func (b *Batch) add(m *kvpb.Mutation) {
	b.mutations = append(b.mutations, m)
	b.bytes += len(m.GetKey()) + len(m.GetValue())
}

func (b *Batch) request(o *writeOptions) *kvpb.BatchWriteRequest {
	for _, m := range b.mutations {
		if m.LeaseId = 0; m.GetKind() == kvpb.Mutation_KIND_PUT {
			m.LeaseId = o.lease
		}
	}
	return &kvpb.BatchWriteRequest{Mutations: b.mutations, Preconditions: o.preconditions, ReturnCurrent: o.current, Durability: o.durability, RequestId: o.wireID()}
}
