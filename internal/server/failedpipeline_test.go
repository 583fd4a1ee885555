package server

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestFailedPipelineAnswersWhatItExecuted: the message after durable puts cannot be taken. Their answers, which wait for the
// disk at that time, come before the error, and what is sent after that message is not executed.
func TestFailedPipelineAnswersWhatItExecuted(t *testing.T) {
	const n = 50
	failures := map[string]struct {
		message []byte
		code    codes.Code
	}{
		"cannot be decoded": {bytes.Repeat([]byte{0xff}, 20), codes.Internal},
		"is too large":      {make([]byte, 3<<20), codes.InvalidArgument},
	}
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		h := mustStart(t, func(c *config.Config) {
			c.Transport, c.Limits.BatchSize, c.Limits.ValueSize, c.Limits.BatchOps = transport, config.MiB, config.MiB, 1000
		})
		h.slowSyncs(100 * time.Millisecond)
		conn := h.dial(t, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})))
		for name, failure := range failures {
			if transport == config.TransportGRPC && name == "is too large" {
				continue // refused before the gRPC library knows of it, which ends the stream at once
			}
			t.Run(fmt.Sprintf("%s/%s", transport, name), func(t *testing.T) {
				stream, err := conn.NewStream(testContext(t), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, pb.KVService_Pipeline_FullMethodName)
				if err != nil {
					t.Fatal(err)
				}
				for i := range uint64(n) {
					if err := stream.SendMsg(putRequest(i, strconv.FormatUint(i, 10), name, pb.Durability_DURABILITY_SYNC)); err != nil {
						t.Fatal(err)
					}
					if i == 0 {
						time.Sleep(20 * time.Millisecond) // it has a sync of its own
					}
				}
				for _, message := range []any{&failure.message, putRequest(n, "after", name, pb.Durability_DURABILITY_SYNC)} {
					_ = stream.SendMsg(message) // the stream may have ended
				}
				answered := 0
				for err == nil {
					var response pb.PipelineResponse
					if err = stream.RecvMsg(&response); err == nil && response.GetPut().GetEpoch() > 0 && response.GetId() < n {
						answered++
					}
				}
				if status.Code(err) != failure.code || answered != n {
					t.Errorf("%d of %d puts were answered before %v", answered, n, err)
				}
				if got, err := h.kv.Get(context.Background(), &pb.GetRequest{Key: []byte("after")}); err != nil || got.GetFound() {
					t.Errorf("what was sent after the message: %v, %v", got, err)
				}
			})
		}
	}
}

// TestHalfAMessageCutsNoAnswer: the rest of a message does not come in time, while what was executed before waits for the disk. The
// answers come before the error.
func TestHalfAMessageCutsNoAnswer(t *testing.T) {
	t.Parallel() // it waits for messages that do not come
	const n = 20
	message := func(m interface{ MarshalVT() ([]byte, error) }) []byte {
		encoded, err := m.MarshalVT()
		if err != nil {
			t.Fatal(err)
		}
		return append(prefixed(len(encoded))[:grpcPrefixBytes], encoded...)
	}
	var puts [][]byte
	for i := range uint64(n) {
		puts = append(puts, message(putRequest(i, strconv.FormatUint(i, 10), "v", pb.Durability_DURABILITY_SYNC)))
	}
	for name, test := range map[string]struct {
		path     string
		messages [][]byte
		answers  int
	}{
		"pipeline": {pb.KVService_Pipeline_FullMethodName, puts, n},
		"transaction": {pb.TransactionService_Transact_FullMethodName, [][]byte{
			message(&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{Durability: pb.Durability_DURABILITY_SYNC}}}),
			message(&pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: []byte("t"), Value: []byte("v")}}}}}),
			message(&pb.TransactRequest{Request: &pb.TransactRequest_Commit{Commit: new(pb.CommitRequest)}}),
		}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			const timeout = 200 * time.Millisecond
			h := mustStart(t, withDirect, func(c *config.Config) { c.MessageTimeout = timeout })
			h.slowSyncs(4 * timeout)
			c := h.dialRaw(t)
			c.begin(1, test.path, "20S")
			for _, m := range test.messages {
				c.send(frame(frameData, 0, 1, m))
			}
			c.send(frame(frameData, 0, 1, prefixed(1000)[:500]))
			answers, reason := c.answersOf(t, 1)
			if answers != test.answers || reason != "MESSAGE_INCOMPLETE" {
				t.Errorf("%d of %d answers before %q", answers, test.answers, reason)
			}
		})
	}
}
