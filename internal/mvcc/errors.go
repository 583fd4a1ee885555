package mvcc

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// Sentinels. Each is one reason that clients see; the server maps them in one place.
var (
	// ErrMemoryFull means that the memory budget is used up until a checkpoint makes room. Nothing was written.
	ErrMemoryFull = storage.ErrMemoryFull
	// ErrFailed means that a write or sync of the log failed, or that a commit found no memory after its epoch was reserved: the store takes no more
	// writes until it is restarted.
	ErrFailed = storage.ErrFailed
	// ErrClosed means that the store is closed or closing.
	ErrClosed = errors.New("mvcc: store is closed")
	// ErrTooManySessions means that Limits.Sessions sessions are in use.
	ErrTooManySessions = errors.New("mvcc: too many sessions")
	// ErrEmptyBatch means that a commit has no operations.
	ErrEmptyBatch = errors.New("mvcc: batch has no operations")
	// ErrEmptyKey means that a key has no bytes.
	ErrEmptyKey = errors.New("mvcc: key is empty")
)

// ConflictError means that a key or range changed after the snapshot the transaction read. Retrying it takes a newer one.
type ConflictError struct {
	Key   []byte // the client's key; for a range, its lower bound
	Epoch keys.Epoch
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("mvcc: %s was changed by a concurrent commit; retry", keys.Quote(e.Key))
}

// PreconditionError names the precondition that does not hold. Nothing was written.
type PreconditionError struct {
	Index     int // position in the request
	Condition Condition
	Found     bool       // whether the key exists
	Epoch     keys.Epoch // epoch of the key's newest version, zero if it never existed
	Value     []byte     // with Condition.ReturnCurrent: the value, if it has at most CurrentValueBytesMax
	ValueSize int        // with Condition.ReturnCurrent: its length
}

func (e *PreconditionError) Error() string {
	if e.Condition.Kind == LockHeld {
		return fmt.Sprintf("mvcc: the lock %s is not held with the token %d", keys.Quote(e.Condition.Key), e.Condition.Epoch)
	}
	return fmt.Sprintf("mvcc: precondition %d does not hold: key %s %s", e.Index, keys.Quote(e.Condition.Key), e.Condition.Kind.mismatch(e.Found))
}

func (k ConditionKind) mismatch(found bool) string {
	switch {
	case k == KeyAbsent:
		return "exists"
	case !found:
		return "does not exist"
	case k == EpochEquals:
		return "was written at another epoch"
	}
	return "has another value"
}

// SnapshotGoneError means that no snapshot, lease or retention keeps the named epoch readable, or that its state does not exist any
// more.
type SnapshotGoneError struct {
	Epoch  keys.Epoch
	Oldest keys.Epoch // from here on every epoch is readable
	Newest keys.Epoch // newest epoch there is

	OldestTime uint64 // the state at this time and later is readable, in microseconds since 1970; zero if it is not known

	Missing keys.EpochRange // of which the epoch is one: a crash lost their commits, or a repair removed them; zero if not
}

func (e *SnapshotGoneError) Error() string {
	switch {
	case e.Epoch > e.Newest:
		return fmt.Sprintf("mvcc: epoch %d is newer than the newest epoch, %d", e.Epoch, e.Newest)
	case e.Missing.Last != 0:
		return fmt.Sprintf("mvcc: the state of epoch %d does not exist any more: a crash lost the commits from epoch %d on, or a repair of the log removed them; epochs from %d on can be read",
			e.Epoch, e.Missing.First, e.Missing.Last)
	}
	return fmt.Sprintf("mvcc: epoch %d can no longer be read; the oldest readable one is %d", e.Epoch, e.Oldest)
}

// LimitError means that a request asks for more than a configured limit.
type LimitError struct {
	What       string // "key bytes", "value bytes", "batch bytes", "batch operations"
	Limit, Got int
	Records    int // of Got, those of deadlines and leases: see Write.countedOperations
	Operations int // of Got, what the operations of a request count: see InvokeOperationBytes
}

func (e *LimitError) Error() string {
	if e.Records > 0 {
		return fmt.Sprintf("mvcc: %s: %d, of which %d are for deadlines and leases, exceed the limit of %d", e.What, e.Got, e.Records, e.Limit)
	}
	if e.Operations > 0 {
		return fmt.Sprintf("mvcc: %s: %d, of which %d are for operations (%d for each beyond %d), exceed the limit of %d; keys count twice",
			e.What, e.Got, e.Operations, InvokeOperationBytes, InvokeOperationsFree, e.Limit)
	}
	return fmt.Sprintf("mvcc: %s: %d exceeds the limit of %d", e.What, e.Got, e.Limit)
}

// ofKey names the key whose large value is damaged. Damage in the tree names the range that a page may hold already.
func ofKey(err error, internal []byte) error {
	damage, ok := errors.AsType[*storage.CorruptionError](err)
	if !ok || damage.KeyLower != nil || damage.KeyUpper != nil {
		return err
	}
	damage.KeyLower = bytes.Clone(keys.User(internal))
	damage.KeyUpper = append(bytes.Clone(damage.KeyLower), 0)
	return err
}

// OutcomeUnknownError means that a commit is installed, or that the superblock of a bulk load was written, and that the store has failed
// before it was durable: the next start finds it, or not.
type OutcomeUnknownError struct {
	Epoch keys.Epoch // of the commit, or a later one
	Cause error
}

func (e *OutcomeUnknownError) Error() string {
	return fmt.Sprintf("mvcc: the store failed before epoch %d was durable: %v", e.Epoch, e.Cause)
}

// Unwrap returns the cause.
func (e *OutcomeUnknownError) Unwrap() error { return e.Cause }

// NotPermittedError is the error of the function that Session.Permit has set. It also replaces the outcome of an earlier attempt
// of the request.
type NotPermittedError struct{ Cause error }

func (e *NotPermittedError) Error() string { return e.Cause.Error() }

// Unwrap returns the cause.
func (e *NotPermittedError) Unwrap() error { return e.Cause }
