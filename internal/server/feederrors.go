package server

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
)

// lineageError is a resume token of another history.
type lineageError struct{ token, store keys.Lineage }

func (e *lineageError) Error() string {
	return fmt.Sprintf("resume_token: is of history %v; the store has history %v, whose epochs name other commits", e.token, e.store)
}

// historyGoneError is a position from which on not every change is kept.
type historyGoneError struct {
	after, oldest keys.Epoch
	time          uint64 // instead of after, if it is not zero
	cause         error
}

func (e *historyGoneError) Error() string {
	position := fmt.Sprintf("epoch %d", e.after)
	if e.time != 0 {
		position = time.UnixMicro(int64(e.time)).UTC().Format(time.RFC3339Nano)
	}
	text := fmt.Sprintf("not all changes after %s are kept, or have a time; a watch can begin after epoch %d", position, e.oldest)
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return text
}

func (e *historyGoneError) Unwrap() error { return e.cause }

// watchStalledError is a stream whose client took nothing for too long.
type watchStalledError struct{ timeout time.Duration }

func (e *watchStalledError) Error() string {
	return fmt.Sprintf("the client took too little of the stream in %v; watch again with the last resume token", e.timeout)
}

// classifyWatch classifies the errors of watches.
func classifyWatch(err error) (fault, bool) {
	var (
		lineage *lineageError
		gone    *historyGoneError
		gap     *feed.GapError
		removed *feed.RemovedError
		limit   *feed.LimitError
		empty   *feed.RangeError
		ahead   *feed.AheadError
		stalled *watchStalledError
	)
	switch {
	case errors.As(err, &lineage):
		return fault{
			code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_LINEAGE_CHANGED,
			metadata: map[string]string{"lineage": lineage.store.String(), "token_lineage": lineage.token.String()},
		}, true
	case errors.As(err, &gone):
		f := historyGoneFault(gone.after, gone.oldest)
		if gone.time != 0 {
			f.metadata["time_us"] = strconv.FormatUint(gone.time, 10)
			delete(f.metadata, "epoch")
		}
		return f, true
	case errors.As(err, &gap):
		return historyGoneFault(gap.After.Epoch, max(gap.Oldest, 1)-1), true
	case errors.As(err, &removed):
		return historyGoneFault(removed.After.Epoch, removed.Last), true
	case errors.As(err, &limit):
		f := exhausted(pb.ErrorReason_ERROR_REASON_TOO_MANY_WATCHES, retrySessions)
		f.metadata = map[string]string{"limit": strconv.Itoa(limit.Limit)}
		return f, true
	case errors.As(err, &empty):
		return fault{code: codes.InvalidArgument, reason: pb.ErrorReason_ERROR_REASON_INVALID_RANGE, field: "range"}, true
	case errors.As(err, &ahead):
		return fault{
			code: codes.Unavailable, reason: pb.ErrorReason_ERROR_REASON_WATCH_AHEAD, retry: retrySessions,
			metadata: map[string]string{"epoch": decimal(ahead.After.Epoch), "visible": decimal(ahead.Stable)},
		}, true
	case errors.As(err, &stalled):
		return fault{
			code: codes.Aborted, reason: pb.ErrorReason_ERROR_REASON_WATCH_STALLED,
			metadata: map[string]string{"timeout": stalled.timeout.String()},
		}, true
	case errors.Is(err, errNoSuchWatch):
		return fault{code: codes.NotFound, reason: pb.ErrorReason_ERROR_REASON_WATCH_NOT_FOUND}, true
	case errors.Is(err, errWatchEnded):
		return fault{code: codes.Aborted, reason: pb.ErrorReason_ERROR_REASON_WATCH_ENDED}, true
	case errors.Is(err, feed.ErrClosed):
		return fault{code: codes.Unavailable, reason: pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN, retry: retryShutdown}, true
	}
	return fault{}, false
}

func historyGoneFault(after, oldest keys.Epoch) fault {
	return fault{
		code: codes.OutOfRange, reason: pb.ErrorReason_ERROR_REASON_HISTORY_GONE,
		metadata: map[string]string{"epoch": decimal(after), "oldest": decimal(oldest)},
	}
}
