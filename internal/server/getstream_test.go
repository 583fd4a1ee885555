package server

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestValuesOfAnySizeReachAClientWithDefaults: a client of gRPC without options refuses messages above 4 MiB.
func TestValuesOfAnySizeReachAClientWithDefaults(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 256 * config.MiB }) // grpc-go counts the refused answer for a while
	conn, err := grpc.NewClient("passthrough:///"+h.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()), h.token())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	kv, ctx, key := pb.NewKVServiceClient(conn), testContext(t), []byte("k")
	for _, size := range []int{0, 1, getStreamChunkBytes, getStreamChunkBytes + 1, 5 << 20} {
		value := bytes.Repeat([]byte("0123456789abcdef"), size/16+1)[:size]
		put, err := h.kv.Put(ctx, &pb.PutRequest{Key: key, Value: value})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := kv.Get(ctx, &pb.GetRequest{Key: key}); (status.Code(err) == codes.ResourceExhausted) != (size > 4<<20) {
			t.Errorf("get of %d bytes: %v", size, err)
		}
		head, got := mustGetStream(t, kv, &pb.GetStreamRequest{Key: key})
		if !bytes.Equal(got, value) || !head.Found || head.Epoch != put.Epoch || head.ReadEpoch < put.Epoch || head.Size != uint64(size) {
			t.Errorf("%d bytes: got %d bytes, head %v", size, len(got), head)
		}
	}
	if head, got := mustGetStream(t, kv, &pb.GetStreamRequest{Key: []byte("none")}); head.Found || head.ReadEpoch == 0 || len(got) != 0 {
		t.Errorf("a missing key: %v", head)
	}
	for name, row := range map[string]struct {
		request *pb.GetStreamRequest
		code    codes.Code
		reason  pb.ErrorReason
	}{
		"empty key":    {&pb.GetStreamRequest{}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_EMPTY},
		"future epoch": {&pb.GetStreamRequest{Key: key, SnapshotEpoch: 1 << 40}, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE},
		"two times":    {&pb.GetStreamRequest{Key: key, SnapshotEpoch: 1, SnapshotTimeUs: 1}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
	} {
		stream, err := kv.GetStream(ctx, row.request)
		if err == nil {
			_, err = stream.Recv()
		}
		if f := failureOf(t, err); f.code != row.code || f.reason != row.reason.Reason() {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// TestStreamedGetReadsItsSnapshot: a value that is replaced is readable at its epoch, as with Get.
func TestStreamedGetReadsItsSnapshot(t *testing.T) {
	h := mustStart(t)
	old := h.put(t, "k", "old")
	snapshot := mustHoldNewest(t, h)
	h.put(t, "k", "new")
	defer snapshot()
	if head, got := mustGetStream(t, h.kv, &pb.GetStreamRequest{Key: []byte("k"), SnapshotEpoch: old}); string(got) != "old" || head.ReadEpoch != old {
		t.Errorf("got %q at %d", got, head.ReadEpoch)
	}
}

// mustHoldNewest keeps the newest epoch readable until the returned function is called.
func mustHoldNewest(t *testing.T, h *harness) (end func()) {
	t.Helper()
	session, err := h.store.Session()
	if err == nil {
		_, err = session.OpenSnapshot(0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		session.CloseSnapshot()
		session.Close()
	}
}

// mustGetStream returns the first message and the value.
func mustGetStream(t *testing.T, kv pb.KVServiceClient, req *pb.GetStreamRequest) (head *pb.GetStreamResponse, value []byte) {
	t.Helper()
	stream, err := kv.GetStream(testContext(t), req)
	if err != nil {
		t.Fatal(err)
	}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return head, value
		}
		if err != nil {
			t.Fatal(err)
		}
		if head == nil {
			head = part
		} else if part.Found || part.Epoch|part.ReadEpoch|part.ExpiresAtMs|part.Size != 0 {
			t.Errorf("a later message has more than its chunk: %v", part)
		}
		if part.SizeVT() > getStreamChunkBytes+64 {
			t.Errorf("a message of %d bytes", part.SizeVT())
		}
		value = append(value, part.Chunk...)
	}
}
