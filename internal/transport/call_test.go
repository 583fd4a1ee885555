package transport

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// dialCalls is a client of the gRPC library.
func dialCalls(t testing.TB, address string) *grpc.ClientConn {
	t.Helper()
	security := insecure.NewCredentials()
	if *overTLS {
		security = credentials.NewTLS(authority(t).client())
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(security),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encoding.CodecV2(rawCodec{})), grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// chat opens a stream of a client of the gRPC library.
func chat(t testing.TB, conn *grpc.ClientConn, path string, md ...string) (grpc.ClientStream, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(context.Background(), md...), 20*time.Second)
	t.Cleanup(cancel)
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, path)
	if err != nil {
		t.Fatal(err)
	}
	return stream, cancel
}

// TestCallsCarryMessagesOfEverySize sends messages both ways, those that are larger than all windows
// included.
func TestCallsCarryMessagesOfEverySize(t *testing.T) {
	_, _, address := start(t)
	stream, _ := chat(t, dialCalls(t, address), pathChat)
	for i, n := range []int{0, 1, 100, receivedBytesMin - 1, receivedBytesMin, smallAnswerMax + 1, 16 << 10, callPendingMax, 300 << 10, 2 << 20, 5 << 20, 3} {
		sent := raw(bytes.Repeat([]byte{byte(i + 1)}, n))
		if err := stream.SendMsg(sent); err != nil {
			t.Fatal(err)
		}
		var got raw
		if err := stream.RecvMsg(&got); err != nil || !bytes.Equal(got, sent) {
			t.Fatalf("%d bytes came back of %d: %v", len(got), n, err)
		}
	}
	_ = stream.CloseSend()
	if err := stream.RecvMsg(new(raw)); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v", err)
	}
}

// TestCallsCarryManyMessagesAtOnce: a client may send before it receives, as much as the windows hold.
func TestCallsCarryManyMessagesAtOnce(t *testing.T) {
	_, _, address := start(t)
	conn := dialCalls(t, address)
	failed := make(chan error, 8)
	for range cap(failed) {
		stream, _ := chat(t, conn, pathChat)
		go func() {
			for i := range 500 {
				if err := stream.SendMsg(raw(binary.BigEndian.AppendUint32(make([]byte, i), uint32(i)))); err != nil {
					t.Error(err)
				}
			}
			_ = stream.CloseSend()
		}()
		go func() {
			for i := range 500 {
				var m raw
				if err := stream.RecvMsg(&m); err != nil || len(m) != i+4 || binary.BigEndian.Uint32(m[i:]) != uint32(i) {
					failed <- errors.Join(errors.New("a message is lost or in the wrong order"), err)
					return
				}
			}
			if err := stream.RecvMsg(new(raw)); !errors.Is(err, io.EOF) {
				failed <- err
			}
			failed <- nil
		}()
	}
	for range cap(failed) {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
}

// TestCallsCarryMetadata: a handler sees the metadata of its request, and sends headers and trailers.
func TestCallsCarryMetadata(t *testing.T) {
	_, _, address := start(t)
	long := strings.Repeat("long ", 1000)
	stream, _ := chat(t, dialCalls(t, address), pathHeaders, "some", "a", "some", long, "some-bin", "\x00\xff", "other", "b")
	header, err := stream.Header()
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.RecvMsg(new(raw)); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	for name, md := range map[string]metadata.MD{"headers": header, "trailers": stream.Trailer()} {
		if got := md.Get("some"); len(got) != 2 || got[0] != "a" || got[1] != long {
			t.Errorf("%s: %.100q", name, got)
		}
		if got := md.Get("some-bin"); len(got) != 1 || got[0] != "\x00\xff" {
			t.Errorf("%s: binary %q", name, got)
		}
		if len(md.Get("other")) > 0 {
			t.Errorf("%s: %v", name, md)
		}
	}
	if header.Get("set")[0] != "before" || stream.Trailer().Get("more")[0] != "later" {
		t.Errorf("headers %v, trailers %v", header, stream.Trailer())
	}
}

// TestCallsFail sends what a handler's method does not take.
func TestCallsFail(t *testing.T) {
	message := prefixed(3)
	two := append(bytes.Clone(message), message...)
	flagged := func(flag byte) []byte { b := bytes.Clone(message); b[0] = flag; return b }
	malformed := append([]byte{0, 0, 0, 0, 9}, "malformed"...)
	for name, c := range map[string]struct {
		path   string
		body   []byte
		fields []string
		want   codes.Code
	}{
		"one message":             {path: pathOnce, body: message},
		"unary":                   {path: pathUnary, body: message},
		"another codec":           {path: pathUnary, body: message},
		"no message":              {path: pathOnce, want: codes.Internal},
		"no unary message":        {path: pathUnary, want: codes.Internal},
		"no message of a stream":  {path: pathChat},
		"two messages":            {path: pathOnce, body: two, want: codes.Internal},
		"two unary messages":      {path: pathUnary, body: two, want: codes.Internal},
		"half a message":          {path: pathChat, body: two[:12], want: codes.Internal},
		"half a prefix":           {path: pathChat, body: two[:10], want: codes.Internal},
		"a compressed message":    {path: pathChat, body: flagged(1), want: codes.Internal},
		"an unknown flag":         {path: pathChat, body: flagged(2), want: codes.Internal},
		"a malformed message":     {path: pathChat, body: malformed, want: codes.Internal},
		"an encoding":             {path: pathChat, body: message, fields: []string{"grpc-encoding", "gzip"}, want: codes.Unimplemented},
		"no base64":               {path: pathChat, body: message, fields: []string{"some-bin", "!"}, want: codes.Internal},
		"a handler that refuses":  {path: pathDeaf, body: message, want: codes.InvalidArgument},
		"an unknown method":       {path: "/calls/Nothing", body: message, want: codes.ResourceExhausted}, // what the test's Status makes of all errors
		"a deadline":              {path: pathIdle, body: message, fields: []string{"grpc-timeout", "20m"}, want: codes.DeadlineExceeded},
		"a deadline that is over": {path: pathChat, body: message, fields: []string{"grpc-timeout", "1n"}, want: codes.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			_, server, address := start(t)
			p := dial(t, address)
			p.open(1, c.path, c.fields...)
			go func() {
				for body := c.body; ; body = body[min(len(body), framePayloadMax):] {
					if p.framer.WriteData(1, len(body) <= framePayloadMax, body[:min(len(body), framePayloadMax)]) != nil || len(body) <= framePayloadMax {
						return
					}
				}
			}()
			if st, _ := p.outcome(1); st != codeText(c.want) {
				t.Errorf("status %s, want %v", st, c.want)
			}
			eventually(t, "the stream has ended", func() bool { return server.onlyConn().openStreams() == 0 })
		})
	}
}

