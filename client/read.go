package client

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Value is the value of a key.
type Value struct {
	// Found says whether the key was present; if not, Data and Epoch are empty.
	Found bool
	Data  []byte
	// Epoch wrote the value.
	Epoch Epoch
	// ReadEpoch is the epoch at which the key was read.
	ReadEpoch Epoch
	// Unread says that the key was not read, because the answer of a Pipeline.BatchGet was full.
	// Ask for it again, At(ReadEpoch).
	Unread bool
	// ExpiresAt is when the key expires; zero if it does not.
	ExpiresAt time.Time
}

// ReadOption changes one read.
type ReadOption func(*readOptions)

type readOptions struct {
	at   Epoch
	time uint64
}

func newReadOptions(options []ReadOption) readOptions {
	var o readOptions
	for _, option := range options {
		option(&o)
	}
	return o
}

// At reads at epoch e instead of the newest. It fails with ErrSnapshotGone if e is not readable any
// more.
func At(e Epoch) ReadOption { return func(o *readOptions) { o.at = e } }

// AtTime reads the state at a time of the past by the server's clock. Value.ReadEpoch says which epoch that was. It fails with
// ErrSnapshotGone if the state is not readable any more.
func AtTime(t time.Time) ReadOption {
	return func(o *readOptions) { o.time = wireTime(t) }
}

// Get reads key. A missing key is not an error: see Value.Found.
func (c *Client) Get(ctx context.Context, key []byte, options ...ReadOption) (Value, error) {
	o := newReadOptions(options)
	request := &kvpb.GetRequest{Key: key, SnapshotEpoch: uint64(o.at), SnapshotTimeUs: o.time}
	response, err := call(ctx, c, safe, c.kv.Get, request)
	if err != nil && isTooLarge(err) {
		response, err = call(ctx, c, safe, c.getStream, request)
	}
	if err != nil {
		return Value{}, err
	}
	return valueOf(response), nil
}

// isTooLarge says that the answer is longer than the messages that this client accepts: gRPC raised the error here, so that it has no
// reason of the server.
func isTooLarge(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Code == codes.ResourceExhausted && e.Reason == kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED
}

// streamedBytesMax bounds the memory that is taken before the value has arrived.
const streamedBytesMax = 16 << 20

// getStream is Get for a value of any size.
func (c *Client) getStream(ctx context.Context, request *kvpb.GetRequest, options ...grpc.CallOption) (*kvpb.GetResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.kv.GetStream(ctx, &kvpb.GetStreamRequest{
		Key: request.GetKey(), SnapshotEpoch: request.GetSnapshotEpoch(), SnapshotTimeUs: request.GetSnapshotTimeUs(),
	}, options...)
	if err != nil {
		return nil, err
	}
	part, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	response := &kvpb.GetResponse{
		Found: part.GetFound(), Epoch: part.GetEpoch(), ReadEpoch: part.GetReadEpoch(), ExpiresAtMs: part.GetExpiresAtMs(),
		Value: make([]byte, 0, min(part.GetSize(), streamedBytesMax)),
	}
	size := part.GetSize()
	for {
		response.Value = append(response.Value, part.GetChunk()...)
		switch part, err = stream.Recv(); {
		case errors.Is(err, io.EOF) && uint64(len(response.GetValue())) == size:
			return response, nil
		case errors.Is(err, io.EOF):
			return nil, status.Errorf(codes.Internal, "%d of %d bytes of the value arrived", len(response.GetValue()), size)
		case err != nil:
			return nil, err
		}
	}
}

// BatchGet reads keys at one epoch and answers in their order.
func (c *Client) BatchGet(ctx context.Context, keys [][]byte, options ...ReadOption) ([]Value, error) {
	o := newReadOptions(options)
	return inParts(keys, func(rest [][]byte) (*kvpb.BatchGetResponse, error) {
		response, err := call(ctx, c, safe, c.kv.BatchGet, &kvpb.BatchGetRequest{Keys: rest, SnapshotEpoch: uint64(o.at), SnapshotTimeUs: o.time})
		o.at, o.time = Epoch(response.GetReadEpoch()), 0 // later parts read the same snapshot
		return response, err
	})
}

// inParts reads keys in several requests, until the server leaves none of them unread.
func inParts(keys [][]byte, read func([][]byte) (*kvpb.BatchGetResponse, error)) ([]Value, error) {
	response, err := read(keys)
	if err != nil {
		return nil, err
	}
	values := valuesOf(response)
	for {
		var rest [][]byte
		var indexes []int
		for i := range values {
			if values[i].Unread {
				rest, indexes = append(rest, keys[i]), append(indexes, i)
			}
		}
		if len(rest) == 0 {
			return values, nil
		}
		if response, err = read(rest); err != nil {
			return nil, err
		}
		for i, v := range valuesOf(response) {
			values[indexes[i]] = v
		}
	}
}

func valueOf(r *kvpb.GetResponse) Value {
	return Value{
		Found: r.GetFound(), Data: r.GetValue(), Epoch: Epoch(r.GetEpoch()), ReadEpoch: Epoch(r.GetReadEpoch()),
		ExpiresAt: expiresAt(r.GetExpiresAtMs()),
	}
}

func valuesOf(r *kvpb.BatchGetResponse) []Value {
	values := make([]Value, len(r.GetResults()))
	for i, v := range r.GetResults() {
		values[i] = Value{
			Found: v.GetFound(), Data: v.GetValue(), Epoch: Epoch(v.GetEpoch()), ReadEpoch: Epoch(r.GetReadEpoch()),
			Unread: v.GetUnread(), ExpiresAt: expiresAt(v.GetExpiresAtMs()),
		}
	}
	return values
}
