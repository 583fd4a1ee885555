package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/vfs"
)

type pipelineClient = interface {
	Send(*pb.PipelineRequest) error
	Recv() (*pb.PipelineResponse, error)
	CloseSend() error
}

func (h *harness) pipeline(t testing.TB, ctx context.Context) pipelineClient {
	t.Helper()
	stream, err := h.kv.Pipeline(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func putRequest(id uint64, key, value string, d pb.Durability) *pb.PipelineRequest {
	return &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte(key), Value: []byte(value), Durability: d}}}
}

func getRequest(id uint64, key string) *pb.PipelineRequest {
	return &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte(key)}}}
}

func mustSend(t testing.TB, stream pipelineClient, requests ...*pb.PipelineRequest) {
	t.Helper()
	for _, r := range requests {
		if err := stream.Send(r); err != nil {
			t.Fatal(err)
		}
	}
}

func mustRecv(t testing.TB, stream pipelineClient) *pb.PipelineResponse {
	t.Helper()
	out, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// slowSyncs makes every sync of the log take so long.
func (h *harness) slowSyncs(d time.Duration) *vfs.Injected {
	return h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Fault: vfs.Slow, Delay: d})
}

func TestPipelineCarriesEveryKindOfRequest(t *testing.T) {
	h := mustStart(t)
	stream := h.pipeline(t, testContext(t))
	k := []byte("k")
	for i, row := range []struct {
		request *pb.PipelineRequest
		want    func(*pb.PipelineResponse) bool
	}{
		{putRequest(0, "k", "v", 0), func(r *pb.PipelineResponse) bool { return r.GetPut().GetEpoch() == 1 }},
		{getRequest(1, "k"), func(r *pb.PipelineResponse) bool {
			g := r.GetGet()
			return g.GetFound() && string(g.Value) == "v" && g.Epoch == 1 && g.ReadEpoch == 1
		}},
		{getRequest(1, "missing"), func(r *pb.PipelineResponse) bool { return r.GetGet() != nil && !r.GetGet().Found }},
		{
			&pb.PipelineRequest{Request: &pb.PipelineRequest_BatchWrite{BatchWrite: &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: 1, Key: []byte("b"), Value: k}, {Kind: 1, Key: []byte("a"), Value: k}}}}},
			func(r *pb.PipelineResponse) bool { return r.GetBatchWrite().GetEpoch() == 2 },
		},
		{
			&pb.PipelineRequest{Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{[]byte("b"), k, []byte("x")}}}},
			func(r *pb.PipelineResponse) bool {
				g := r.GetBatchGet().GetResults()
				return len(g) == 3 && string(g[0].Value) == "k" && string(g[1].Value) == "v" && !g[2].Found && len(g[2].Value) == 0
			},
		},
		{
			&pb.PipelineRequest{Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{[]byte("x"), k}}}},
			func(r *pb.PipelineResponse) bool {
				g := r.GetBatchGet().GetResults()
				return len(g) == 2 && !g[0].Found && len(g[0].Value) == 0 && g[0].Epoch == 0 && g[1].Found // nothing of the message before
			},
		},
		{
			&pb.PipelineRequest{Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: k}}},
			func(r *pb.PipelineResponse) bool { return r.GetDelete().GetEpoch() == 3 },
		},
		{
			&pb.PipelineRequest{Request: &pb.PipelineRequest_DeleteRange{DeleteRange: &pb.DeleteRangeRequest{Range: &pb.KeyRange{}}}},
			func(r *pb.PipelineResponse) bool {
				return r.GetDeleteRange().GetDeleted() == 2 && r.GetDeleteRange().Epoch == 4
			},
		},
		{putRequest(0, "", "v", 0), func(r *pb.PipelineResponse) bool {
			return r.GetError().GetCode() == int32(codes.InvalidArgument) && len(r.GetError().Details) > 0
		}},
		{&pb.PipelineRequest{}, func(r *pb.PipelineResponse) bool { return r.GetError().GetCode() == int32(codes.InvalidArgument) }},
		{putRequest(0, "k", "again", 0), func(r *pb.PipelineResponse) bool { return r.GetPut().GetEpoch() == 5 }},
	} {
		row.request.Id = uint64(1000 + i)
		mustSend(t, stream, row.request)
		if got := mustRecv(t, stream); got.Id != row.request.Id || !row.want(got) {
			t.Errorf("request %d was answered with %v", i, got)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Fatalf("the stream ended with %v", err)
	}
}

