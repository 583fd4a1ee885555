package server

import (
	"errors"
	"strconv"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	storeclock "github.com/epochkv/epochkv/internal/clock"
	"github.com/epochkv/epochkv/internal/mvcc"
)

var errEpochAndTime = invalid("snapshot_time_us", "must be 0 with snapshot_epoch")

// classifyHistory classifies the refusals that have to do with times and with the past.
func classifyHistory(err error) (fault, bool) {
	if earlier, ok := errors.AsType[*storeclock.EarlierError](err); ok {
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_CLOCK_EARLIER, metadata: map[string]string{
			"difference_us": strconv.FormatInt(earlier.By.Microseconds(), 10),
		}}, true
	}
	if wrong, ok := errors.AsType[*mvcc.TimeError](err); ok {
		f := fault{code: codes.OutOfRange, reason: pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, metadata: map[string]string{
			"time_us": strconv.FormatUint(wrong.Time, 10), "oldest": decimal(wrong.Oldest), "oldest_time_us": strconv.FormatUint(wrong.OldestTime, 10),
		}}
		if wrong.Future() {
			f.reason = pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE
			f.metadata = map[string]string{"time_us": strconv.FormatUint(wrong.Time, 10), "now_us": strconv.FormatUint(wrong.Now, 10)}
		}
		return f, true
	}
	switch {
	case errors.Is(err, mvcc.ErrNoHold):
		return fault{code: codes.NotFound, reason: pb.ErrorReason_ERROR_REASON_HOLD_NOT_FOUND}, true
	case errors.Is(err, mvcc.ErrTooManyHolds):
		f := exhausted(pb.ErrorReason_ERROR_REASON_TOO_MANY_HOLDS, retrySessions)
		f.metadata = map[string]string{"limit": strconv.Itoa(mvcc.HoldsMax)}
		return f, true
	}
	return fault{}, false
}
