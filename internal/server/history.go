package server

import (
	"errors"
	"strconv"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	storeclock "github.com/epochkv/epochkv/internal/clock"
)

// classifyHistory classifies the refusals that have to do with times and with the past.
func classifyHistory(err error) (fault, bool) {
	if earlier, ok := errors.AsType[*storeclock.EarlierError](err); ok {
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_CLOCK_EARLIER, metadata: map[string]string{
			"difference_us": strconv.FormatInt(earlier.By.Microseconds(), 10),
		}}, true
	}
	return fault{}, false
}
