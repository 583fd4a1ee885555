package server

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
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
	codec := boundedCodec{pb.NewCodec(), &limits, &d}
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
		other := new(pb.BatchWriteRequest)
		if err := codec.Unmarshal(decodedMessage(2*operations), other); err != nil {
			t.Error(err)
		}
		d.end(other)
	}()
	select {
	case <-waits:
		t.Error("a large request is decoded beside one that is larger than the bound")
	case <-time.After(20 * time.Millisecond):
	}
	d.end(large)
	<-waits
	if err := codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(bytes.Repeat([]byte{1<<3 | 2, 1}, operations))}, new(pb.BatchWriteRequest)); err == nil {
		t.Error("a damaged message was decoded")
	}
	if !d.empty() {
		t.Errorf("%d requests are counted at the end: %+v", len(d.held), d.lines)
	}
}

// empty reports whether nothing is counted, and nothing waits.
func (d *decoding) empty() bool {
	for _, line := range d.lines {
		if line.used != 0 || line.waiting.Len() > 0 {
			return false
		}
	}
	return len(d.held) == 0 && d.count.Load() == 0
}

// TestSmallerRequestsAreDecodedBesideLargerOnes, while one that is larger than all room is decoded and another one waits. They wait for others of
// their line.
func TestSmallerRequestsAreDecodedBesideLargerOnes(t *testing.T) {
	var d decoding
	const room = 4 << 20
	d.init(room * decodingPart)
	_ = d.begin(context.Background(), "largest", 10<<20)
	var all sync.WaitGroup
	all.Go(func() { _ = d.begin(context.Background(), "large", room/4+1) })
	small := make(chan struct{})
	for i := range room / decodedSmallMax {
		_ = d.begin(context.Background(), i, decodedSmallMax) // as many as there is room for
	}
	for _, request := range []string{"a", "b", "c", "d"} {
		_ = d.begin(context.Background(), request, room/4)
	}
	all.Go(func() {
		_ = d.begin(context.Background(), "small", 1)
		close(small)
	})
	select {
	case <-small:
		t.Error("small requests take more than their room")
	case <-time.After(20 * time.Millisecond):
	}
	d.end(2)
	<-small
	d.mu.Lock()
	if n := d.lines[2].waiting.Len(); n != 1 {
		t.Errorf("%d large requests wait for the largest one, want 1", n)
	}
	d.mu.Unlock()
	d.end("largest")
	all.Wait()
	for i := range room / decodedSmallMax {
		d.end(i)
	}
	for _, request := range []any{"a", "b", "c", "d", "small", "large"} {
		d.end(request)
	}
	if !d.empty() {
		t.Error("something is counted at the end")
	}
}

// TestClientsAreDecodedInTurn: however many requests of one client wait, one of another client waits for the first of them at most.
func TestClientsAreDecodedInTurn(t *testing.T) {
	const room = 4 << 20
	var d decoding
	d.init(room * decodingPart)
	var clients streamClients
	from := func(client string) context.Context {
		conn := &connection{connectionLayers: connectionLayers{streams: clients.enter(client)}}
		return peer.NewContext(context.Background(), &peer.Peer{AuthInfo: conn})
	}
	_ = d.begin(from("one"), "decoded", room)
	order := make(chan any, 11)
	var all sync.WaitGroup
	wait := func(client string, request any, n int) {
		all.Go(func() {
			_ = d.begin(from(client), request, room)
			order <- request
			d.end(request)
		})
		eventually(t, "it waits", func() bool {
			d.mu.Lock()
			defer d.mu.Unlock()
			return d.lines[2].waiting.Len() == n
		})
	}
	for i := range 10 {
		wait("one", i, i+1)
	}
	wait("other", "of another client", 11)
	d.end("decoded")
	all.Wait()
	if first, second := <-order, <-order; first != 0 || second != "of another client" {
		t.Errorf("%v and %v were decoded first", first, second)
	}
	if !d.empty() {
		t.Error("something is counted at the end")
	}
}

