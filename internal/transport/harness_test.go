package transport

import (
	"bytes"
	"crypto/tls"
	"errors"
	"flag"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var overTLS = flag.Bool("tls", false, "the tests of frames use connections over TLS")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	pathEcho   = "/test/Echo"   // answers with its message
	pathBlock  = "/test/Block"  // waits until the service is released
	pathStream = "/test/Stream" // answers each message with itself; the message wait waits for a token of the service
	pathLarge  = "/test/Large"  // answers with largeBytes
	pathHeld   = "/test/Held"   // takes one message, and never asks for more
	pathKiB    = "/test/KiB"    // answers with three of them
	pathKiBs   = "/test/KiBs"   // answers each message with three of them
	pathLater  = "/test/Later"  // is answered by the test
)

const largeBytes = 300 << 10

// service counts what a server takes and gives back.
type service struct {
	release   chan struct{} // ends requests for pathBlock; its tokens are for pathStream
	clients   atomic.Int64
	streams   atomic.Int64
	received  atomic.Int64 // bytes
	lanes     atomic.Int64
	executed  atomic.Int64
	cancelled atomic.Int64
	failed    atomic.Int64          // streams that ended because of a message
	held      atomic.Int64          // answers that the transport has not released
	headers   atomic.Int64          // requests that were refused because of their metadata
	overdue   atomic.Bool           // clients are
	causes    atomic.Pointer[error] // of the end of the newest connection that has ended
	refuse    atomic.Bool           // Receive refuses
	wanted    atomic.Bool           // others want the place of any message

	mu    sync.Mutex
	later []Request // for pathLater
}

// waiting is the requests for pathLater.
func (s *service) waiting() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.later
}

func (s *service) Connect(*Conn) Client { s.clients.Add(1); return client{s} }

type client struct{ *service }

func (client) Fast(path string) int {
	return map[string]int{pathEcho: 1, pathBlock: 2, pathStream: 3, pathLarge: 4, pathHeld: 5, pathKiB: 6, pathKiBs: 7, pathLater: 8}[path]
}
func (c client) Lane() Lane                   { c.lanes.Add(1); return lane(c) }
func (c client) OpenStream(_, _ string) error { c.streams.Add(1); return nil }
func (c client) CloseStream()                 { c.streams.Add(-1) }
func (c client) Received(bytes int)           { c.received.Add(-int64(bytes)) }
func (c client) Cancelled(Request)            { c.cancelled.Add(1) }
func (c client) Overdue() bool                { return c.overdue.Load() }
func (c client) Unsent(int)                   {}
func (c client) LeastProgress(int) int        { return progressBytes }
func (c client) IsWanted(int) bool            { return c.wanted.Load() }
func (c client) HeadersRefused(int)           { c.headers.Add(1) }
func (c client) Closed(cause error) {
	c.clients.Add(-1)
	c.causes.Store(&cause)
}

func (client) Status(err error) *status.Status {
	return status.New(codes.ResourceExhausted, err.Error())
}

func (c client) Receive(bytes int) error {
	if c.refuse.Load() {
		return errors.New("no room")
	}
	c.received.Add(int64(bytes))
	return nil
}

func (c client) Messages(r Request) (Messages, error) {
	switch r.Method() {
	case 3:
		return &echoStream{request: r, failed: &c.failed, release: c.release}, nil
	case 7:
		return &echoStream{request: r, always: threeKiB, failed: &c.failed}, nil
	case 5:
		return heldStream{}, nil
	}
	return nil, nil //nolint:nilnil // as the interface says
}

type echoStream struct {
	request Request
	always  Message // nil: the message itself
	failed  *atomic.Int64
	release chan struct{}
}

func (s *echoStream) Execute(_ Lane, message []byte) bool {
	if string(message) == "wait" {
		<-s.release
	}
	answer := s.always
	if answer == nil {
		answer = raw(bytes.Clone(message))
	}
	s.request.Send(answer, nil)
	return true
}

func (s *echoStream) End(st *status.Status) {
	if st.Code() != codes.OK {
		s.failed.Add(1)
	}
	s.request.EndStream(st)
}

type lane struct{ *service }

func (l lane) Rest() { l.lanes.Add(-1) }

func (l lane) Execute(r Request, message []byte) {
	l.executed.Add(1)
	switch r.Method() {
	case 2:
		<-l.release
	case 4:
		l.held.Add(1)
		r.Answer(raw(make([]byte, largeBytes)), func() { l.held.Add(-1) })
		return
	case 6:
		r.Answer(threeKiB, nil)
		return
	case 8:
		l.mu.Lock()
		defer l.mu.Unlock()
		l.later = append(l.later, r)
		return
	}
	r.Answer(raw(bytes.Clone(message)), nil)
}

var threeKiB Message = raw(make([]byte, 3<<10))

