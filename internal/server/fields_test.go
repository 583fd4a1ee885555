package server

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// fieldsOf is how many fields a message has if it has all, of a oneof the one with the most, and if its lists, but for those of their
// elements, have so many elements.
func fieldsOf(t *testing.T, of protoreflect.MessageDescriptor, elements int, within ...protoreflect.MessageDescriptor) (n int) {
	if slices.Contains(within, of) {
		t.Fatalf("%s contains itself: countFields must bound the depth", of.FullName())
	}
	within = append(within, of)
	largest := map[protoreflect.OneofDescriptor]int{}
	for i := range of.Fields().Len() {
		f, has, of := of.Fields().Get(i), 1, elements
		if f.IsList() {
			of = 1
		}
		if f.Message() != nil {
			has += fieldsOf(t, f.Message(), of, within...)
		}
		if f.IsList() {
			has *= elements
		}
		if one := f.ContainingOneof(); one != nil {
			largest[one] = max(largest[one], has)
		} else {
			n += has
		}
	}
	for _, most := range largest {
		n += most
	}
	return n
}

// TestLegalRequestsHaveNoMoreFieldsThanAreAllowed, also those that have everything in every operation.
func TestLegalRequestsHaveNoMoreFieldsThanAreAllowed(t *testing.T) {
	const operations = 1000
	methods := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("epochkv.v1", func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			all := file.Services().Get(i).Methods()
			for m := range all.Len() {
				if n := fieldsOf(t, all.Get(m).Input(), operations); n > fieldsPerOperation*operations+fieldsCounted {
					t.Errorf("%s: %d fields in requests of %d operations", all.Get(m).FullName(), n, operations)
				}
				methods++
			}
		}
		return true
	})
	if methods < 30 {
		t.Fatalf("only %d methods were found", methods)
	}
}

// TestFieldsAreCountedOnAllLevels: unknown ones and those that replace each other too, but nothing in the bytes of a value.
func TestFieldsAreCountedOnAllLevels(t *testing.T) {
	value := bytes.Repeat([]byte{1 << 3, 1}, 1000) // would be 1000 fields
	m := &pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{
		{Kind: pb.Mutation_KIND_PUT, Key: value, Value: value},
		{Kind: pb.Mutation_KIND_PUT, Key: []byte("k"), TtlMs: 1},
	}}}}
	encoded, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	of := m.ProtoReflect().Descriptor()
	const want = 1 + 2 + 3 + 3
	if n, err := countFields(encoded, of, 1<<20); n != want || err != nil {
		t.Errorf("%d fields, want %d: %v", n, want, err)
	}
	inner := protowire.AppendBytes([]byte{1<<3 | 2}, append(bytes.Repeat([]byte{1 << 3, 1}, 500), bytes.Repeat([]byte{0xf8, 0x7f, 1}, 500)...))
	if n, err := countFields(append(encoded, protowire.AppendBytes([]byte{encoded[0]}, inner)...), of, 1<<20); n != want+2+1000 || err != nil {
		t.Errorf("%d fields, want %d: %v", n, want+2+1000, err)
	}
	if n, err := countFields(encoded, of, 5); n > 6 || err != nil {
		t.Errorf("counted to %d, where 5 are allowed: %v", n, err)
	}
	for i := range encoded {
		_, _ = countFields(encoded[:i], of, 1<<20)
	}
}

// TestMessagesOfVeryManyFieldsAreRefused before they are decoded, wherever the fields are.
func TestMessagesOfVeryManyFieldsAreRefused(t *testing.T) {
	const operations, pipeline = 100, "KVService/Pipeline"
	alternating := bytes.Repeat([]byte{4 << 3, 2, 5 << 3, 2}, fieldsPerOperation*operations) // min and max of an invocation
	unknown := bytes.Repeat([]byte{0xf8, 0x7f, 1}, 2*fieldsPerOperation*operations)
	first := func(of byte, message []byte) []byte { return protowire.AppendBytes([]byte{of<<3 | 2}, message) }
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		h := mustStart(t, func(c *config.Config) { c.Transport, c.Limits.BatchOps = transport, operations })
		conn := h.dial(t, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})))
		for _, r := range []struct {
			method  string
			message []byte
			streams bool
		}{
			{"TransactionService/Transact", unknown, true},
			{"TransactionService/Transact", first(5, first(1, unknown)), true},
			{"TransactionService/Transact", first(7, alternating), true},
			{pipeline, first(8, first(1, alternating)), true},
			{"KVService/InvokeAll", first(1, alternating), false},
			{"TransactionService/Execute", first(2, first(5, alternating)), false},
			{"KVService/BulkLoad", first(1, unknown), true},
			{"KVService/Put", unknown, false},
		} {
			err := invokeEncoded(testContext(t), conn, r.method, r.message, r.streams)
			answered := !r.streams
			if r.method == pipeline && transport == config.TransportDirect {
				err, answered = pipelineError(t, conn, r.message), true
			}
			if !strings.Contains(fmt.Sprint(err), "fields") || answered && reasonOf(status.Convert(err)) != "BATCH_TOO_LARGE" {
				t.Errorf("%s: %s: %v", transport, r.method, err)
			}
		}
		h.mustDecodeNothing(t)
	}
}

// pipelineError is the error in the answer to an encoded request of a pipeline.
func pipelineError(t *testing.T, conn *grpc.ClientConn, message []byte) error {
	t.Helper()
	stream, err := conn.NewStream(testContext(t), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, pb.KVService_Pipeline_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	answer := new(pb.PipelineResponse)
	if err := stream.SendMsg(&message); err != nil {
		t.Fatal(err)
	}
	if err := stream.RecvMsg(answer); err != nil {
		t.Fatal(err)
	}
	return status.ErrorProto(answer.GetError())
}
