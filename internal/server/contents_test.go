package server

import (
	"bytes"
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// encodedCodec sends messages that are encoded already.
type encodedCodec struct{ pb.Codec }

func (c encodedCodec) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.(*[]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(*b)}, nil
	}
	return c.Codec.Marshal(v)
}

// allocated is how much do allocates, of the client too.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestEmptyOperationsAreRefusedBeforeTheyAreDecoded: an operation of two bytes takes a hundred once it
// is decoded. A request with more of them than the limit is refused for less memory than that.
func TestEmptyOperationsAreRefusedBeforeTheyAreDecoded(t *testing.T) {
	testseed.SkipUnderRace(t)
	const operations = 1 << 20
	ids := protowire.AppendBytes([]byte{1<<3 | 2}, make([]byte, 4*operations))
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		h := mustStart(t, func(c *config.Config) { c.Transport, c.Limits.BatchOps = transport, 1000 })
		conn := h.dial(t, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})))
		empty := bytes.Repeat([]byte{1<<3 | 2, 0}, operations)
		conditions := bytes.Repeat([]byte{3<<3 | 2, 0}, operations)
		alternating := bytes.Repeat([]byte{3<<3 | 2, 0, 2<<3 | 2, 0}, operations) // members of one oneof: each replaces the one before
		for _, row := range []struct {
			method  string
			message []byte
			stream  bool
		}{
			{"KVService/BatchWrite", empty, false},
			{"KVService/BatchGet", empty, false},
			{"KVService/InvokeAll", empty, false},
			{"KVService/Put", conditions, false},
			{"TransactionService/Execute", empty, false},
			{"TransactionService/Execute", alternating[:4*600], false}, // each list for itself is not too long
			{"KVService/Pipeline", protowire.AppendBytes([]byte{1 << 3, 7, 6<<3 | 2}, empty), true},
			{"TransactionService/Transact", protowire.AppendBytes([]byte{5<<3 | 2}, empty), true},
			{"KVService/Pipeline", append([]byte{1 << 3, 7}, bytes.Repeat(protowire.AppendBytes([]byte{6<<3 | 2}, empty[:1800]), operations/900)...), true}, // the decoder adds one to the other
			{"TransactionService/Transact", bytes.Repeat(protowire.AppendBytes([]byte{5<<3 | 2}, empty[:1800]), operations/900), true},
			{"KVService/Pipeline", append([]byte{1 << 3, 7}, alternating[2:]...), true},
			{"TransactionService/Transact", alternating, true},
			{"KVService/BulkLoad", empty, true},
			{"FeedService/Watch", protowire.AppendBytes([]byte{1<<3 | 2}, bytes.Repeat([]byte{2<<3 | 2, 0}, operations)), true},
			{"FeedService/Watch", protowire.AppendBytes([]byte{1<<3 | 2}, protowire.AppendBytes([]byte{9<<3 | 2}, make([]byte, 4*operations))), true},
			{"LeaseService/KeepAlive", ids, true},
			{"LockService/ReleaseLock", protowire.AppendBytes([]byte{4<<3 | 2}, make([]byte, 4*operations)), false},
		} {
			var err error
			var out pb.PipelineResponse
			request := func() {
				if !row.stream {
					err = conn.Invoke(testContext(t), "/epochkv.v1."+row.method, &row.message, new(pb.PutResponse))
					return
				}
				var stream grpc.ClientStream
				if stream, err = conn.NewStream(testContext(t), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/epochkv.v1."+row.method); err == nil {
					err = stream.SendMsg(&row.message)
				}
				if err == nil {
					err = stream.RecvMsg(&out)
				}
			}
			bytes := allocated(request)
			// The room of the streams before is given back when the server reads on in them, which takes a moment on a busy machine.
			for attempt := 0; attempt < 100 && status.Code(err) == codes.ResourceExhausted && failureOf(t, err).reason == pb.ErrorReason_ERROR_REASON_OVERLOADED.Reason(); attempt++ {
				time.Sleep(20 * time.Millisecond)
				bytes = allocated(request)
			}
			if bytes > 48<<20 {
				t.Errorf("%s %s: %d MiB were allocated for a message of %d MiB", transport, row.method, bytes>>20, len(row.message)>>20)
			}
			switch {
			case err == nil && (out.Id != 7 || codes.Code(out.GetError().GetCode()) != codes.InvalidArgument):
				t.Errorf("%s %s: %v", transport, row.method, &out)
			case err != nil && !row.stream:
				failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")
			}
		}
	}
}

