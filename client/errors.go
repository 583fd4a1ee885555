package client

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// The errors that callers need most often. Use errors.Is; Error.Reason has all others.
var (
	// ErrConflict means that a concurrent commit was faster. Read again and try again.
	ErrConflict = errors.New("conflict with a concurrent commit")
	// ErrPreconditionFailed means that a precondition does not hold; Error.Key names the key.
	ErrPreconditionFailed = errors.New("precondition failed")
	// ErrFenced means that a lock is not held any more with the token of the condition.
	ErrFenced = errors.New("the lock is lost")
	// ErrSnapshotGone means that the requested epoch is not readable any more.
	ErrSnapshotGone = errors.New("snapshot gone")
	// ErrPipelineClosed means that a pipeline was used after Close.
	ErrPipelineClosed = errors.New("client: pipeline is closed")
)

// Error is a failed call.
type Error struct {
	// Code is the gRPC code.
	Code codes.Code
	// Reason is the server's stable reason, or ERROR_REASON_UNSPECIFIED if the transport raised the
	// error.
	Reason kvpb.ErrorReason
	// Message is for people.
	Message string
	// Metadata has the entries that errors.proto lists for the reason.
	Metadata map[string]string
	// Key is the key that the error is about, or nil.
	Key []byte
	// RetryAfter is the wait before the next attempt that the server asks for; zero if it does not.
	RetryAfter time.Duration

	cause       error
	notExecuted bool // the outcome of the write was asked for: it was not executed, and never will be
	earlierLost bool // the outcome of an earlier attempt of the call is unknown
}

// Error says what happened, with the reason.
func (e *Error) Error() string {
	if e.Reason == kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s (%s)", e.Message, e.Reason.Reason())
}

// Unwrap returns the gRPC status error.
func (e *Error) Unwrap() error { return e.cause }

// Is matches the sentinels of this package, and the context errors for calls that they ended.
func (e *Error) Is(target error) bool {
	switch target {
	case ErrConflict:
		return e.Reason == kvpb.ErrorReason_ERROR_REASON_CONFLICT
	case ErrPreconditionFailed:
		return e.Reason == kvpb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED
	case ErrFenced:
		return e.Reason == kvpb.ErrorReason_ERROR_REASON_FENCED
	case ErrSnapshotGone:
		return e.Reason == kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	case context.Canceled:
		return e.Code == codes.Canceled
	}
	return false
}

// Current returns what a failed precondition found. It is false for other errors.
func (e *Error) Current() (Current, bool) {
	if e.Reason != kvpb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED {
		return Current{}, false
	}
	epoch, err := strconv.ParseUint(e.Metadata["epoch"], 10, 64)
	if err != nil {
		return Current{}, false
	}
	c := Current{Found: epoch > 0, Epoch: Epoch(epoch)}
	c.Value, c.HasValue = kvpb.Bytes(e.Metadata, "value")
	return c, true
}

// Current is what a failed precondition found.
type Current struct {
	// Found says whether the key is present; Epoch wrote its value.
	Found bool
	Epoch Epoch
	// Value is the value, if the write was made with ReturnCurrent and the value has at most 1 KiB.
	Value    []byte
	HasValue bool
}

// Retryable says whether the same request may succeed later without a change.
func (e *Error) Retryable() bool {
	switch {
	case !e.notExecuted:
	case e.Reason == kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED, e.Reason == kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE:
		return true // the next id has the server's time
	}
	switch e.Code {
	case codes.Unavailable:
		if e.TLSAdvice() != "" { // needs another certificate, or another option
			return false
		}
		return e.Reason != kvpb.ErrorReason_ERROR_REASON_READ_ONLY // needs its operator first
	case codes.ResourceExhausted:
		return e.RetryAfter > 0
	}
	return false
}

// OutcomeUnknown says that a write that ended with this error may or may not have been executed. If
// it is false, the write was not executed.
func (e *Error) OutcomeUnknown() bool {
	if e.notExecuted {
		return false
	}
	return e.earlierLost || e.attemptUnknown()
}

// attemptUnknown is OutcomeUnknown for the last attempt alone.
func (e *Error) attemptUnknown() bool {
	if e.Reason == kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return e.Code != codes.Unimplemented
	}
	if e.Metadata[kvpb.EarlierRequests] == kvpb.EarlierUnknown {
		return true // the error is about a later message of the stream
	}
	if e.Reason == kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED {
		return true // an earlier attempt may have been executed
	}
	return e.Reason == kvpb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN || e.Reason == kvpb.ErrorReason_ERROR_REASON_INTERNAL
}

// newError turns what gRPC returned into an *Error.
func newError(err error) *Error {
	s := status.Convert(err)
	e := &Error{Code: s.Code(), Message: s.Message(), cause: err}
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == kvpb.ErrorDomain {
				e.Reason, e.Metadata = kvpb.ParseReason(d.GetReason()), d.GetMetadata()
			}
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay().AsDuration()
		}
	}
	e.Key, _ = kvpb.Bytes(e.Metadata, "key")
	return e
}
