package server

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestStreamsOfOperatorsBeyondTheLimitHaveABound: every client may open them while users are not checked, and send nothing. An operator on
// another connection gets through.
func TestStreamsOfOperatorsBeyondTheLimitHaveABound(t *testing.T) {
	h := mustStart(t, withDirect)
	taken := h.receiving.streams.limit
	h.receiving.streams.reserved.Add(taken)
	defer h.receiving.streams.reserved.Add(-taken)
	status := func(conn *grpc.ClientConn) error {
		_, err := pb.NewAdminServiceClient(conn).Status(testContext(t), &pb.StatusRequest{})
		return err
	}
	hog, other := h.dial(t), h.dial(t)
	for i := range config.StreamsOwn + beyondMax {
		if err := status(hog); err != nil {
			t.Fatalf("beside %d streams: %v", i, err)
		}
		if _, err := hog.NewStream(testContext(t), &grpc.StreamDesc{ClientStreams: true}, pb.AdminService_Status_FullMethodName); err != nil {
			t.Fatal(err)
		}
	}
	failureOf(t, status(hog)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
	if err := status(other); err != nil {
		t.Errorf("an operator on another connection: %v", err)
	}
	if err := hog.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "none is left", func() bool { return h.receiving.beyond.Load() == 0 })
}