// raw is a message that encodes as itself.
type raw []byte

func (m raw) SizeVT() int { return len(m) }

func (m raw) MarshalToSizedBufferVT(b []byte) (int, error) { return copy(b, m), nil }

func testOptions() Options {
	return Options{
		Streams: 100, StreamWindow: 256 << 10, ConnWindow: 1 << 20, HeaderBytes: 8 << 10, HandshakeTimeout: 5 * time.Second,
		KeepaliveTime: 30 * time.Second, KeepaliveTimeout: 10 * time.Second, PingInterval: 10 * time.Second, HandOverAfter: time.Millisecond, ProgressTimeout: 30 * time.Second,
		AcceptFailed: func(error) {},
	}
}

// start serves until the end of the test, and checks then that everything was given back.
func start(t testing.TB, adjust ...func(*Options)) (*service, *Server, string) {
	t.Helper()
	return startWith(t, testServices(), adjust...)
}

func startWith(t testing.TB, services *Services, adjust ...func(*Options)) (*service, *Server, string) {
	t.Helper()
	o := testOptions()
	for _, f := range adjust {
		f(&o)
	}
	if *overTLS && o.TLS == nil {
		o.TLS = NewHandshakes(handshakeOptions(t))
	}
	s := &service{release: make(chan struct{})}
	server := New(o, s, services)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		select {
		case <-s.release:
		default:
			close(s.release)
		}
		server.Close()
		if err := <-served; !errors.Is(err, ErrClosed) {
			t.Errorf("Serve returned %v", err)
		}
		for what, n := range map[string]*atomic.Int64{"clients": &s.clients, "streams": &s.streams, "bytes received": &s.received, "lanes": &s.lanes, "answers": &s.held} {
			if n.Load() != 0 {
				t.Errorf("%d %s were not given back", n.Load(), what)
			}
		}
	})
	return s, server, l.Addr().String()
}

// peer is a client that sends what a test wants.
type peer struct {
	net.Conn
	t       testing.TB
	framer  *http2.Framer
	block   bytes.Buffer
	encoder *hpack.Encoder
}

func dial(t testing.TB, address string, settings ...http2.Setting) *peer {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	if *overTLS {
		conn = tls.Client(conn, authority(t).client())
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	p := &peer{Conn: conn, t: t, framer: http2.NewFramer(conn, conn)}
	p.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.framer.AllowIllegalWrites = true
	p.encoder = hpack.NewEncoder(&p.block)
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	_ = p.framer.WriteSettings(settings...)
	return p
}

// headers encodes a request for a path, with more fields.
func (p *peer) headers(path string, more ...string) []byte {
	p.block.Reset()
	fields := append([]string{":method", "POST", ":scheme", "http", ":path", path, ":authority", "test", "content-type", "application/grpc", "te", "trailers"}, more...)
	for i := 0; i < len(fields); i += 2 {
		_ = p.encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	return bytes.Clone(p.block.Bytes())
}

func (p *peer) open(stream uint32, path string, more ...string) {
	_ = p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: p.headers(path, more...), EndHeaders: true})
}

func prefixed(n int) []byte {
	b := make([]byte, grpcPrefixBytes+n)
	putPrefix(b, n)
	return b
}

// request sends a whole request.
func (p *peer) request(stream uint32, path string, bytes int) {
	p.open(stream, path)
	_ = p.framer.WriteData(stream, true, prefixed(bytes))
}

// outcome reads until a stream has ended, and returns its status and the bytes of its messages.
func (p *peer) outcome(stream uint32) (grpcStatus string, data int) {
	p.t.Helper()
	for {
		f, err := p.framer.ReadFrame()
		if err != nil {
			p.t.Fatalf("stream %d: %v", stream, err)
		}
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			if f.StreamID == stream && f.StreamEnded() {
				for _, h := range f.Fields {
					if h.Name == "grpc-status" {
						return h.Value, data
					}
				}
				return "none", data
			}
		case *http2.DataFrame:
			if f.StreamID == stream {
				data += len(f.Data())
			}
		case *http2.RSTStreamFrame:
			if f.StreamID == stream {
				return "RST " + f.ErrCode.String(), data
			}
		case *http2.GoAwayFrame:
			return "GOAWAY " + f.ErrCode.String() + " " + string(f.DebugData()), data
		}
	}
}

// goneAway reads until the server has closed the connection, and returns the code of GOAWAY.
func (p *peer) goneAway() (code http2.ErrCode, sent bool) {
	p.t.Helper()
	for {
		f, err := p.framer.ReadFrame()
		if err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				p.t.Fatal("the connection is still open")
			}
			return code, sent
		}
		if g, ok := f.(*http2.GoAwayFrame); ok {
			code, sent = g.ErrCode, true
		}
	}
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