// TestContentsOfAMessageAreThoseThatAreDecoded: whatever the encoding, and wherever a message ends.
func TestContentsOfAMessageAreThoseThatAreDecoded(t *testing.T) {
	var w pb.BatchWriteRequest
	for i := range 300 {
		w.Mutations = append(w.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "%d", i), Value: make([]byte, i*i%700)})
	}
	w.Preconditions, w.Durability = []*pb.Precondition{{}, {Key: []byte("k")}}, pb.Durability_DURABILITY_ASYNC
	encoded, err := proto.Marshal(&w)
	if err != nil {
		t.Fatal(err)
	}
	group := protowire.AppendTag(protowire.AppendTag(nil, 12, protowire.StartGroupType), 12, protowire.EndGroupType)
	encoded = append(append(group, protowire.AppendFixed64([]byte{13<<3 | 1}, 1)...), encoded...)
	c, err := contentsOf(encoded)
	if c != (contents{elements: 302, most: 300, operations: 2}) || err != nil {
		t.Errorf("got %+v, %v", c, err)
	}
	if got, want := c.bytes(encoded, kindWrite)-len(encoded), admittedBytes(&w, kindWrite)-w.SizeVT(); got != want {
		t.Errorf("%d bytes for what is encoded, %d for what is decoded", got, want)
	}
	id := protowire.AppendVarint([]byte{1 << 3}, 1<<40)
	outer := append(append(protowire.AppendBytes([]byte{6<<3 | 2}, encoded), id...), protowire.AppendBytes([]byte{15<<3 | 2}, nil)...)
	var r pb.PipelineRequest
	if err := r.UnmarshalVT(outer); err != nil {
		t.Fatal(err)
	}
	if p, err := pipelinedOf(outer, pipelineDescriptor); p.id != r.Id || p.method != methodOfPipelined(&r) || p.elements != 302 || err != nil {
		t.Errorf("got %+v for %d: %v", p, r.Id, err)
	}
	for i := range encoded {
		_, _ = contentsOf(encoded[:i])
		_, _ = pipelinedOf(outer[:i], pipelineDescriptor)
	}
}

// TestRequestsTakeNoMoreThanTheyAreAdmittedWith: what a request of the smallest operations takes, from
// the time it is decoded until it has been executed, is counted.
func TestRequestsTakeNoMoreThanTheyAreAdmittedWith(t *testing.T) {
	testseed.SkipUnderRace(t)
	const operations = 33_000
	h := mustStart(t)
	key := func(i int) []byte { return fmt.Appendf(nil, "%x", i) }
	var w pb.BatchWriteRequest
	var g pb.BatchGetRequest
	var v pb.InvokeAllRequest
	for i := range operations {
		w.Mutations = append(w.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key(i)})
		g.Keys = append(g.Keys, key(i))
		v.Invocations = append(v.Invocations, &pb.Invocation{Key: append(key(i), 'n'), Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: 1}}})
	}
	for _, row := range []struct {
		name    string
		kind    kind
		request proto.Message
		decode  func(*executor, []byte) (any, error)
	}{
		{"BatchWrite", kindWrite, &w, func(c *executor, b []byte) (any, error) {
			in := new(pb.BatchWriteRequest)
			if err := in.UnmarshalVT(b); err != nil {
				return nil, err
			}
			_, err := c.batchWrite(t.Context(), in)
			return in, err
		}},
		{"BatchGet", kindRead, &g, func(c *executor, b []byte) (any, error) {
			in, out := new(pb.BatchGetRequest), new(pb.BatchGetResponse)
			if err := in.UnmarshalVT(b); err != nil {
				return nil, err
			}
			out.Results = newResults(len(in.Keys))
			_, err := c.batchGet(t.Context(), in, out, h.Server)
			return []any{in, out}, err
		}},
		{"InvokeAll", kindWriteAndRead, &v, func(c *executor, b []byte) (any, error) {
			in, out := new(pb.InvokeAllRequest), new(pb.InvokeAllResponse)
			if err := in.UnmarshalVT(b); err != nil {
				return nil, err
			}
			_, err := c.invokeAll(t.Context(), in, 0, out)
			return []any{in, out}, err
		}},
	} {
		encoded, err := proto.Marshal(row.request)
		if err != nil {
			t.Fatal(err)
		}
		c, err := contentsOf(encoded)
		if err != nil {
			t.Fatal(err)
		}
		counted := c.bytes(encoded, row.kind) + 1<<20 // of what else runs
		took := int64(math.MaxInt64)
		for range 3 { // the buffers of a log segment that is prepared meanwhile are no part of the request
			c, err := h.takeExecutor()
			if err != nil {
				t.Fatal(err)
			}
			c.ctx, c.access = t.Context(), h.authorized(t, pb.KVService_BatchWrite_FullMethodName)
			before := liveBytes()
			kept, err := row.decode(c, encoded)
			took = min(took, liveBytes()-before)
			if err != nil {
				t.Fatal(err)
			}
			runtime.KeepAlive(kept)
			_, _ = c.outcome(ackWait{}, nil)
			c.release()
		}
		if took > int64(counted) {
			t.Errorf("%s: %d bytes of memory are counted as %d", row.name, took, counted)
		}
	}
}

func liveBytes() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
