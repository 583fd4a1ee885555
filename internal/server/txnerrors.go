package server

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Errors of transactions in the RPC layer.
var (
	errNotBegun       = errors.New("no transaction is open on this stream; begin one")
	errBegunAlready   = errors.New("a transaction is open on this stream; commit or roll it back first")
	errTxnEnded       = errors.New("an operator has rolled the transaction back")
	errTooManyTxns    = errors.New("too many transactions are open")
	errTxnMemory      = errors.New("the open transactions hold too many bytes together")
	errNoSuchTxn      = errors.New("no open transaction has this id")
	errNoSnapshotHere = invalid("snapshot_epoch", "may be named by a read-only transaction only")
)

// txnFailedError is the answer to every request of a transaction after a failed request.
type txnFailedError struct{ cause error }

func (e *txnFailedError) Error() string {
	return fmt.Sprintf("an earlier request of the transaction failed (%v); roll back, at least to a savepoint", e.cause)
}

// txnTimeoutError ends a transaction that was idle or open for too long.
type txnTimeoutError struct {
	idle   bool
	beside bool // beside the share of transactions; see txnMemory
	limit  time.Duration
}

func (e *txnTimeoutError) Error() string {
	if e.idle {
		return fmt.Sprintf("the transaction was idle for longer than %v and is rolled back", e.limit)
	}
	if e.beside {
		return fmt.Sprintf("the transaction had the room for a large one for longer than %v while another one needed it, and is rolled back", e.limit)
	}
	return fmt.Sprintf("the transaction was open for longer than %v and is rolled back", e.limit)
}

// classifyTransaction is classify for the errors of transactions.
func classifyTransaction(err error) (fault, bool) {
	var (
		mistyped *mvcc.TypeError
		failed   *txnFailedError
		timeout  *txnTimeoutError
	)
	precondition := func(reason pb.ErrorReason) (fault, bool) {
		return fault{code: codes.FailedPrecondition, reason: reason}, true
	}
	switch {
	case errors.As(err, &failed):
		return fault{
			code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_TXN_FAILED,
			metadata: map[string]string{"cause": classify(failed.cause).reason.Reason()},
		}, true
	case errors.As(err, &mistyped):
		return fault{
			code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_TYPE_ERROR,
			metadata: about(mistyped.Key, "index", fmt.Sprint(mistyped.Index)),
		}, true
	case errors.As(err, &timeout):
		what := "total"
		if timeout.idle {
			what = "idle"
		} else if timeout.beside {
			what = "large"
		}
		return fault{
			code: codes.Aborted, reason: pb.ErrorReason_ERROR_REASON_TXN_TIMEOUT,
			metadata: map[string]string{"limit": what, "timeout": timeout.limit.String()},
		}, true
	case errors.Is(err, mvcc.ErrReadOnly):
		return precondition(pb.ErrorReason_ERROR_REASON_TXN_READ_ONLY)
	case errors.Is(err, mvcc.ErrNoSavepoint):
		return precondition(pb.ErrorReason_ERROR_REASON_NO_SAVEPOINT)
	case errors.Is(err, errNotBegun), errors.Is(err, errBegunAlready), errors.Is(err, mvcc.ErrNoTransaction):
		return precondition(pb.ErrorReason_ERROR_REASON_TXN_STATE)
	case errors.Is(err, errTxnEnded):
		return fault{code: codes.Aborted, reason: pb.ErrorReason_ERROR_REASON_TXN_ENDED}, true
	case errors.Is(err, errTooManyTxns), errors.Is(err, errTxnMemory):
		return exhausted(pb.ErrorReason_ERROR_REASON_TOO_MANY_TXNS, retrySessions), true
	case errors.Is(err, errNoSuchTxn):
		return fault{code: codes.NotFound, reason: pb.ErrorReason_ERROR_REASON_TXN_NOT_FOUND}, true
	}
	return fault{}, false
}

// detached is err without references to memory of the session, for an executor that releases the
// session before the error is sent.
func detached(err error) error {
	var conflict *mvcc.ConflictError
	if errors.As(err, &conflict) {
		return &mvcc.ConflictError{Key: append([]byte(nil), conflict.Key...), Epoch: conflict.Epoch}
	}
	return err
}
