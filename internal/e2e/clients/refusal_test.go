package clients

import (
	"errors"
	"testing"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// TestRefusedMessageIsKnownNotToBeExecuted: a message that the server refuses to receive has not been
// executed, and the client says so. A pipeline that ends because of such a message does not say so
// of the requests before it, which may have been executed.
func TestRefusedMessageIsKnownNotToBeExecuted(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--max-batch-size", "1MiB", "--max-batch-ops", "1000", "--max-value-size", "1MiB")
	c := s.dial(s.endpoint)
	_, err := c.Put(t.Context(), []byte("k"), make([]byte, 8<<20))
	var e *client.Error
	if !errors.As(err, &e) || e.Reason != kvpb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE || e.OutcomeUnknown() {
		t.Errorf("got %v, want an error of a request that was not executed", err)
	}
	pipeline, err := c.Pipeline(t.Context(), client.PipelineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := pipeline.Put([]byte("k"), []byte("v"), nil); err != nil {
		t.Fatal(err)
	}
	_ = pipeline.Put([]byte("k"), make([]byte, 8<<20), nil) // Close has the reason
	if err := pipeline.Close(); !errors.As(err, &e) || e.Reason != kvpb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE || !e.OutcomeUnknown() {
		t.Errorf("got %v, want the reason, and that the outcome of earlier requests is unknown", err)
	}
}