func codeText(c codes.Code) string { return string(appendDecimal(nil, int(c))) }

func appendDecimal(b []byte, n int) []byte {
	if n >= 10 {
		b = appendDecimal(b, n/10)
	}
	return append(b, byte('0'+n%10))
}

// TestRefusedMessagesEndTheirCall: a message that the service does not admit is not decoded.
func TestRefusedMessagesEndTheirCall(t *testing.T) {
	s, _, address := start(t)
	s.refuse.Store(true)
	p := dial(t, address)
	p.open(1, pathChat)
	_ = p.framer.WriteData(1, false, prefixed(100))
	_ = p.framer.WriteData(1, false, prefixed(receivedBytesMin)[:10])
	if st, n := p.outcome(1); st != codeText(codes.ResourceExhausted) || n != len(prefixed(100)) {
		t.Errorf("status %s after %d bytes", st, n)
	}
}

// TestSlowClientsOfCallsHoldLittle: a handler that sends to a client which takes nothing waits, with a
// bound of bytes, and ends with its stream, its deadline, or its connection.
func TestSlowClientsOfCallsHoldLittle(t *testing.T) {
	for name, end := range map[string]func(p *peer){
		"reset":      func(p *peer) { _ = p.framer.WriteRSTStream(1, http2.ErrCodeCancel) },
		"deadline":   func(*peer) {},
		"connection": func(p *peer) { _ = p.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			s, server, address := start(t)
			p := dial(t, address)
			fields := []string{}
			if name == "deadline" {
				fields = append(fields, "grpc-timeout", "300m")
			}
			p.open(1, pathEndless, fields...)
			c := onlyConn(t, server)
			eventually(t, "the handler waits", func() bool {
				c.mu.Lock()
				defer c.mu.Unlock()
				return c.streams[1] != nil && c.streams[1].pending.bytes >= callPendingMax
			})
			time.Sleep(5 * time.Millisecond)
			c.mu.Lock()
			if n := c.streams[1].pending.bytes; n > callPendingMax+2*framePayloadMax {
				t.Errorf("%d bytes wait", n)
			}
			c.mu.Unlock()
			end(p)
			eventually(t, "the handler has returned", func() bool { return s.streams.Load() == 0 })
		})
	}
}

func onlyConn(t *testing.T, server *Server) (c *Conn) {
	t.Helper()
	eventually(t, "the connection is open", func() bool { c = server.onlyConn(); return c != nil })
	return c
}

// countedRaw counts how often the transport says that it was sent.
type countedRaw struct {
	raw
	sent *atomic.Int64
}

func (c countedRaw) Sent() { c.sent.Add(1) }