// TestAWaitToBeDecodedEndsWithItsContext, also at the moment at which there is room, and lets in those after it.
func TestAWaitToBeDecodedEndsWithItsContext(t *testing.T) {
	const room = 4 << 20
	for i := range 500 {
		var d decoding
		d.init(room * decodingPart)
		_ = d.begin(context.Background(), "first", room/2)
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		waits := func(n int) {
			eventually(t, "it waits", func() bool {
				d.mu.Lock()
				defer d.mu.Unlock()
				return d.lines[2].waiting.Len() == n
			})
		}
		all.Go(func() {
			if err := d.begin(ctx, "gone", room); err == nil {
				d.end("gone")
			}
		})
		waits(1)
		all.Go(func() { _ = d.begin(context.Background(), "next", room/2) })
		waits(2)
		if i%2 == 0 {
			all.Go(func() { d.end("first") })
		}
		cancel()
		all.Wait()
		d.end("first")
		d.end("next")
		if !d.empty() {
			t.Fatalf("something is counted at the end: %+v", d.lines)
		}
	}
}

// TestRequestsThatAreGoneAreNotDecoded: requests of all methods wait to be decoded when their clients go away, or their deadlines pass. The transports count
// their encoded messages no more, so their handlers end.
func TestRequestsThatAreGoneAreNotDecoded(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
		conn := h.dial(t, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})))
		d := &h.admission.decoding
		fill := func(used func(*decodingLine) int64) {
			d.mu.Lock()
			defer d.mu.Unlock()
			for i := range d.lines {
				d.lines[i].used = used(&d.lines[i])
			}
		}
		waiting := func() (n int) {
			d.mu.Lock()
			defer d.mu.Unlock()
			for _, line := range d.lines {
				n += line.waiting.Len()
			}
			return n
		}
		waited := 0
		for _, r := range decodedRequests(3000) {
			for _, ends := range []func() (context.Context, context.CancelFunc){
				func() (context.Context, context.CancelFunc) { return context.WithCancel(t.Context()) },
				func() (context.Context, context.CancelFunc) {
					return context.WithTimeout(t.Context(), 20*time.Millisecond)
				},
			} {
				eventually(t, "the request before has ended", h.holdsNothing) // or the next one may be refused
				fill(func(line *decodingLine) int64 { return line.limit })
				ctx, cancel := ends()
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					_ = invokeEncoded(ctx, conn, r.method, r.message, r.streams) // it is not answered
				}()
				early := false
				eventually(t, r.method+" waits, or has ended", func() bool {
					select {
					case <-ended:
						early = true
					default:
					}
					return early || waiting() == 1
				})
				cancel()
				eventually(t, r.method+" waits no more", func() bool { return waiting() == 0 })
				if !early {
					waited++
				}
				<-ended
			}
		}
		if waited < len(decodedRequests(0)) {
			t.Errorf("%d requests have waited", waited)
		}
		fill(func(*decodingLine) int64 { return 0 })
		h.mustDecodeNothing(t)
		eventually(t, "nothing is held", h.holdsNothing)
	})
}

// invokeEncoded makes a unary request, or sends one message on a stream and waits for the first answer or the end.
func invokeEncoded(ctx context.Context, conn *grpc.ClientConn, method string, message []byte, streams bool) error {
	if !streams {
		return conn.Invoke(ctx, "/epochkv.v1."+method, &message, new(pb.PutResponse))
	}
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/epochkv.v1."+method)
	if err == nil {
		err = stream.SendMsg(&message)
	}
	if err == nil {
		_ = stream.CloseSend()
		err = stream.RecvMsg(new(pb.PipelineResponse))
	}
	return err
}

// mustDecodeNothing checks that nothing is counted as decoded, waits for room, or is read.
func (h *harness) mustDecodeNothing(t *testing.T) {
	t.Helper()
	eventually(t, "no request is counted", func() bool {
		d := &h.admission.decoding
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.empty()
	})
}

// decodedRequests are requests of all methods that carry operations, of so many empty ones.
func decodedRequests(operations int) []struct {
	method  string
	message []byte
	streams bool
} {
	empty := bytes.Repeat([]byte{1<<3 | 2, 0}, operations)
	unknown := protowire.AppendBytes([]byte{0xfa, 0x7f}, make([]byte, 2*operations)) // a field that no message has
	return []struct {
		method  string
		message []byte
		streams bool
	}{
		{"KVService/Get", unknown, false},
		{"KVService/Put", bytes.Repeat([]byte{3<<3 | 2, 0}, operations), false},
		{"KVService/Delete", unknown, false},
		{"KVService/BatchWrite", empty, false},
		{"KVService/BatchGet", empty, false},
		{"KVService/DeleteRange", unknown, false},
		{"KVService/Invoke", unknown, false},
		{"KVService/InvokeAll", empty, false},
		{"FeedService/History", unknown, false},
		{"FeedService/Diff", unknown, false},
		{"TransactionService/Execute", empty, false},
		{"TransactionService/GetOutcome", unknown, false},
		{"LeaseService/GetLease", unknown, false},
		{"AdminService/Clock", unknown, false},
		{"KVService/Scan", unknown, true},
		{"KVService/GetStream", unknown, true},
		{"KVService/Pipeline", protowire.AppendBytes([]byte{1 << 3, 7, 6<<3 | 2}, empty), true},
		{"TransactionService/Transact", protowire.AppendBytes([]byte{5<<3 | 2}, empty), true},
		{"KVService/BulkLoad", empty, true},
		{"FeedService/Watch", unknown, true},
	}
}

