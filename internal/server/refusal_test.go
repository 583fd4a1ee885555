package server

import (
	"encoding/base64"
	"encoding/binary"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
)

// reasonOf reads what the server sends until a stream ends, and returns the reason of the error.
func (c *rawClient) reasonOf(t *testing.T, stream uint32) string {
	t.Helper()
	_, reason := c.answersOf(t, stream)
	return reason
}

// answersOf reads the same, and counts the messages before the error.
func (c *rawClient) answersOf(t *testing.T, stream uint32) (messages int, reason string) {
	t.Helper()
	var data []byte
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if c.framer == nil {
		c.framer = http2.NewFramer(nil, c.Conn)
		c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	}
	for {
		f, err := c.framer.ReadFrame()
		if err != nil {
			t.Fatalf("stream %d: %v", stream, err)
		}
		if r, ok := f.(*http2.RSTStreamFrame); ok && r.StreamID == stream {
			return messages, "reset: " + r.ErrCode.String()
		}
		if d, ok := f.(*http2.DataFrame); ok && d.StreamID == stream {
			for data = append(data, d.Data()...); len(data) >= grpcPrefixBytes; messages++ {
				n := grpcPrefixBytes + int(binary.BigEndian.Uint32(data[1:]))
				if n > len(data) {
					break
				}
				data = data[n:]
			}
		}
		h, ok := f.(*http2.MetaHeadersFrame)
		if !ok || h.StreamID != stream || !h.StreamEnded() {
			continue
		}
		for _, field := range h.Fields {
			if field.Name == "grpc-status-details-bin" {
				return messages, reasonIn(t, field.Value)
			}
		}
		return messages, ""
	}
}

func reasonIn(t *testing.T, encoded string) string {
	t.Helper()
	raw, err := base64.RawStdEncoding.DecodeString(encoded)
	if err != nil {
		t.Fatal(err)
	}
	var st spb.Status
	if err := proto.Unmarshal(raw, &st); err != nil {
		t.Fatal(err)
	}
	var info errdetails.ErrorInfo
	if err := st.Details[0].UnmarshalTo(&info); err != nil {
		t.Fatal(err)
	}
	return info.Reason
}

const methodPut = "/epochkv.v1.KVService/Put"

// TestRefusedMessagesHaveTheirReason: whatever refuses a message before it is executed, the client
// learns the reason, on streams too.
func TestRefusedMessagesHaveTheirReason(t *testing.T) {
	h := mustStart(t, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 8*config.MiB, 8*config.MiB, 8*config.MiB
	})
	_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 64<<20)})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")

	h.fillLargeShare(t)
	value := make([]byte, 1<<20)
	_, err = h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: value})
	f := failureOf(t, err)
	if f.want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED); f.retry == 0 {
		t.Error("no advice to retry")
	}
	failureOf(t, h.pipelinePut(t, value)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)

	c := h.dialRaw(t)
	m := prefixed(1 << 20)
	c.begin(5, methodPut, "20S")
	c.send(frame(frameData, 0, 5, m[:3])) // a part of the length goes on before the rest is known
	time.Sleep(20 * time.Millisecond)
	c.send(frame(frameData, 0, 5, m[3:10_000]))
	c.send(frame(frameData, 0, 5, m[10_000:20_000]))
	if got := c.reasonOf(t, 5); got != "OVERLOADED" {
		t.Errorf("a message that is refused with its length half handed on: %q", got)
	}
	c.begin(7, "/epochkv.v1.KVService/None", "20S")
	if got := c.reasonOf(t, 7); got != "UNIMPLEMENTED" {
		t.Errorf("the connection does not go on: %q", got)
	}
}

func (h *harness) pipelinePut(t *testing.T, value []byte) error {
	t.Helper()
	stream, err := h.kv.Pipeline(testContext(t))
	if err == nil {
		_ = stream.Send(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("k"), Value: value}}})
		_, err = stream.Recv()
	}
	return err
}

