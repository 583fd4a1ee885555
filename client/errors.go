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

// What callers most often decide by. Use errors.Is; all else is in Error.Reason.
var (
	// ErrConflict means that a concurrent commit was faster. Read again and try again.
	ErrConflict = errors.New("conflict with a concurrent commit")
	// ErrPreconditionFailed means that a precondition does not hold; Error.Key names the key.
	ErrPreconditionFailed = errors.New("precondition failed")
	// ErrSnapshotGone means that the epoch asked for cannot be read any more.
	ErrSnapshotGone = errors.New("snapshot gone")
	// ErrPipelineClosed means that a pipeline was used after Close.
	ErrPipelineClosed = errors.New("client: pipeline is closed")
)

// Error is a failed call.
type Error struct {
	// Code is the gRPC code.
	Code codes.Code
	// Reason is the server's stable reason, or ERROR_REASON_UNSPECIFIED if the transport raised the error.
	Reason kvpb.ErrorReason
	// Message is for people.
	Message string
	// Metadata is what the reason's description in errors.proto lists.
	Metadata map[string]string
	// Key is the key that the error is about, or nil.
	Key []byte
	// RetryAfter is how long the server asks to wait before the next attempt; zero if it did not say.
	RetryAfter time.Duration

	cause error
}

// Error says what happened, with the reason.
func (e *Error) Error() string {
	if e.Reason == kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s (%s)", e.Message, e.Reason.Reason())
}

// Unwrap gives the gRPC status error.
func (e *Error) Unwrap() error { return e.cause }

// Is matches the sentinels of this package, and the context errors for calls that ended by them.
func (e *Error) Is(target error) bool {
	switch target {
	case ErrConflict:
		return e.Reason == kvpb.ErrorReason_ERROR_REASON_CONFLICT
	case ErrPreconditionFailed:
		return e.Reason == kvpb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED
	case ErrSnapshotGone:
		return e.Reason == kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	case context.Canceled:
		return e.Code == codes.Canceled
	}
	return false
}

// Retryable says whether the same request may succeed later without anybody changing it.
func (e *Error) Retryable() bool {
	switch e.Code {
	case codes.Unavailable:
		return e.Reason != kvpb.ErrorReason_ERROR_REASON_READ_ONLY // needs its operator first
	case codes.ResourceExhausted:
		return e.RetryAfter > 0
	}
	return false
}

// OutcomeUnknown says that a write which ended with this error may or may not have been executed. Without it, it was not.
func (e *Error) OutcomeUnknown() bool {
	if e.Reason == kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return e.Code != codes.Unimplemented
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
	if quoted, ok := e.Metadata["key"]; ok {
		e.Key = unquoteKey(quoted)
	}
	return e
}

// unquoteKey undoes how keys stand in metadata: a Go string literal without its quotes.
func unquoteKey(quoted string) []byte {
	key, err := strconv.Unquote(`"` + quoted + `"`)
	if err != nil {
		return []byte(quoted)
	}
	return []byte(key)
}