func TestReadsOvertakeWritesThatWaitForTheDisk(t *testing.T) {
	h := mustStart(t)
	h.put(t, "old", "v")
	eventually(t, "the first write is durable", func() bool { return h.store.Durable() == h.store.Visible() })
	release := h.holdSyncs(t)
	stream := h.pipeline(t, testContext(t))
	mustSend(t, stream, putRequest(1, "k", "v", pb.Durability_DURABILITY_SYNC), getRequest(2, "old"), putRequest(3, "l", "v", pb.Durability_DURABILITY_ASYNC))
	if got := mustRecv(t, stream); got.Id != 2 {
		t.Errorf("first came %v, want the read", got)
	}
	if got := mustRecv(t, stream); got.Id != 3 {
		t.Errorf("second came %v, want the async write", got)
	}
	release()
	if got := mustRecv(t, stream); got.Id != 1 {
		t.Errorf("last came %v, want the sync write", got)
	}
}

func TestNoAnswerRevealsASyncWriteBeforeItIsDurable(t *testing.T) {
	h := mustStart(t)
	h.slowSyncs(20 * time.Millisecond)
	stream := h.pipeline(t, testContext(t))
	for i := range uint64(20) {
		mustSend(t, stream, putRequest(2*i, "k", strconv.FormatUint(i, 10), pb.Durability_DURABILITY_SYNC), getRequest(2*i+1, "k"))
	}
	for range 40 {
		got := mustRecv(t, stream)
		revealed := max(got.GetPut().GetEpoch(), got.GetGet().GetEpoch())
		if durable := uint64(h.store.Durable()); revealed == 0 || revealed > durable {
			t.Fatalf("%v was sent while %d was durable", got, durable)
		}
		if g := got.GetGet(); g != nil && string(g.Value) != strconv.FormatUint(got.Id/2, 10) {
			t.Fatalf("%v: a value was overwritten while its answer waited", got)
		}
	}
}

// TestRandomPipelinesAgreeWithAModel sends random requests down several streams, each on keys of
// its own, and checks every answer against a map.
func TestRandomPipelinesAgreeWithAModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("EPOCHKV_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("replay with EPOCHKV_SEED=%d", seed)
	h := mustStart(t, func(c *config.Config) { c.SegmentSize = 256 * config.KiB })
	var wg sync.WaitGroup
	for w := range uint64(4) {
		wg.Go(func() { runModelStream(t, h, rand.New(rand.NewPCG(seed, w)), fmt.Sprintf("s%d/", w)) })
	}
	wg.Wait()
}

func runModelStream(t *testing.T, h *harness, rng *rand.Rand, space string) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	stream := h.pipeline(t, ctx)
	model := map[string]string{}
	expected := make(chan map[uint64]string, 64) // answers by id, as seen when the request was sent
	go func() {
		defer close(expected)
		for round := range uint64(60) {
			want := map[uint64]string{}
			for i := range uint64(1 + rng.IntN(64)) {
				id := round<<8 | i
				key := space + strconv.Itoa(rng.IntN(50))
				value := fmt.Sprintf("%d-%0*d", id, rng.IntN(300), 0)
				var r *pb.PipelineRequest
				switch rng.IntN(6) {
				case 0, 1:
					r = putRequest(id, key, value, pb.Durability(rng.IntN(3)))
					model[key], want[id] = value, "write"
				case 2:
					r = &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: []byte(key), Durability: pb.Durability(rng.IntN(3))}}}
					delete(model, key)
					want[id] = "write"
				case 3:
					other := space + "b" + key
					r = &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_BatchWrite{BatchWrite: &pb.BatchWriteRequest{Mutations: []*pb.Mutation{
						{Kind: 1, Key: []byte(other), Value: []byte(value)}, {Kind: 1, Key: []byte(key), Value: []byte(value)},
					}}}}
					model[key], model[other], want[id] = value, value, "write"
				case 4:
					r = &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{[]byte(key)}}}}
					want[id] = "=" + model[key]
				default:
					r = getRequest(id, key)
					want[id] = "=" + model[key] // one session executes in order, so a read sees the writes sent before it
				}
				if err := stream.Send(r); err != nil {
					t.Error(err)
					return
				}
			}
			expected <- want
		}
	}()
	pending := map[uint64]*pb.PipelineResponse{}
	for want := range expected {
		for len(want) > 0 {
			for id, w := range want {
				if got, ok := pending[id]; ok {
					checkAnswer(t, got, w)
					delete(want, id)
					delete(pending, id)
				}
			}
			if len(want) > 0 {
				got, err := stream.Recv()
				if err != nil {
					t.Error(err)
					return
				}
				pending[got.Id] = got
			}
		}
	}
}

