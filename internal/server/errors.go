package server

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// This file is the one place in which an error becomes a gRPC status. Every error that the server
// sends goes through statusOf, carries one ErrorInfo of domain "epochkv", and has the code of its
// reason.

// Errors of the RPC layer itself.
var (
	errOverloaded     = errors.New("too many requests are being executed")
	errShuttingDown   = errors.New("the server is shutting down")
	errExpired        = errors.New("the deadline had passed before the request was started")
	errTooManyConns   = errors.New("too many connections are open")
	errTooManyStreams = errors.New("too many streams are open; finish some, or try again")
	errUnimplemented  = errors.New("not in this version of the server")
	errIncomplete     = errors.New("the rest of the request did not arrive in time")
)

// argumentError is bad input: the field, what is wrong with it, and the reason in the ErrorInfo.
type argumentError struct {
	reason pb.ErrorReason
	field  string
	text   string
}

func (e *argumentError) Error() string { return e.field + ": " + e.text }

func invalid(field, text string) error {
	return &argumentError{reason: pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, field: field, text: text}
}

// errMetadata is metadata above the limit that the server announces to its clients.
var errMetadata = invalid("metadata", fmt.Sprintf("is larger than %d bytes, names and 32 bytes for each field included", headerBytesMax))

// laterMessageError refuses a message of a stream that has carried others. The message was not
// executed. Earlier requests of the stream may have been, and their answers may be lost with the
// stream.
type laterMessageError struct{ cause error }

func (e *laterMessageError) Error() string { return e.cause.Error() }
func (e *laterMessageError) Unwrap() error { return e.cause }

// The delays that RetryInfo advises: short if the cause ends with a few requests, long if it needs
// a checkpoint or an operator.
const (
	retryOverloaded = 20 * time.Millisecond
	retryConflict   = time.Millisecond
	retrySessions   = 500 * time.Millisecond
	retryMemory     = 500 * time.Millisecond
	retryDisk       = 5 * time.Second
	retryLoad       = 5 * time.Second
	retryShutdown   = time.Second
)

// fault is a classified error, from which a status is made.
type fault struct {
	code     codes.Code
	reason   pb.ErrorReason
	metadata map[string]string
	retry    time.Duration
	field    string // names the field of an INVALID_ARGUMENT
	detail   protoadapt.MessageV1
}

// statusOf maps an error to what the client sees.
func statusOf(err error) *status.Status {
	if st, ok := status.FromError(err); ok {
		return st // of gRPC, or made by statusOf before
	}
	if st := contextStatus(err); st != nil {
		return st
	}
	f := classify(err)
	st := status.New(f.code, messageOf(err))
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Domain: pb.ErrorDomain, Reason: f.reason.Reason(), Metadata: f.metadata}}
	if f.field != "" {
		details = append(details, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{
			Field: f.field, Description: st.Message(), Reason: f.reason.Reason(),
		}}})
	}
	if f.retry > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(f.retry)})
	}
	if f.detail != nil {
		details = append(details, f.detail)
	}
	if full, err := st.WithDetails(details...); err == nil {
		return full
	}
	return st
}

// messageOf is the text of an error without the names of the packages with which it begins: they say
// nothing to a client.
func messageOf(err error) string {
	text := err.Error()
	for _, name := range []string{"server: ", "mvcc: ", "feed: ", "storage: ", "batch: ", "wal: ", "vfs: "} {
		text = strings.TrimPrefix(text, name)
	}
	return shortText(text)
}

// textBytesMax bounds the text of an error, which may quote what the client has sent. A status waits for its client uncounted, with its text twice,
// and many clients accept no more than 8 KiB of trailers.
const textBytesMax = 1 << 10

func shortText(text string) string {
	if len(text) <= textBytesMax {
		return text
	}
	return strings.ToValidUTF8(text[:textBytesMax], "") + "..."
}