// TestMessagesOfCallsCountUntilTheyAreSent: the transport says once of each message that it holds none
// of its bytes any more, whatever becomes of the stream.
func TestMessagesOfCallsCountUntilTheyAreSent(t *testing.T) {
	var begun, sent atomic.Int64
	services := testServices()
	services.RegisterService(&grpc.ServiceDesc{ServiceName: "counted", Streams: []grpc.StreamDesc{{
		StreamName: "Send", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			for i := range 40 {
				begun.Add(1)
				if err := stream.SendMsg(countedRaw{raw: make([]byte, 1000*i), sent: &sent}); err != nil {
					return err
				}
			}
			begun.Add(1)
			return stream.SendMsg(countedRaw{raw: make([]byte, services.MessageBytesMax+1), sent: &sent})
		},
	}}}, nil)
	for name, c := range map[string]struct {
		window uint32
		end    func(p *peer)
	}{
		"sent": {1 << 20, func(p *peer) {
			if st, _ := p.outcome(1); st != codeText(codes.ResourceExhausted) { // of the last
				t.Errorf("status %s", st)
			}
		}},
		"reset":      {100_000, func(p *peer) { _ = p.framer.WriteRSTStream(1, http2.ErrCodeCancel) }},
		"connection": {0, func(p *peer) { _ = p.Close() }},
	} {
		t.Run(name, func(t *testing.T) {
			begun.Store(0)
			sent.Store(0)
			s, server, address := startWith(t, services)
			p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: c.window})
			_ = p.framer.WriteWindowUpdate(0, 1<<20)
			p.open(1, "/counted/Send")
			onlyConn(t, server)
			eventually(t, "the handler sends", func() bool { return begun.Load() > 5 })
			if c.window < 1<<20 {
				eventually(t, "messages wait for the client, which takes nothing, and do not count as sent", func() bool {
					n := begun.Load()
					time.Sleep(5 * time.Millisecond)
					return begun.Load() == n && n > sent.Load()
				})
			}
			c.end(p)
			eventually(t, "the handler has returned", func() bool { return s.streams.Load() == 0 })
			if begun.Load() != sent.Load() {
				t.Errorf("%d of %d messages were given back", sent.Load(), begun.Load())
			}
		})
	}
}

// TestGoroutinesOfHandlersEndWithThem: what a handler has left in RecvMsg and SendMsg returns when the
// handler does, before the client takes the answer.
func TestGoroutinesOfHandlersEndWithThem(t *testing.T) {
	errs := make(chan error, 2)
	services := testServices()
	services.RegisterService(&grpc.ServiceDesc{ServiceName: "left", Streams: []grpc.StreamDesc{{
		StreamName: "Behind", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, stream grpc.ServerStream) error {
			go func() { errs <- stream.RecvMsg(new(raw)) }()
			go func() { errs <- serveEndless(stream) }()
			time.Sleep(20 * time.Millisecond)
			return status.Error(codes.Aborted, "enough")
		},
	}}}, nil)
	_, server, address := startWith(t, services)
	p := dial(t, address)
	p.open(1, "/left/Behind")
	for range cap(errs) {
		if err := <-errs; status.Code(err) != codes.Canceled {
			t.Errorf("left behind: %v", err)
		}
	}
	if n := onlyConn(t, server).openStreams(); n == 0 {
		t.Error("the stream does not wait for its client")
	}
	_ = p.framer.WriteWindowUpdate(0, 1<<20)
	_ = p.framer.WriteWindowUpdate(1, 1<<20)
	if st, n := p.outcome(1); st != codeText(codes.Aborted) || n < firstWindow {
		t.Errorf("status %s after %d bytes", st, n)
	}
}

// TestCallsEndInADrain: calls that are open when the server drains end by themselves.
func TestCallsEndInADrain(t *testing.T) {
	_, server, address := start(t)
	stream, _ := chat(t, dialCalls(t, address), pathChat)
	var m raw
	if err := errors.Join(stream.SendMsg(raw("a")), stream.RecvMsg(&m)); err != nil {
		t.Fatal(err)
	}
	drained := make(chan error, 1)
	go func() { drained <- server.Drain(context.Background()) }()
	eventually(t, "the connection drains", func() bool {
		c := server.onlyConn()
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.goneAway
	})
	if err := errors.Join(stream.SendMsg(raw("b")), stream.RecvMsg(&m)); err != nil || string(m) != "b" {
		t.Errorf("%q: %v", m, err)
	}
	_ = stream.CloseSend()
	if err := stream.RecvMsg(&m); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v", err)
	}
	if err := <-drained; err != nil {
		t.Error(err)
	}
}

// countingConn counts calls of Write.
type countingConn struct {
	net.Conn
	writes atomic.Int64
}