func checkAnswer(t *testing.T, got *pb.PipelineResponse, want string) {
	if want == "write" {
		if got.GetPut().GetEpoch()+got.GetDelete().GetEpoch()+got.GetBatchWrite().GetEpoch() == 0 {
			t.Errorf("a write was answered with %v", got)
		}
		return
	}
	value := got.GetGet().GetValue()
	if b := got.GetBatchGet(); b != nil {
		value = b.Results[0].Value
	}
	if string(value) != want[1:] {
		t.Errorf("read %d: got %.60q, want %.60q", got.Id, value, want[1:])
	}
}

func TestClosedPipelineAnswersWhatItReceived(t *testing.T) {
	h := mustStart(t)
	h.slowSyncs(20 * time.Millisecond)
	stream := h.pipeline(t, testContext(t))
	const n = 500
	for i := range uint64(n) {
		mustSend(t, stream, putRequest(i, strconv.FormatUint(i, 10), "v", pb.Durability_DURABILITY_SYNC))
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	answered := map[uint64]bool{}
	for {
		got, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || got.GetPut() == nil || answered[got.Id] {
			t.Fatalf("%v, %v", got, err)
		}
		answered[got.Id] = true
	}
	if len(answered) != n {
		t.Fatalf("%d of %d were answered", len(answered), n)
	}
}

func TestFullAckQueueStopsReceivingRequests(t *testing.T) {
	h := mustStart(t)
	release := h.holdSyncs(t)
	ctx := testContext(t)
	stream := h.pipeline(t, ctx)
	const n = 3 * ackQueueMax
	sent := make(chan error, 1)
	go func() {
		for i := range uint64(n) {
			if err := stream.Send(putRequest(i, "k", "v", pb.Durability_DURABILITY_SYNC)); err != nil {
				sent <- err
				return
			}
		}
		sent <- stream.CloseSend()
	}()
	// Two lists may be full: the one that fills and the one that is waited for. The receiver holds
	// one more request.
	eventually(t, "the ack queue fills", func() bool { return h.store.Visible() >= ackQueueMax })
	time.Sleep(100 * time.Millisecond)
	if v := h.store.Visible(); v > 2*ackQueueMax+1 {
		t.Errorf("%d writes were taken with none acknowledged", v)
	}
	release()
	for range n {
		mustRecv(t, stream)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
}

func TestDisconnectedPipelineGivesEverythingBack(t *testing.T) {
	h := mustStart(t)
	h.slowSyncs(50 * time.Millisecond)
	conn := h.dial(t)
	stream, err := pb.NewKVServiceClient(conn).Pipeline(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint64(100) {
		mustSend(t, stream, putRequest(i, "k", "v", pb.Durability_DURABILITY_SYNC), getRequest(i, "k"))
	}
	eventually(t, "the stream is there", func() bool { return h.counters.streams.Load() == 1 && h.store.Visible() > 0 })
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stream ends", func() bool { return h.counters.streams.Load() == 0 })
	h.drain.receivers.Wait()
	eventually(t, "no snapshot is held", func() bool { return h.store.Stats().Snapshots.Snapshots == 0 })
	eventually(t, "the connection is no longer counted", func() bool { return h.connections.open.Load() <= 1 })
}

func TestDrainAnswersWhatWasExecutedAndExecutesNothingElse(t *testing.T) {
	h := mustStart(t)
	h.slowSyncs(20 * time.Millisecond)
	stream := h.pipeline(t, testContext(t))
	var mu sync.Mutex
	sent := uint64(0)
	go func() {
		for i := uint64(1); ; i++ {
			mu.Lock()
			sent = i
			mu.Unlock()
			if stream.Send(putRequest(i, strconv.FormatUint(i, 10), "v", pb.Durability_DURABILITY_SYNC)) != nil {
				return
			}
			time.Sleep(100 * time.Microsecond)
		}
	}()
	answered := map[uint64]bool{mustRecv(t, stream).Id: true}
	stopped := make(chan error, 1)
	go func() { stopped <- h.stop() }()
	for {
		got, err := stream.Recv()
		if err != nil {
			failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
			break
		}
		answered[got.Id] = true
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	again := mustStartOn(t, h.disk)
	mu.Lock()
	defer mu.Unlock()
	for i := range sent {
		if found := again.get(t, strconv.FormatUint(i+1, 10)).Found; found != answered[i+1] {
			t.Errorf("write %d: answered %v, executed %v", i+1, answered[i+1], found)
		}
	}
}

func TestHugeRequestDoesNotStayInThePipelinesBuffers(t *testing.T) {
	h := mustStart(t)
	stream := h.pipeline(t, testContext(t))
	huge := string(make([]byte, 4<<20))
	mustSend(t, stream, putRequest(1, "k", huge, pb.Durability_DURABILITY_ASYNC), getRequest(2, "k"), getRequest(3, "none"))
	for range 3 {
		if got := mustRecv(t, stream); got.GetError() != nil || got.Id == 2 && len(got.GetGet().Value) != len(huge) {
			t.Fatalf("request %d: %v", got.Id, got.GetError())
		}
	}
	var r pipelineRequest
	r.init()
	for _, m := range []*pb.PipelineRequest{putRequest(1, "k", huge, 0), getRequest(2, "k")} {
		data, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.UnmarshalVT(data); err != nil {
			t.Fatal(err)
		}
	}
	r.reset() // as a pipeline does after a huge one
	if c := cap(r.put.Put.Value); c > pooledBytesMax {
		t.Errorf("%d bytes are kept", c)
	}
}

// TestReusedRequestHoldsNothingOfTheOneBefore decodes every pair of kinds in a row.
func TestReusedRequestHoldsNothingOfTheOneBefore(t *testing.T) {
	full := []*pb.Precondition{{Key: []byte("p"), Condition: &pb.Precondition_Exists{Exists: true}}}
	x := []byte("xyz")
	messages := []*pb.PipelineRequest{
		{},
		{Id: 1 << 40},
		{Id: 1, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: x, SnapshotEpoch: 7}}},
		{Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{}}},
		{Id: 1, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: x, Value: x, Preconditions: full, Durability: 2}}},
		{Id: 300, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: x[:1]}}},
		{Id: 1, Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: x, Preconditions: full, Durability: 1}}},
		{Id: 1, Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{}}},
		{Id: 1, Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{x, x}, SnapshotEpoch: 3}}},
		{Id: 1, Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{x[:2]}}}},
		{Id: 1, Request: &pb.PipelineRequest_BatchWrite{BatchWrite: &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: 1, Key: x, Value: x}, {Kind: 2, Key: x}}, Preconditions: full, Durability: 2}}},
		{Id: 1, Request: &pb.PipelineRequest_BatchWrite{BatchWrite: &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: 2, Key: x[:1]}}}}},
		{Id: 1, Request: &pb.PipelineRequest_DeleteRange{DeleteRange: &pb.DeleteRangeRequest{Range: &pb.KeyRange{Start: x, End: x}, Limit: 3, Preconditions: full, Durability: 1}}},
		{Id: 1, Request: &pb.PipelineRequest_DeleteRange{DeleteRange: &pb.DeleteRangeRequest{}}},
	}
	for _, first := range messages {
		for _, second := range messages {
			var r pipelineRequest
			r.init()
			for _, m := range []*pb.PipelineRequest{first, second} {
				data, err := proto.Marshal(m)
				if err != nil {
					t.Fatal(err)
				}
				if err := r.UnmarshalVT(data); err != nil {
					t.Fatal(err)
				}
				got, err := r.msg.MarshalVT()
				if err != nil || string(got) != string(data) {
					t.Fatalf("%v after %v was read as %v (%v)", m, first, &r.msg, err)
				}
			}
		}
	}
}

