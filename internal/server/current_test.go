package server

import (
	"bytes"
	"strconv"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// conditionalWrites sends each write that can have preconditions.
func conditionalWrites(t *testing.T, h *harness) map[string]func([]*pb.Precondition, bool) error {
	t.Helper()
	ctx, key := testContext(t), []byte("other")
	invocation := &pb.Invocation{Key: key, Operation: &pb.Invocation_Append{Append: []byte("x")}}
	pipeline, err := h.kv.Pipeline(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pipeline.CloseSend() })
	return map[string]func([]*pb.Precondition, bool) error{
		"Put": func(p []*pb.Precondition, current bool) error {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: key, Preconditions: p, ReturnCurrent: current})
			return err
		},
		"Delete": func(p []*pb.Precondition, current bool) error {
			_, err := h.kv.Delete(ctx, &pb.DeleteRequest{Key: key, Preconditions: p, ReturnCurrent: current})
			return err
		},
		"BatchWrite": func(p []*pb.Precondition, current bool) error {
			_, err := h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: key}}, Preconditions: p, ReturnCurrent: current})
			return err
		},
		"DeleteRange": func(p []*pb.Precondition, current bool) error {
			_, err := h.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Range: &pb.KeyRange{Prefix: key}, Preconditions: p, ReturnCurrent: current})
			return err
		},
		"Invoke": func(p []*pb.Precondition, current bool) error {
			_, err := h.kv.Invoke(ctx, &pb.InvokeRequest{Invocation: invocation, Preconditions: p, ReturnCurrent: current})
			return err
		},
		"InvokeAll": func(p []*pb.Precondition, current bool) error {
			_, err := h.kv.InvokeAll(ctx, &pb.InvokeAllRequest{Invocations: []*pb.Invocation{invocation}, Preconditions: p, ReturnCurrent: current})
			return err
		},
		"pipelined Put": func(p []*pb.Precondition, current bool) error {
			if err := pipeline.Send(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: key, Preconditions: p, ReturnCurrent: current}}}); err != nil {
				return err
			}
			r, err := pipeline.Recv()
			if err != nil || r.GetError() == nil {
				return err
			}
			return status.FromProto(r.GetError()).Err()
		},
	}
}

// TestFailedPreconditionTellsWhatItFound: the epoch always, and the value on request, up to the bound.
func TestFailedPreconditionTellsWhatItFound(t *testing.T) {
	h := mustStart(t)
	longest := string(bytes.Repeat([]byte("v"), mvcc.CurrentValueBytesMax))
	epochs := map[string]uint64{}
	for key, value := range map[string]string{"text": "old", "empty": "", "binary": "\xff\x00", "longest": longest, "longer": longest + "v", "deleted": "x"} {
		epochs[key] = h.put(t, key, value)
	}
	if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("deleted")}); err != nil {
		t.Fatal(err)
	}
	epochs["deleted"] = 0
	current := map[string]map[string]string{
		"text": {"value": "old"}, "empty": {"value": ""}, "binary": {"value_base64": "/wA="}, "longest": {"value": longest},
		"longer": {"value_size": strconv.Itoa(len(longest) + 1)}, "deleted": {}, "never": {},
	}
	for name, write := range conditionalWrites(t, h) {
		for key, entries := range current {
			for _, asked := range []bool{true, false} { // a pipeline uses its message again
				err := write([]*pb.Precondition{{Key: []byte(key), Condition: &pb.Precondition_EpochEquals{EpochEquals: 1 << 40}}}, asked)
				f := failureOf(t, err)
				want := map[string]string{"key": key, "index": "0", "condition": "epoch_equals", "epoch": strconv.FormatUint(epochs[key], 10)}
				if asked {
					for entry, text := range entries {
						want[entry] = text
					}
				}
				if f.code != codes.FailedPrecondition || !sameEntries(f.metadata, want) {
					t.Errorf("%s, %s, value asked for: %v: %v %.100q", name, key, asked, f.code, f.metadata)
				}
			}
		}
	}
}

func sameEntries(got, want map[string]string) bool {
	if len(got) != len(want) {
		return false
	}
	for name, text := range want {
		if got[name] != text {
			return false
		}
	}
	return true
}

// TestLargestErrorFitsIntoTrailers: many clients of gRPC accept 8 KiB of metadata, and lose an error that has more.
func TestLargestErrorFitsIntoTrailers(t *testing.T) {
	h := mustStart(t)
	key := bytes.Repeat([]byte{0xff}, h.limits.KeyBytes)
	value := bytes.Repeat([]byte{0xff}, mvcc.CurrentValueBytesMax)
	if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: key, Value: value}); err != nil {
		t.Fatal(err)
	}
	absent := []*pb.Precondition{{Key: key, Condition: &pb.Precondition_Exists{}}}
	_, refused := h.kv.Put(testContext(t), &pb.PutRequest{Key: key, Preconditions: absent, ReturnCurrent: true})
	f := failureOf(t, refused)
	if got, ok := pb.Bytes(f.metadata, "key"); !ok || !bytes.Equal(got, key) {
		t.Errorf("the key is %q", got)
	}
	if got, ok := pb.Bytes(f.metadata, "value"); !ok || !bytes.Equal(got, value) {
		t.Errorf("the value is %q", got)
	}
	details, err := proto.Marshal(status.Convert(refused).Proto())
	if err != nil {
		t.Fatal(err)
	}
	const perField, fields = 32, 4
	if size := len(details)*4/3 + 3*len(status.Convert(refused).Message()) + perField*fields + 100; size > 8<<10 {
		t.Errorf("the trailers have %d bytes", size)
	}
}
