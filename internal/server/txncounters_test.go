package server

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// TestHowTransactionsEndIsCounted: a rollback on request and a commit after a failed request each
// have their reason; conflicts, timeouts, operators and lost connections have theirs where they are
// tested.
func TestHowTransactionsEndIsCounted(t *testing.T) {
	h := mustStart(t)
	k := h.talk(t)
	k.begin()
	k.must(txnPutRequest("k", "v"))
	k.must(rollbackRequest)
	k.begin()
	_, err := k.say(txnPutRequest(strings.Repeat("k", 3000), "v"))
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE, "limit", "size")
	if _, err := k.say(commitRequest); err == nil {
		t.Error("committed behind a failed request")
	}
	k.must(rollbackRequest)
	s := h.transactionStats()
	if s.Started != 2 || s.Committed != 0 || s.Open != 0 || s.Aborted[telemetry.AbortRollback] != 1 || s.Aborted[telemetry.AbortFailed] != 1 {
		t.Errorf("counted %+v", s)
	}
}