func TestPipelineRefusesWhatIsOverTheInflightLimit(t *testing.T) {
	h := mustStart(t, func(c *config.Config) {
		c.Limits.ValueSize, c.Limits.BatchSize, c.Limits.InflightBytes = config.KiB, config.KiB, config.KiB
	})
	stream := h.pipeline(t, testContext(t))
	defer h.fillShare(shareSmallWrites, h.admission.words[shareSmallWrites].limit.bytes)() // but for its slot, it is empty
	mustSend(t, stream, putRequest(1, "k", string(make([]byte, 2000)), 0), putRequest(2, "k", "v", 0))
	answers := map[uint64]*pb.PipelineResponse{}
	for range 2 {
		got := mustRecv(t, stream)
		answers[got.Id] = got
	}
	failureOf(t, status.FromProto(answers[1].GetError()).Err()).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
	if answers[2].GetPut() == nil {
		t.Errorf("the stream did not go on: %v", answers[2])
	}
}

func TestDrainWaitsForTheRequestThatIsBeingExecuted(t *testing.T) {
	stream := recorder{sent: make(chan struct{}, 1)}
	p, ended := drainingPipeline(testContext(t), stream)
	time.Sleep(20 * time.Millisecond)
	if err := p.acks.push(testContext(t), &answer{id: 1}); err != nil {
		t.Fatal(err)
	}
	<-stream.sent
	select {
	case err := <-ended:
		t.Fatalf("the stream ended before the receiver did: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	p.rest()
	if err := <-ended; !errors.Is(err, errShuttingDown) {
		t.Error(err)
	}
}

// recorder is a stream that reports what is sent.
type recorder struct {
	discard
	sent chan struct{}
}

func (r recorder) SendMsg(any) error {
	r.sent <- struct{}{}
	return nil
}

// TestSmallRequestsAllocateNothing is about everything between gRPC's RecvMsg and SendMsg.
func TestSmallRequestsAllocateNothing(t *testing.T) {
	if invariants.Enabled {
		t.Skip("what a request names is kept then, to compare it with the keys that are touched")
	}
	h := mustStart(t)
	h.put(t, "key", "value")
	conn := h.connections.admit(nil)
	defer h.connections.release(conn)
	c, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	defer c.release()
	for _, header := range []string{"", "Bearer alice"} {
		p := &pipeline{stream: discard{ctx: testContext(t)}}
		if header == "" {
			h.gate.publish(nil) // users are not checked
		} else {
			h.setUsers(map[string][]auth.Grant{"alice": {grant("rw", "")}})
		}
		p.begin(h.Server, conn, header, origin{})
		p.ctx, p.executor = p.stream.Context(), c
		p.init()
		allocateNothing(t, p)
	}
}

func allocateNothing(t *testing.T, p *pipeline) {
	t.Helper()
	for name, request := range map[string]*pb.PipelineRequest{
		"get": getRequest(1, "key"), "put": putRequest(2, "key", "value", pb.Durability_DURABILITY_ASYNC),
		"delete": {Id: 3, Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: []byte("other"), Durability: pb.Durability_DURABILITY_ASYNC}}},
	} {
		data, err := proto.Marshal(request)
		if err != nil {
			t.Fatal(err)
		}
		n := testing.AllocsPerRun(2000, func() {
			if p.in.UnmarshalVT(data) != nil || p.serve() != nil {
				t.Fatal("failed")
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// discard is a stream that takes every message.
type discard struct {
	grpc.ServerStream
	ctx context.Context
}

func (d discard) Context() context.Context { return d.ctx }
func (discard) SendMsg(any) error          { return nil }