// contextStatus is the status of a deadline or cancellation met while the request was waiting:
// gRPC's own, without ErrorInfo, because whether a write was executed is then unknown.
func contextStatus(err error) *status.Status {
	switch {
	case errors.Is(err, errExpired):
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return status.New(codes.DeadlineExceeded, "the deadline passed while the request was being executed")
	case errors.Is(err, context.Canceled):
		return status.New(codes.Canceled, "the request was canceled")
	}
	return nil
}

// classify finds an error's reason. The order matters where one error wraps another: a log that
// failed because the disk is full is a failed log.
func classify(err error) fault {
	if later, ok := errors.AsType[*laterMessageError](err); ok {
		f := classify(later.cause)
		if f.metadata == nil {
			f.metadata = map[string]string{}
		}
		f.metadata[pb.EarlierRequests] = pb.EarlierUnknown
		return f
	}
	if f, ok := classifyTransaction(err); ok { // first: some of them wrap the error of an earlier request
		return f
	}
	if f, ok := classifyHistory(err); ok {
		return f
	}
	if f, ok := classifyRequestID(err); ok {
		return f
	}
	if f, ok := classifyBackup(err); ok {
		return f
	}
	if f, ok := classifySettings(err); ok {
		return f
	}
	if f, ok := classifyTLS(err); ok {
		return f
	}
	if f, ok := classifyLease(err); ok {
		return f
	}
	if f, ok := classifyWatch(err); ok {
		return f
	}
	if f, ok := classifyAuth(err); ok {
		return f
	}
	if f, ok := classifyTyped(err); ok {
		return f
	}
	switch {
	case errors.Is(err, mvcc.ErrFailed):
		return fault{code: codes.Unavailable, reason: pb.ErrorReason_ERROR_REASON_READ_ONLY, metadata: map[string]string{"cause": err.Error()}}
	case errors.Is(err, vfs.ErrNoSpace):
		return exhausted(pb.ErrorReason_ERROR_REASON_DISK_FULL, retryDisk)
	case errors.Is(err, storage.ErrNoSegment), errors.Is(err, storage.ErrReserveUnchecked):
		f := exhausted(pb.ErrorReason_ERROR_REASON_OVERLOADED, retryDisk)
		f.metadata = map[string]string{"cause": err.Error()}
		return f
	case errors.Is(err, mvcc.ErrMemoryFull):
		return exhausted(pb.ErrorReason_ERROR_REASON_MEMORY_FULL, retryMemory)
	case errors.Is(err, errOverloaded):
		return exhausted(pb.ErrorReason_ERROR_REASON_OVERLOADED, retryOverloaded)
	case errors.Is(err, mvcc.ErrTooManySessions), errors.Is(err, errTooManyConns), errors.Is(err, errTooManyStreams), errors.Is(err, errTooManyInspections):
		return exhausted(pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS, retrySessions)
	case errors.Is(err, mvcc.ErrBulkLoadBusy):
		return exhausted(pb.ErrorReason_ERROR_REASON_BULK_LOAD_BUSY, retryLoad)
	case errors.Is(err, mvcc.ErrBulkLoadQuarantine):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_BULK_LOAD_QUARANTINE}
	case errors.Is(err, mvcc.ErrBulkLoadOvertaken):
		return fault{code: codes.Aborted, reason: pb.ErrorReason_ERROR_REASON_BULK_LOAD_OVERTAKEN, retry: retryLoad}
	case errors.Is(err, mvcc.ErrEmptyKey):
		return fault{code: codes.InvalidArgument, reason: pb.ErrorReason_ERROR_REASON_KEY_EMPTY, field: "key"}
	case errors.Is(err, mvcc.ErrEmptyBatch):
		return fault{code: codes.InvalidArgument, reason: pb.ErrorReason_ERROR_REASON_BATCH_EMPTY, field: "mutations"}
	case errors.Is(err, errShuttingDown), errors.Is(err, mvcc.ErrClosed):
		return fault{code: codes.Unavailable, reason: pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN, retry: retryShutdown}
	case errors.Is(err, audit.ErrUnavailable):
		return fault{code: codes.Unavailable, reason: pb.ErrorReason_ERROR_REASON_AUDIT_UNAVAILABLE, retry: retryLoad}
	case errors.Is(err, errExpired):
		return fault{code: codes.DeadlineExceeded, reason: pb.ErrorReason_ERROR_REASON_EXPIRED_BEFORE_START}
	case errors.Is(err, errIncomplete):
		return fault{code: codes.Aborted, reason: pb.ErrorReason_ERROR_REASON_MESSAGE_INCOMPLETE}
	case errors.Is(err, errNoSuchSnapshot):
		return fault{code: codes.NotFound, reason: pb.ErrorReason_ERROR_REASON_SNAPSHOT_NOT_FOUND}
	case errors.Is(err, errUnimplemented):
		return fault{code: codes.Unimplemented, reason: pb.ErrorReason_ERROR_REASON_UNIMPLEMENTED}
	}
	return fault{code: codes.Internal, reason: pb.ErrorReason_ERROR_REASON_INTERNAL}
}

