package server

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// fillStreams takes all streams that connections share.
func (h *harness) fillStreams(t *testing.T) {
	t.Helper()
	taken := h.receiving.streams.limit
	h.receiving.streams.reserved.Add(taken)
	t.Cleanup(func() { h.receiving.streams.reserved.Add(-taken) })
}

// dialFull is a connection with the streams that each may have, all open.
func (h *harness) dialFull(t *testing.T) *grpc.ClientConn {
	t.Helper()
	conn := h.dial(t)
	for range config.StreamsOwn {
		before := h.counters.streams.Load()
		if _, err := pb.NewKVServiceClient(conn).Pipeline(testContext(t)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it is open", func() bool { return h.counters.streams.Load() == before+1 })
	}
	return conn
}

// TestStreamsOfOperatorsBeyondTheLimitHaveABound: every client may open them while users are not checked, and send nothing. An operator on
// another connection gets through.
func TestStreamsOfOperatorsBeyondTheLimitHaveABound(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.fillStreams(t)
		status := func(conn *grpc.ClientConn) error {
			_, err := pb.NewAdminServiceClient(conn).Status(testContext(t), &pb.StatusRequest{})
			return err
		}
		hog, other := h.dialFull(t), h.dial(t)
		for i := range int64(beyondMax) {
			if err := status(hog); err != nil {
				t.Fatalf("beside %d streams: %v", i, err)
			}
			desc, method := &grpc.StreamDesc{ClientStreams: true}, pb.AdminService_Status_FullMethodName
			if i%2 == 0 {
				desc, method = &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, pb.AdminService_Verify_FullMethodName
			}
			if _, err := hog.NewStream(testContext(t), desc, method); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it is open", func() bool { return h.receiving.beyond.Load() == i+1 })
		}
		failureOf(t, status(hog)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
		failureOf(t, first(pb.NewAdminServiceClient(hog).Verify(testContext(t), new(pb.VerifyRequest)))).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
		if err := status(other); err != nil {
			t.Errorf("an operator on another connection: %v", err)
		}
		if err := hog.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "none is left", func() bool { return h.receiving.beyond.Load() == 0 })
	})
}

// TestStreamsOfEveryServiceCountInTheLimit: of health and reflection, too. Another connection is served.
func TestStreamsOfEveryServiceCountInTheLimit(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.fillStreams(t)
		full, other := h.dialFull(t), h.dial(t)
		check := func(conn *grpc.ClientConn) error {
			_, err := healthpb.NewHealthClient(conn).Check(testContext(t), new(healthpb.HealthCheckRequest))
			return err
		}
		for name, err := range map[string]error{
			"a watch of health": watchHealth(t, full),
			"a check of health": check(full),
			"reflection":        first(reflectionpb.NewServerReflectionClient(full).ServerReflectionInfo(testContext(t))),
			"a backup":          first(pb.NewBackupServiceClient(full).CreateBackup(testContext(t), new(pb.CreateBackupRequest))),
		} {
			t.Log(name)
			failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
		}
		for name, err := range map[string]error{"a check of health": check(other), "a watch of health": watchHealth(t, other)} {
			if err != nil {
				t.Errorf("%s on another connection: %v", name, err)
			}
		}
	})
}

// first is how the first message of a stream is received, or why there is no stream.
func first[M any](stream interface{ Recv() (M, error) }, err error) error {
	if err == nil {
		_, err = stream.Recv()
	}
	return err
}

func watchHealth(t *testing.T, conn *grpc.ClientConn) error {
	t.Helper()
	return first(healthpb.NewHealthClient(conn).Watch(testContext(t), new(healthpb.HealthCheckRequest)))
}