// TestHalfSentMessagesEnd: a client that stops within a message loses its stream after
// --message-timeout with a reason, and gives its bytes back; its other streams, and what it sends
// afterwards, go on. So does one that does not end its request.
func TestHalfSentMessagesEnd(t *testing.T) {
	const timeout = 300 * time.Millisecond
	h := mustStart(t, func(c *config.Config) { c.MessageTimeout = timeout })
	c := h.dialRaw(t)
	m := prefixed(1 << 20)
	for i, method := range []string{methodPut, "/epochkv.v1.KVService/Pipeline", methodPut} {
		stream := uint32(2*i + 1)
		c.begin(stream, method, "20S")
		c.send(frame(frameData, 0, stream, m[:1000]))
		if got := c.reasonOf(t, stream); got != "MESSAGE_INCOMPLETE" {
			t.Errorf("stream %d of %s: %q", stream, method, got)
		}
		c.send(frame(frameData, 0, stream, m[1000:16<<10]))
	}
	c.begin(7, methodPut, "20S") // nothing at all
	if got := c.reasonOf(t, 7); got != "MESSAGE_INCOMPLETE" {
		t.Errorf("a request that sends nothing: %q", got)
	}
	c.begin(9, methodPut, "20S")
	c.send(frame(frameData, 0, 9, prefixed(0)))
	if got := c.reasonOf(t, 9); got != "MESSAGE_INCOMPLETE" {
		t.Errorf("a request that does not end: %q", got)
	}
	eventually(t, "nothing is reserved", func() bool { return h.receiving.reserved() == 0 })
	put, err := (&pb.PutRequest{Key: []byte("k"), Value: make([]byte, 200<<10), Durability: pb.Durability_DURABILITY_ASYNC}).MarshalVT()
	if err != nil {
		t.Fatal(err)
	}
	put = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(put))), put...)
	c.begin(101, "/epochkv.v1.KVService/Pipeline", "20S") // idle, with nothing half-sent
	reason := "never sent"
	for stream := uint32(103); reason != "" && stream < 123; stream += 2 { // on a busy machine it may take too long
		c.begin(stream, methodPut, "20S")
		for part := range slices.Chunk(put, 16<<10) {
			c.send(frame(frameData, 0, stream, part))
		}
		c.send(frame(frameData, flagEndStream, stream, nil))
		reason = c.reasonOf(t, stream)
	}
	if reason != "" {
		t.Errorf("a put that was complete ended with %q", reason)
	}
	time.Sleep(2 * timeout)
	c.send(frame(frameData, flagEndStream, 101, nil))
	if got := c.reasonOf(t, 101); got != "" {
		t.Errorf("an idle pipeline ended with %q", got)
	}
	if got := h.get(t, "k"); len(got.Value) != 200<<10 {
		t.Error("the put that was complete was not executed")
	}
}

// TestMessagesThatTheServerDelaysAreNotEnded: a message that waits because a window is used up is
// not the client's fault.
func TestMessagesThatTheServerDelaysAreNotEnded(t *testing.T) {
	r := newReceiving(64 << 20)
	in := newFollowed(t, r)
	m := prefixed(4 << 20)
	send := func(n int) {
		t.Helper()
		for ; n > 0; n -= 16 << 10 {
			if err := in.follow(frame(frameData, 0, 1, m[:16<<10])); err != nil {
				t.Fatal(err)
			}
			m = m[16<<10:]
		}
	}
	pass := func(steps int) (stalled bool) {
		for range steps {
			r.step.Add(1)
			stalled = in.findStalled() || stalled
		}
		return stalled
	}
	for stream := uint32(1); stream < 20; stream += 2 { // they are of methods that let streams go on
		in.answered(frame(frameHeaders, flagEndHeaders, stream, nil))
	}
	in.answered(windowOf(0, 4<<20))
	send(streamWindowBytes)
	if pass(10 * stallSteps) {
		t.Error("a stream without a window was ended")
	}
	in.answered(windowOf(1, 2<<20))
	if pass(stallSteps / 2) {
		t.Error("the time did not begin when the window was widened")
	}
	for range 9 {
		send(progressBytes / 2)
		if pass(stallSteps / 2) {
			t.Error("a message that proceeds was ended")
		}
	}
	if !pass(2*stallSteps) || len(in.ending) != 1 {
		t.Error("a message that does not proceed was not ended")
	}
}