// classifyTyped classifies the errors that have metadata.
func classifyTyped(err error) (fault, bool) {
	var (
		argument     *argumentError
		unknown      *mvcc.OutcomeUnknownError
		limit        *mvcc.LimitError
		duplicate    *batch.DuplicateKeyError
		precondition *mvcc.PreconditionError
		conflict     *mvcc.ConflictError
		gone         *mvcc.SnapshotGoneError
		ended        *snapshotEndedError
		corruption   *storage.CorruptionError
		level        *mvcc.FeatureLevelError
	)
	switch {
	case errors.As(err, &argument):
		return fault{code: codes.InvalidArgument, reason: argument.reason, field: argument.field}, true
	case errors.As(err, &unknown):
		return fault{code: codes.Internal, reason: pb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, metadata: map[string]string{
			"epoch": decimal(unknown.Epoch), "cause": unknown.Cause.Error(),
		}}, true
	case errors.As(err, &limit):
		return limitFault(limit), true
	case errors.As(err, &duplicate):
		return fault{
			code: codes.InvalidArgument, reason: pb.ErrorReason_ERROR_REASON_DUPLICATE_KEY, field: "mutations",
			metadata: about(duplicate.Key),
		}, true
	case errors.As(err, &precondition):
		return preconditionFault(precondition), true
	case errors.As(err, &conflict):
		return fault{
			code: codes.Aborted, reason: pb.ErrorReason_ERROR_REASON_CONFLICT, retry: retryConflict,
			metadata: about(conflict.Key, "epoch", decimal(conflict.Epoch)),
		}, true
	case errors.As(err, &gone):
		return goneFault(gone), true
	case errors.As(err, &ended):
		f := goneFault(&mvcc.SnapshotGoneError{Epoch: ended.epoch, Oldest: ended.oldest, Newest: ended.epoch})
		f.metadata["cause"] = ended.cause.String()
		return f, true
	case errors.As(err, &level):
		return featureLevelFault(level), true
	case errors.As(err, &corruption):
		return corruptionFault(corruption), true
	}
	return fault{}, false
}

func exhausted(reason pb.ErrorReason, retry time.Duration) fault {
	return fault{code: codes.ResourceExhausted, reason: reason, retry: retry}
}

func limitFault(e *mvcc.LimitError) fault {
	f := fault{code: codes.InvalidArgument, metadata: map[string]string{
		"limit": strconv.Itoa(e.Limit), "size": strconv.Itoa(e.Got),
	}}
	what, unit, _ := strings.Cut(e.What, " ")
	switch what {
	case "key":
		f.reason, f.field = pb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE, "key"
	case "value":
		f.reason, f.field = pb.ErrorReason_ERROR_REASON_VALUE_TOO_LARGE, "value"
	case "transaction":
		f.reason, f.metadata["unit"] = pb.ErrorReason_ERROR_REASON_TXN_TOO_LARGE, unit
	default:
		f.reason, f.field = pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "mutations"
		f.metadata["unit"] = unit
	}
	return f
}

