package server

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// fillLargeShare leaves no room for large messages until the test ends.
func (h *harness) fillLargeShare(t *testing.T) {
	t.Helper()
	h.receiving.large.reserved.Add(h.receiving.large.limit)
	h.receiving.beside.take(h, nil, 1)
	t.Cleanup(func() {
		h.receiving.large.reserved.Add(-h.receiving.large.limit)
		h.receiving.beside.drop(h)
	})
}

// TestLaterMessagesAreRefusedWithTheirReason: a message that is refused on a stream that has carried
// others ends the stream with the reason that the message would have had alone, and with a metadata
// entry: earlier requests of the stream that were not answered may have been executed.
func TestLaterMessagesAreRefusedWithTheirReason(t *testing.T) {
	testseed.SkipUnderRace(t)
	h := mustStart(t, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 8*config.MiB, 8*config.MiB, 8*config.MiB
	})
	h.fillLargeShare(t)
	for _, c := range []struct {
		name     string
		size     int
		code     codes.Code
		reason   pb.ErrorReason
		metadata []string
	}{
		{"no room", 1 << 20, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED, []string{pb.EarlierRequests}},
		{"too large", 64 << 20, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, []string{pb.EarlierRequests, "limit", "size", "unit"}},
	} {
		value := make([]byte, c.size)
		check := func(t *testing.T, err error) {
			t.Helper()
			f := failureOf(t, err)
			f.want(t, c.code, c.reason, c.metadata...)
			if c.code == codes.ResourceExhausted && f.retry == 0 {
				t.Error("no advice to retry")
			}
		}
		t.Run("pipeline/"+c.name, func(t *testing.T) {
			stream := h.pipeline(t, testContext(t))
			mustSend(t, stream, putRequest(0, "k", "v", pb.Durability_DURABILITY_ASYNC))
			_ = stream.Send(putRequest(1, "large", string(value), pb.Durability_DURABILITY_ASYNC)) // Recv has the reason
			for {
				got, err := stream.Recv()
				if err != nil {
					check(t, err)
					return
				}
				if got.Id != 0 {
					t.Fatalf("answered: %v", got)
				}
			}
		})
		t.Run("transaction/"+c.name, func(t *testing.T) {
			stream, err := pb.NewTransactionServiceClient(h.conn).Transact(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range []*pb.TransactRequest{
				{Request: &pb.TransactRequest_Begin{Begin: new(pb.BeginRequest)}},
				{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{
					{Kind: pb.Mutation_KIND_PUT, Key: []byte("large"), Value: value},
				}}}},
			} {
				_ = stream.Send(r) // Recv has the reason
			}
			for err == nil {
				_, err = stream.Recv()
			}
			check(t, err)
			eventually(t, "the transaction is rolled back", func() bool { return len(h.Server.transactions.list()) == 0 })
		})
		t.Run("bulk load/"+c.name, func(t *testing.T) {
			stream, err := h.kv.BulkLoad(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			for _, size := range []int{10, c.size} {
				_ = stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("bulk"), Value: value[:size]}}})
			}
			_, err = stream.CloseAndRecv()
			check(t, err)
		})
	}
	for _, key := range []string{"large", "bulk"} {
		if h.get(t, key).Found {
			t.Errorf("%s was written", key)
		}
	}
	eventually(t, "nothing is reserved", func() bool { return h.receiving.reserved() == h.receiving.large.limit })
}

// TestLaterMessageThatStopsHasItsReason: a later message that does not proceed ends its stream with a
// reason as well, and so does one whose length was handed on in part when it was refused.
func TestLaterMessageThatStopsHasItsReason(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.MessageTimeout = 300 * time.Millisecond })
	h.fillLargeShare(t)
	encoded, err := getRequest(1, "k").MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	get := append(prefixed(len(encoded))[:grpcPrefixBytes], encoded...)
	large, small := prefixed(200<<10), prefixed(1000)
	c := h.dialRaw(t)
	for i, test := range []struct {
		name  string
		parts [][]byte // in frames
		want  string
	}{
		{"does not proceed", [][]byte{small[:500]}, "MESSAGE_INCOMPLETE"},
		{"does not proceed within the prefix", [][]byte{small[:2]}, "MESSAGE_INCOMPLETE"},
		{"refused after a part of the length", [][]byte{large[:3], large[3:1000]}, "OVERLOADED"},
	} {
		t.Run(test.name, func(t *testing.T) {
			stream := uint32(2*i + 1)
			c.begin(stream, pb.KVService_Pipeline_FullMethodName, "20S")
			c.send(frame(frameData, 0, stream, get))
			for _, part := range test.parts {
				c.send(frame(frameData, 0, stream, part))
				time.Sleep(10 * time.Millisecond) // they are read one by one
			}
			if got := c.reasonOf(t, stream); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