// TestUnknownClientsReserveLittle: a client that is not known may call some methods, and their messages are small. One that declares a large
// message, and then sends it slowly, takes no room of the messages of others.
func TestUnknownClientsReserveLittle(t *testing.T) {
	h := mustStart(t, withDirect)
	x, end := newExchange(t, h.Address(), patience)
	defer end()
	for i, path := range []string{
		healthpb.Health_Check_FullMethodName, healthpb.Health_Watch_FullMethodName, reflectionpb.ServerReflection_ServerReflectionInfo_FullMethodName, pb.AuthService_Login_FullMethodName,
	} {
		id := uint32(2*i + 1)
		x.open(id, path, false, "authorization", "")
		x.data(id, false, binary.BigEndian.AppendUint32([]byte{0}, uint32(messageBytesMax(&h.config))))
		if outcome := x.outcomeOf(t, id); outcome != "200 3 without a message" {
			t.Errorf("%s: %s", path, outcome)
		}
		if n := h.receiving.large.reserved.Load(); n != 0 {
			t.Errorf("%s: %d bytes are reserved", path, n)
		}
	}
	if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: make([]byte, receivedBytesMin)}); err != nil {
		t.Error(err)
	}
}

// TestUnknownClientsReserveNothingOfUsers: the handlers of users refuse clients that are not known, but only once they have a message, which may be
// large: of roles, for instance. They are refused before. The messages to the methods that are left are small.
func TestUnknownClientsReserveNothingOfUsers(t *testing.T) {
	h := mustStart(t, withDirect)
	h.setUsers(map[string][]auth.Grant{testUser: {grant("rwl", "")}})
	x, end := newExchange(t, h.Address(), patience)
	defer end()
	declared := binary.BigEndian.AppendUint32([]byte{0}, uint32(h.codec().plainMessageMax()))
	id := uint32(1)
	for path, row := range rpcRows {
		if !row.open {
			continue
		}
		want := "200 3 without a message"
		if row.sender {
			want = "200 16 without a message"
		}
		x.open(id, path, false, "authorization", "")
		if !row.sender {
			x.data(id, false, declared)
		}
		if outcome := x.outcomeOf(t, id); outcome != want {
			t.Errorf("%s: %s, want %s", path, outcome, want)
		}
		if large, small := h.receiving.large.reserved.Load(), h.receiving.small.reserved.Load(); large+small != 0 {
			t.Errorf("%s: %d and %d bytes are reserved", path, large, small)
		}
		id += 2
	}
}

// TestStreamsHaveABoundOnAllConnections: those beyond it are refused with a reason, however many
// connections they come from; each connection has a few of its own, and leaves others as many as it has beside these; an operator gets through, and
// what has ended leaves room.
func TestStreamsHaveABoundOnAllConnections(t *testing.T) {
	h := mustStart(t)
	limit := h.receiving.streams.limit
	if want := int64(h.config.StreamsTotal()); limit != want {
		t.Fatalf("the limit is %d, want %d", limit, want)
	}
	h.receiving.streams.reserved.Add(limit - 4*streamStep)
	defer h.receiving.streams.reserved.Add(-(limit - 4*streamStep))
	hog := h.dial(t)
	var open []grpc.BidiStreamingClient[pb.PipelineRequest, pb.PipelineResponse]
	begin := func(conn *grpc.ClientConn, n int) {
		for range n {
			stream, err := pb.NewKVServiceClient(conn).Pipeline(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, stream)
		}
		eventually(t, "all are open", func() bool { return h.counters.streams.Load() == int64(len(open)) })
	}
	begin(hog, config.StreamsOwn+2*streamStep)
	_, err := pb.NewKVServiceClient(hog).Get(testContext(t), &pb.GetRequest{Key: []byte("k")})
	f := failureOf(t, err)
	if f.want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS); f.retry == 0 {
		t.Error("no advice to retry")
	}
	failureOf(t, beginPipeline(t, hog)).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
	for _, stream := range open[:2] { // the operator gets through, with what is refused beside
		if err := stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
	}
	open = open[2:]
	if _, err := pb.NewAdminServiceClient(hog).Status(testContext(t), &pb.StatusRequest{}); err != nil {
		t.Errorf("the operator is refused: %v", err)
	}
	h.put(t, "k", "v") // over another connection, which has streams of its own
	begin(h.dial(t), config.StreamsOwn+streamStep)
	for _, stream := range open {
		if err := stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "there is room again", func() bool { return h.receiving.streams.reserved.Load() == limit-4*streamStep })
	if err := beginPipeline(t, hog); err != nil {
		t.Errorf("a stream that has room: %v", err)
	}
}