func preconditionFault(e *mvcc.PreconditionError) fault {
	index := strconv.Itoa(e.Index)
	if e.Condition.Kind == mvcc.LockHeld {
		return fault{
			code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_FENCED,
			metadata: about(e.Condition.Key, "token", decimal(e.Condition.Epoch), "index", index),
		}
	}
	name, epoch := conditionName(e.Condition.Kind), e.Epoch
	if !e.Found {
		epoch = 0 // that of a deletion is of no use for a condition
	}
	f := fault{
		code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED,
		metadata: about(e.Condition.Key, "index", index, "condition", name, "epoch", decimal(epoch)),
		detail: &errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{{
			Type: name, Subject: subjectOf(e.Condition.Key), Description: messageOf(e),
		}}},
	}
	switch {
	case !e.Found || !e.Condition.ReturnCurrent:
	case e.ValueSize > mvcc.CurrentValueBytesMax:
		f.metadata["value_size"] = strconv.Itoa(e.ValueSize)
	default:
		pb.SetBytes(f.metadata, "value", e.Value)
	}
	return f
}

// subjectOf is a key as people read it. Programs read it from the metadata.
func subjectOf(key []byte) string {
	if quoted := keys.Quote(key); quoted != `"`+string(key)+`"` {
		return quoted
	}
	return string(key)
}

func conditionName(k mvcc.ConditionKind) string {
	switch k {
	case mvcc.KeyAbsent:
		return "absent"
	case mvcc.KeyPresent:
		return "exists"
	case mvcc.ValueEquals:
		return "value_equals"
	case mvcc.EpochEquals:
		return "epoch_equals"
	}
	return "unknown"
}

func goneFault(e *mvcc.SnapshotGoneError) fault {
	if e.Epoch > e.Newest {
		return fault{
			code: codes.OutOfRange, reason: pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE,
			metadata: map[string]string{"epoch": decimal(e.Epoch), "visible": decimal(e.Newest)},
		}
	}
	f := fault{
		code: codes.OutOfRange, reason: pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE,
		metadata: map[string]string{"epoch": decimal(e.Epoch), "oldest": decimal(e.Oldest)},
	}
	if e.OldestTime != 0 {
		f.metadata["oldest_time_us"] = strconv.FormatUint(e.OldestTime, 10)
	}
	return f
}

func corruptionFault(e *storage.CorruptionError) fault {
	f := fault{code: codes.DataLoss, reason: pb.ErrorReason_ERROR_REASON_CORRUPTION, metadata: map[string]string{
		"file": e.File, "offset": strconv.FormatInt(e.Offset, 10),
	}}
	if e.KeyLower != nil || e.KeyUpper != nil {
		lower, upper := shortRange(e.KeyLower, e.KeyUpper)
		pb.SetBytes(f.metadata, "key_lower", lower)
		pb.SetBytes(f.metadata, "key_upper", upper)
	}
	return f
}

// boundBytesMax is the length of a key in a range that an error names. Errors are in trailers; see mvcc.CurrentValueBytesMax.
const boundBytesMax = 512

// shortRange is a range with shorter bounds that encloses the keys from lower to upper.
func shortRange(lower, upper []byte) (shortLower, shortUpper []byte) {
	lower = lower[:min(len(lower), boundBytesMax)]
	if len(upper) > boundBytesMax {
		upper, _ = keys.Successor(nil, upper[:boundBytesMax]) // nil, no bound, if there is none
	}
	return lower, upper
}

func decimal(e keys.Epoch) string { return strconv.FormatUint(uint64(e), 10) }

// about is metadata with a key, and pairs of further names and values.
func about(key []byte, more ...string) map[string]string {
	metadata := map[string]string{}
	pb.SetBytes(metadata, "key", key)
	for i := 0; i+1 < len(more); i += 2 {
		metadata[more[i]] = more[i+1]
	}
	return metadata
}
