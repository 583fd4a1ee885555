package server

import (
	"bytes"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// decodedMessage stands for a request that takes much more when it is decoded.
func decodedMessage(operations int) mem.BufferSlice {
	return mem.BufferSlice{mem.SliceBuffer(bytes.Repeat([]byte{1<<3 | 2, 0}, operations))}
}

// TestRequestsThatAreDecodedWaitForRoom: what requests take that were decoded and not yet admitted stays in its bound, or is one request
// of any size. They go on in the order in which they came.
func TestRequestsThatAreDecodedWaitForRoom(t *testing.T) {
	const operations, callers = 1000, 32
	var d decoding
	d.init(4 * operations * int64(elementBytes[kindWrite]+2) * decodingPart) // room for four
	limits := limits{BatchOps: 1 << 20}
	codec := boundedCodec{pb.NewCodec(), &limits, &d, true}
	var decoded, most atomic.Int64
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			req := new(pb.BatchWriteRequest)
			if err := codec.Unmarshal(decodedMessage(operations), req); err != nil {
				t.Error(err)
			}
			n := decoded.Add(1)
			for old := most.Load(); n > old && !most.CompareAndSwap(old, n); {
				old = most.Load()
			}
			time.Sleep(time.Millisecond) // until it is admitted
			decoded.Add(-1)
			d.end(req)
		})
	}
	all.Wait()
	if n := most.Load(); n < 1 || n > 4 {
		t.Errorf("%d requests were decoded and not admitted at once, expected up to 4", n)
	}
	large, waits := new(pb.BatchWriteRequest), make(chan struct{})
	if err := codec.Unmarshal(decodedMessage(10*operations), large); err != nil {
		t.Error(err)
	}
	go func() {
		defer close(waits)
		small := new(pb.BatchWriteRequest)
		if err := codec.Unmarshal(decodedMessage(operations), small); err != nil {
			t.Error(err)
		}
		d.end(small)
	}()
	select {
	case <-waits:
		t.Error("a request is decoded beside one that is larger than the bound")
	case <-time.After(20 * time.Millisecond):
	}
	d.end(large)
	<-waits
	if err := codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(bytes.Repeat([]byte{1<<3 | 2, 1}, operations))}, new(pb.BatchWriteRequest)); err == nil {
		t.Error("a damaged message was decoded")
	}
	if d.used != 0 || len(d.held) != 0 || d.count.Load() != 0 {
		t.Errorf("%d bytes of %d requests are counted at the end", d.used, len(d.held))
	}
}

// TestRequestsAreNotCountedAsDecodedForEver: refused and executed requests of all methods that carry operations, on both transports.
func TestRequestsAreNotCountedAsDecodedForEver(t *testing.T) {
	const operations = 5000
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		h := mustStart(t, func(c *config.Config) { c.Transport, c.Limits.BatchOps = transport, 4000 })
		conn := h.dial(t, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})))
		for n := operations - 2000; n <= operations; n += 2000 {
			empty := bytes.Repeat([]byte{1<<3 | 2, 0}, n)
			for _, method := range []string{"KV/BatchWrite", "KV/BatchGet", "KV/InvokeAll", "Transactions/Execute"} {
				_ = conn.Invoke(testContext(t), "/epochkv.v1."+method, &empty, new(pb.PutResponse))
			}
			for method, message := range map[string][]byte{
				"KV/Pipeline":           protowire.AppendBytes([]byte{1 << 3, 7, 6<<3 | 2}, empty),
				"Transactions/Transact": protowire.AppendBytes([]byte{5<<3 | 2}, empty),
				"KV/BulkLoad":           empty,
			} {
				stream, err := conn.NewStream(testContext(t), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/epochkv.v1."+method)
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.SendMsg(&message); err == nil {
					_ = stream.CloseSend()
					_ = stream.RecvMsg(new(pb.PipelineResponse))
				}
			}
		}
		large := append([]byte{0xfa, 0x7f, 0x80, 0x40}, make([]byte, 8<<10)...) // an unknown field of 8 KiB
		stream, err := conn.NewStream(testContext(t), &grpc.StreamDesc{ClientStreams: true}, "/epochkv.v1.KV/GetOutcome")
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.SendMsg(&large); err != nil { // and no end
			t.Fatal(err)
		}
		eventually(t, "no request is counted", func() bool {
			h.admission.decoding.mu.Lock()
			defer h.admission.decoding.mu.Unlock()
			return h.admission.decoding.used == 0 && len(h.admission.decoding.held) == 0 && h.admission.decoding.count.Load() == 0
		})
	}
}