// TestRequestsAreNotCountedAsDecodedForEver: thousands of requests of all methods that end at any moment: executed, refused, too large,
// damaged, cancelled, past their deadline, without an end.
func TestRequestsAreNotCountedAsDecodedForEver(t *testing.T) {
	testseed.SkipUnderRace(t)
	const callers, each = 8, 150
	seed := testseed.Base(t)
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		h := mustStart(t, func(c *config.Config) {
			c.Transport, c.Limits.BatchOps, c.Limits.InflightBytes = transport, 4000, 64*config.MiB
		})
		conn := h.dial(t, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})))
		requests := slices.Concat(decodedRequests(3000), decodedRequests(5000))
		var all sync.WaitGroup
		for caller := range callers {
			all.Go(func() {
				random := rand.New(rand.NewPCG(seed, uint64(caller)))
				for range each {
					r := requests[random.IntN(len(requests))]
					message := r.message
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(5000))*time.Microsecond)
					switch random.IntN(4) {
					case 0: // damaged
						message = append(message[:len(message):len(message)], 1<<3|2, 1)
						_ = invokeEncoded(ctx, conn, r.method, message, r.streams)
					case 1: // no end, or two messages
						stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/epochkv.v1."+r.method)
						for range 1 + random.IntN(2) {
							if err == nil {
								err = stream.SendMsg(&message)
							}
						}
						if err == nil {
							_ = stream.RecvMsg(new(pb.PipelineResponse))
						}
					default:
						_ = invokeEncoded(ctx, conn, r.method, message, r.streams)
					}
					cancel()
				}
			})
		}
		all.Wait()
		h.mustDecodeNothing(t)
		for _, r := range requests { // none waits for ever
			if err := invokeEncoded(testContext(t), conn, r.method, r.message, r.streams); status.Code(err) == codes.DeadlineExceeded {
				t.Errorf("%s: %s: %v", transport, r.method, err)
			}
		}
		h.mustDecodeNothing(t)
	}
}

// TestRequestsWithoutAnEndLeaveRoomToDecode: unary requests whose messages have come, and whose ends do not, hold up no others, are not
// decoded, and are not counted after they have been cancelled.
func TestRequestsWithoutAnEndLeaveRoomToDecode(t *testing.T) {
	testseed.SkipUnderRace(t)
	const operations, clients = 40_000, 4
	message := bytes.Repeat([]byte{1<<3 | 2, 0}, operations)
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		for _, contentType := range []string{"", "proto"} { // the latter is not a plain request for the direct transport
			h := mustStart(t, func(c *config.Config) { c.Transport, c.Limits.InflightBytes = transport, 64*config.MiB })
			options := []grpc.CallOption{grpc.ForceCodecV2(encodedCodec{pb.NewCodec()})}
			if contentType != "" {
				options = append(options, grpc.CallContentSubtype(contentType))
			}
			ctx, cancel := context.WithCancel(t.Context())
			for range clients {
				stream, err := h.dial(t, grpc.WithDefaultCallOptions(options...)).NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, "/epochkv.v1.KVService/BatchWrite")
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.SendMsg(&message); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "all messages have come", func() bool { return h.receiving.reserved() >= clients*int64(len(message)) })
			other := h.dial(t, grpc.WithDefaultCallOptions(options...))
			for _, r := range decodedRequests(operations) {
				if err := invokeEncoded(testContext(t), other, r.method, r.message, r.streams); status.Code(err) == codes.DeadlineExceeded {
					t.Fatalf("%s: %s beside requests without an end: %v", transport, r.method, err)
				}
			}
			h.mustDecodeNothing(t)
			cancel()
			eventually(t, "the requests have ended", func() bool { return h.receiving.reserved() == 0 })
			h.mustDecodeNothing(t)
		}
	}
}
