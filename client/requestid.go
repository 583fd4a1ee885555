package client

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// RequestID names one write in all attempts of it. The server executes it at most once, and knows for some time what
// became of it: see Client.Outcome. It is a UUID of version 7.
type RequestID [16]byte

// String is the usual form of a UUID.
func (id RequestID) String() string { return uuid.UUID(id).String() }

// ParseRequestID reads the form of String.
func ParseRequestID(s string) (RequestID, error) {
	id, err := uuid.Parse(s)
	if err == nil && id.Version() != 7 {
		err = errors.New("not of version 7")
	}
	if err != nil {
		return RequestID{}, fmt.Errorf("client: request id %q: %w", s, err)
	}
	return RequestID(id), nil
}

// NewRequestID makes an id, for a program that wants to keep it before it writes, so that it can ask for the outcome
// after it was restarted: see As. Without As, the client makes the id of each write.
func (c *Client) NewRequestID() RequestID {
	id, err := uuid.NewV7()
	if err != nil {
		panic(err) // the system has no random numbers, which crypto/rand does not survive either
	}
	if ahead := c.clockAhead.Load(); ahead != 0 {
		setRequestTime((*RequestID)(&id), time.Now().UnixMilli()-ahead)
	}
	return RequestID(id)
}

func setRequestTime(id *RequestID, milliseconds int64) {
	var time [8]byte
	binary.BigEndian.PutUint64(time[:], uint64(milliseconds)<<16)
	copy(id[:6], time[:6])
}

// As gives the write this id.
func As(id RequestID) WriteOption { return func(o *writeOptions) { o.id = id } }

// wireID is the id that As has set, or nil. A pipeline sends no other: it repeats nothing.
func (o *writeOptions) wireID() []byte {
	if (o.id == RequestID{}) {
		return nil
	}
	return o.id[:]
}

// ErrResultDropped means that a write was executed, by an attempt whose answer was lost, and that the server has not
// kept that answer, because it was long. The epoch that comes with the error is that of the write.
var ErrResultDropped = errors.New("client: the write was executed, but its answer was lost")

// writing makes a unary call that writes, and repeats it: the server executes it at most once. id is the field of
// the request.
func writing[Request any, Response interface{ GetEpoch() uint64 }](
	ctx context.Context, c *Client, o *writeOptions,
	method func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request, id *[]byte,
) (Response, error) {
	own := o.id == RequestID{}
	if own {
		o.id = c.NewRequestID()
	}
	*id = o.id[:]
	ctx, cancel := c.bound(ctx)
	defer cancel()
	response, lost, err := repeat(ctx, c, safe, method, request, func(e *Error) bool {
		if !own || !c.adjustClock(e) {
			return false
		}
		o.id = c.NewRequestID()
		*id = o.id[:]
		return true
	})
	if !lost || err != nil && err.attemptUnknown() || err == nil && response.GetEpoch() != 0 {
		return response, orNil(err)
	}
	return findOutcome(ctx, c, o.id, response, err, func() (Response, error) { return call(ctx, c, safe, method, request) })
}

// findOutcome finds the outcome of a write of which an attempt was lost, and a later one was refused, or wrote nothing. That alone does
// not tell it: a full disk is reported before the id is looked up, and the lost attempt may still be on its way, and be
// executed when its conditions hold. The fence stops it.
func findOutcome[Response any](
	ctx context.Context, c *Client, id RequestID, response Response, err *Error, repeated func() (Response, error),
) (Response, error) {
	state, _, asked := c.Outcome(ctx, id, true)
	switch {
	case asked == nil && state == Applied:
		return executed(repeated()) // whose answer is that of the lost attempt
	case asked == nil && state == Cancelled && err != nil:
		err.notExecuted = true
	case asked == nil && state == Cancelled:
		return response, nil
	case err == nil:
		err = &Error{Code: codes.Unavailable, Message: "an attempt was lost, and what became of it cannot be found out", cause: asked, earlierLost: true}
	}
	return response, err
}

// executed is what a further attempt of a write that was executed returns. A refusal of it, as of those before, does not say that the write was
// not executed, unless another write has its id.
func executed[Response any](response Response, err error) (Response, error) {
	if e, refused := errors.AsType[*Error](err); refused && e.Reason != kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_REUSED {
		e.earlierLost = true
	}
	return response, err
}

// orNil makes an error of a pointer.
func orNil(e *Error) error {
	if e == nil {
		return nil
	}
	return e
}

// adjustClock takes the time from a server that has refused an id for its time, and reports whether it did.
func (c *Client) adjustClock(e *Error) bool {
	switch e.Reason { //nolint:exhaustive // all others have nothing to do with time
	case kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED, kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE:
	default:
		return false
	}
	server, err := strconv.ParseInt(e.Metadata["server_time"], 10, 64)
	if err != nil {
		return false
	}
	c.clockAhead.Store(time.Now().UnixMilli() - server)
	return true
}

// OutcomeState is what became of a request.
type OutcomeState = kvpb.OutcomeState

// The states of a request.
const (
	// Applied: it was executed.
	Applied = kvpb.OutcomeState_OUTCOME_STATE_APPLIED
	// Cancelled: it was not executed, and never will be.
	Cancelled = kvpb.OutcomeState_OUTCOME_STATE_CANCELLED
	// NotApplied: it was not executed so far; an attempt that is still under way may be.
	NotApplied = kvpb.OutcomeState_OUTCOME_STATE_NOT_APPLIED
	// Expired: the id is too old for the server to know.
	Expired = kvpb.OutcomeState_OUTCOME_STATE_EXPIRED
)

// Outcome is what became of the write with this id, and the epoch of its commit. With fence, a write that was not
// executed is cancelled: no attempt that is still under way can be executed after that.
func (c *Client) Outcome(ctx context.Context, id RequestID, fence bool) (OutcomeState, Epoch, error) {
	response, err := call(ctx, c, safe, c.transactions.GetOutcome, &kvpb.GetOutcomeRequest{RequestId: id[:], Fence: fence})
	if e, refused := errors.AsType[*Error](err); refused {
		c.adjustClock(e)
	}
	return response.GetState(), Epoch(response.GetEpoch()), err
}