// TestUnknownClientsTakeFewStreams: those that watch the health last for ever, and all connections share the streams.
func TestUnknownClientsTakeFewStreams(t *testing.T) {
	h := mustStart(t)
	h.setUsers(map[string][]auth.Grant{testUser: {grant("rwl", "")}})
	unknown, err := grpc.NewClient("passthrough:///"+h.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unknown.Close() }()
	refused := 0
	for range openStreamsMax + 5 {
		stream, err := healthpb.NewHealthClient(unknown).Watch(testContext(t), new(healthpb.HealthCheckRequest))
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
			refused++
		}
	}
	if refused != 5 {
		t.Errorf("%d streams were refused", refused)
	}
}

// beginPipeline opens a pipeline and makes one request over it.
func beginPipeline(t *testing.T, conn *grpc.ClientConn) error {
	t.Helper()
	stream, err := pb.NewKVServiceClient(conn).Pipeline(testContext(t))
	if err != nil {
		return err
	}
	_ = stream.Send(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte("k")}}})
	if _, err = stream.Recv(); err != nil {
		return err
	}
	return stream.CloseSend()
}

// TestLargeMetadataIsRefused: a stream holds its request's metadata until it ends, so they are
// bounded; the connection goes on.
func TestLargeMetadataIsRefused(t *testing.T) {
	h := mustStart(t)
	c := h.dialRaw(t)
	block := requestHeaders(methodPut, "20S")
	for range 100 {
		block = append(append(block, 0, 1, 'x', 100), strings.Repeat("v", 100)...)
	}
	c.send(frame(frameHeaders, flagEndHeaders, 1, block))
	want := "reset: FRAME_SIZE_ERROR"
	if h.config.Transport == config.TransportDirect {
		want = "INVALID_REQUEST"
	}
	if got := c.reasonOf(t, 1); got != want {
		t.Errorf("metadata of %d bytes: %q, want %q", len(block), got, want)
	}
	c.begin(3, "/epochkv.v1.KVService/None", "20S")
	if got := c.reasonOf(t, 3); got != "UNIMPLEMENTED" {
		t.Errorf("the connection does not go on: %q", got)
	}
}

// TestClientsThatStopWithinAFrameLoseTheirConnection sends a part of a frame, and then nothing, or
// empty parts of a header block, or one byte at a time. Nothing else can end such a stream: there
// is no place for its reset. The connection ends after the keepalive times.
func TestClientsThatStopWithinAFrameLoseTheirConnection(t *testing.T) {
	before := keepaliveParams
	t.Cleanup(func() { keepaliveParams = before })
	keepaliveParams = keepalive.ServerParameters{Time: time.Second, Timeout: time.Second} // gRPC's least
	h := mustStart(t)
	headers := frame(frameHeaders, flagEndHeaders, 1, requestHeaders(pb.KVService_Put_FullMethodName, "60S"))
	data := frame(frameData, 0, 1, prefixed(1000))
	var all sync.WaitGroup
	for name, c := range map[string]struct{ first, more []byte }{
		"headers":                {first: headers[:20]},
		"header block":           {first: frame(frameHeaders, 0, 1, requestHeaders(pb.KVService_Put_FullMethodName, "60S"))},
		"header block, trickled": {first: frame(frameHeaders, 0, 1, nil), more: frame(frameContinued, 0, 1, nil)},
		"prefix of a message":    {first: append(slices.Clone(headers), data[:frameHeaderBytes+2]...)},
		"message":                {first: append(slices.Clone(headers), data[:100]...)},
		"message, trickled":      {first: append(slices.Clone(headers), data[:100]...), more: []byte{0}},
	} {
		raw := h.dialRaw(t)
		raw.send(c.first)
		all.Go(func() {
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = io.Copy(io.Discard, raw)
			}()
			late := time.After(20 * time.Second)
			for {
				select {
				case <-ended:
					return
				case <-late:
					t.Errorf("%s: the connection is still open", name)
					return
				case <-time.After(100 * time.Millisecond):
					_, _ = raw.Write(c.more) // fails once the server has closed the connection
				}
			}
		})
	}
	all.Wait()
	eventually(t, "nothing is reserved", func() bool { return h.receiving.reserved() == 0 })
}