func (c *countingConn) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

// TestAnswersOfCallsShareSystemCalls: the handlers that a burst of messages has woken send their
// answers with few system calls, and an answer is sent with the end of its stream.
func TestAnswersOfCallsShareSystemCalls(t *testing.T) {
	const streams, rounds = 16, 50
	_, server, address := start(t)
	p := dial(t, address)
	for i := range uint32(streams) {
		p.open(2*i+1, pathChat)
	}
	c := onlyConn(t, server)
	eventually(t, "the streams are open", func() bool { return c.openStreams() == 2*streams })
	counting := &countingConn{}
	eventually(t, "the connection writes nothing", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.out.flushing && len(c.out.buf) == 0 {
			counting.Conn = c.raw
			c.raw = counting
		}
		return counting.Conn != nil
	})
	var burst []byte
	for i := range uint32(streams) {
		burst = append(AppendFrameHeader(burst, len(prefixed(1)), http2.FrameData, 0, 2*i+1), prefixed(1)...)
	}
	for range rounds {
		if _, err := p.Write(burst); err != nil {
			t.Fatal(err)
		}
		for answers := 0; answers < streams; {
			f, err := p.framer.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if _, ok := f.(*http2.DataFrame); ok {
				answers++
			}
		}
	}
	if n := counting.writes.Load(); n > streams*rounds/2 {
		t.Errorf("%d writes for %d messages", n, streams*rounds)
	} else {
		t.Logf("%d writes for %d messages", n, streams*rounds)
	}
}

// TestCallsEndWithTrailersOfTheirRequest: a header block that ends a request ends its messages, too.
func TestCallsEndWithTrailersOfTheirRequest(t *testing.T) {
	_, _, address := start(t)
	p := dial(t, address)
	p.open(1, pathChat)
	_ = p.framer.WriteData(1, false, prefixed(10))
	for answered := false; !answered; {
		f, err := p.framer.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		_, answered = f.(*http2.DataFrame)
	}
	p.block.Reset()
	_ = p.encoder.WriteField(hpack.HeaderField{Name: "some", Value: "trailer"})
	_ = p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: p.block.Bytes(), EndHeaders: true, EndStream: true})
	if st, _ := p.outcome(1); st != codeText(codes.OK) {
		t.Errorf("status %s", st)
	}
}

// TestBytesForAHandlerThatHasReturnedGiveTheirWindowBack: what a client sends on a stream whose answer
// it does not take is dropped, and counts no longer.
func TestBytesForAHandlerThatHasReturnedGiveTheirWindowBack(t *testing.T) {
	_, server, address := start(t)
	p := dial(t, address, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	p.open(1, pathText)
	c := onlyConn(t, server)
	eventually(t, "the handler has returned", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.streams[1] != nil && c.streams[1].call.returned
	})
	for range 3 {
		_ = p.framer.WriteData(1, false, prefixed(10_000))
	}
	_ = p.framer.WriteRSTStream(1, http2.ErrCodeCancel)
	eventually(t, "the stream has ended", func() bool { return c.openStreams() == 0 })
	c.mu.Lock()
	defer c.mu.Unlock()
	if got := c.connWindow + c.untaken; got != testOptions().ConnWindow {
		t.Errorf("the client may send %d bytes, want %d", got, testOptions().ConnWindow)
	}
}

// gatedConn holds calls of Write until the gate is open.
type gatedConn struct {
	net.Conn
	writing atomic.Bool
	gate    chan struct{}
}

func (c *gatedConn) Write(p []byte) (int, error) {
	c.writing.Store(true)
	<-c.gate
	return c.Conn.Write(p)
}

// TestReaderReadsWhileCallsSend: a connection is read while the answers of calls are written to it,
// also after the windows that it has read have allowed them.
func TestReaderReadsWhileCallsSend(t *testing.T) {
	_, server, address := start(t)
	p := dial(t, address)
	p.open(1, pathEndless)
	c := onlyConn(t, server)
	gated := &gatedConn{gate: make(chan struct{})}
	defer close(gated.gate)
	eventually(t, "the handler waits for windows", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.streams[1] == nil || c.streams[1].pending.bytes < callPendingMax || c.out.flushing {
			return false
		}
		gated.Conn = c.raw
		c.raw = gated
		return true
	})
	_ = p.framer.WriteWindowUpdate(0, 1<<30)
	_ = p.framer.WriteWindowUpdate(1, 1<<30)
	eventually(t, "the answer is written", gated.writing.Load)
	reads := c.reads.Load()
	_ = p.framer.WriteWindowUpdate(0, 1)
	eventually(t, "a frame is read", func() bool { return c.reads.Load() > reads })
}
