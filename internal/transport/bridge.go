package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
)

// bridge is a stream that an http.Handler serves: its request body and its ResponseWriter.
//
// The handler of gRPC reads a body as fast as it comes, into a queue without a bound. So the body
// hands on a message only when the handler asks for it: Bridge.Next.
type bridge struct {
	conn   *Conn
	stream *stream
	cancel context.CancelFunc

	header      http.Header // the handler's
	wroteHeader bool
	status      int

	// The connection's mutex guards the rest.
	changed  sync.Cond
	received []byte // and not read
	closed   bool   // nothing is read any more
	ending   bool   // the handler is about to return: what it still writes need not wait
	returned bool   // the handler has returned: the stream counts until its answer is sent
	allowed  int    // messages that may still be begun; -1 if the second was before it was asked for
	prefixed int    // bytes read of the prefix of the message at hand
	prefix   [grpcPrefixBytes]byte
	left     int // bytes to read of the message at hand
	reserved int // what Receive has admitted for it, and for the first
	begun    int // messages
}

// bridgePendingMax is how many bytes of a bridged stream wait for its windows before its handler
// does.
const bridgePendingMax = 64 << 10

var (
	errBodyClosed   = errors.New("transport: the body is closed")
	errStreamEnded  = errors.New("transport: the stream has ended")
	errNotAdmitted  = errors.New("transport: the message was refused")
	errHandshake    = errors.New("transport: no settings came in time")
	errSilent       = errors.New("transport: the client does not answer pings")
	trailerDeclared = []string{"Grpc-Status", "Grpc-Message", "Grpc-Status-Details-Bin"}
)

// Bridge lets the handler of a bridged request say what it does. That of other requests does
// nothing.
type Bridge struct{ bridge *bridge }

// BridgeOf is the bridge of a request.
func BridgeOf(ctx context.Context) Bridge {
	b, _ := ctx.Value(bridgeKey{}).(*bridge)
	return Bridge{bridge: b}
}

// Next lets the handler receive one more message. The first needs no call.
func (h Bridge) Next() {
	if b := h.bridge; b != nil {
		b.conn.mu.Lock()
		b.releaseLocked()
		b.allowed++
		b.wakeLocked()
		b.conn.mu.Unlock()
	}
}

// Ending tells that the handler is about to return: what it writes from now on does not wait for
// the client.
func (h Bridge) Ending() {
	if b := h.bridge; b != nil {
		b.conn.mu.Lock()
		b.ending = true
		b.wakeLocked()
		b.conn.mu.Unlock()
	}
}

type bridgeKey struct{}

// bridgeLocked begins to serve a stream through the handler.
func (c *Conn) bridgeLocked(s *stream, l *headerList) {
	b := &bridge{conn: c, stream: s, header: http.Header{}, allowed: 1}
	b.changed.L = &c.mu
	s.bridge = b
	ctx := context.WithValue(context.WithValue(context.Background(), clientKey{}, c.client), bridgeKey{}, b)
	ctx, b.cancel = context.WithCancel(ctx)
	request := &http.Request{
		Method: l.method, Proto: "HTTP/2.0", ProtoMajor: 2, Header: make(http.Header, len(l.fields)), Body: b, ContentLength: -1,
		Host: l.authority, RemoteAddr: c.raw.RemoteAddr().String(), URL: &url.URL{Path: l.path}, RequestURI: l.path,
	}
	for _, f := range l.fields {
		request.Header.Add(f.Name, f.Value)
	}
	request = request.WithContext(ctx)
	c.handlers.Add(1)
	c.server.goroutines.Go(func() {
		defer c.handlers.Done()
		c.server.handler.ServeHTTP(b, request)
		b.end()
	})
}

func (b *bridge) wakeLocked() { b.changed.Broadcast() }

func (b *bridge) releaseLocked() {
	if b.reserved > 0 {
		b.conn.client.Received(b.reserved)
		b.reserved = 0
	}
}

// receiveLocked takes bytes that the client has sent.
func (b *bridge) receiveLocked(payload []byte) {
	if b.closed {
		b.conn.takenLocked(len(payload))
		return
	}
	b.received = append(b.received, payload...)
	b.wakeLocked()
}

// withinMessage reports whether a part of a message has come, and not its end.
func (b *bridge) withinMessage() bool {
	if b.left > len(b.received) || b.prefixed > 0 {
		return true
	}
	rest := b.received[min(b.left, len(b.received)):]
	for len(rest) > 0 {
		if len(rest) < grpcPrefixBytes {
			return true
		}
		n := grpcPrefixBytes + int(binary.BigEndian.Uint32(rest[1:]))
		if n > len(rest) {
			return true
		}
		rest = rest[n:]
	}
	return false
}

// Read implements io.Reader for the request's body.
func (b *bridge) Read(p []byte) (int, error) {
	c := b.conn
	c.mu.Lock()
	for {
		n, err := b.readLocked(p)
		if n > 0 {
			c.takenLocked(n)
			c.widenLocked(b.stream, n)
			send := len(c.out.buf) > 0 && !c.out.flushing
			c.mu.Unlock()
			if send {
				c.flush()
			}
			return n, nil
		}
		if err != nil {
			c.mu.Unlock()
			return 0, err
		}
		b.changed.Wait()
	}
}

// readLocked reads what it may of the message at hand.
func (b *bridge) readLocked(p []byte) (int, error) {
	s := b.stream
	switch {
	case b.closed:
		return 0, errBodyClosed
	case s.gone:
		return 0, errStreamEnded
	case len(b.received) == 0 && s.recvEnded:
		if b.left > 0 || b.prefixed > 0 {
			return 0, io.ErrUnexpectedEOF
		}
		return 0, io.EOF
	case len(b.received) == 0 || !b.mayReadLocked():
		return 0, nil
	}
	if b.left == 0 {
		return b.readPrefixLocked(p)
	}
	n := copy(p, b.received[:min(len(b.received), b.left)])
	b.left -= n
	b.takeLocked(n)
	return n, nil
}

// mayReadLocked reports whether the handler has asked for the message at hand. Handlers of methods
// with one request do not ask whether there is another, so the second may be read when the client
// has ended its side: all of it has come, and no more can.
func (b *bridge) mayReadLocked() bool {
	return b.left > 0 || b.prefixed > 0 || b.allowed > 0 || b.begun == 1 && b.stream.recvEnded
}

func (b *bridge) takeLocked(n int) {
	if b.received = b.received[n:]; len(b.received) == 0 {
		b.received = nil
	}
}

func (b *bridge) readPrefixLocked(p []byte) (int, error) {
	if b.prefixed == 0 {
		b.allowed--
	}
	n := copy(p, b.received[:min(len(b.received), grpcPrefixBytes-b.prefixed)])
	copy(b.prefix[b.prefixed:], b.received[:n])
	b.prefixed += n
	b.takeLocked(n)
	if b.prefixed < grpcPrefixBytes {
		return n, nil
	}
	b.prefixed, b.left = 0, int(binary.BigEndian.Uint32(b.prefix[1:]))
	b.begun++
	b.conn.bridged++
	if b.left >= receivedBytesMin {
		if err := b.conn.client.Receive(b.left); err != nil {
			b.conn.failLocked(b.stream, b.conn.client.Status(b.later(err)))
			return 0, errNotAdmitted
		}
		b.reserved += b.left
	}
	return n, nil
}

// later is the error of the message at hand.
func (b *bridge) later(err error) error {
	if b.begun > 1 {
		return &LaterError{Cause: err}
	}
	return err
}

// laterIncomplete is the error of a request that has not ended: after a complete message it was not
// executed, so nothing was executed before.
func (b *bridge) laterIncomplete(err error) error {
	if b.withinMessage() && b.begun > 0 && (b.left == 0 || b.begun > 1) {
		return &LaterError{Cause: err}
	}
	return err
}

// Close implements io.Closer for the request's body.
func (b *bridge) Close() error {
	b.conn.mu.Lock()
	defer b.conn.mu.Unlock()
	b.closeLocked()
	return nil
}

// closeLocked drops what has come and will not be read.
func (b *bridge) closeLocked() {
	b.closed = true
	b.conn.takenLocked(len(b.received))
	b.received = nil
	b.wakeLocked()
}

// Header implements http.ResponseWriter.
func (b *bridge) Header() http.Header { return b.header }

// WriteHeader implements http.ResponseWriter.
func (b *bridge) WriteHeader(code int) {
	if b.wroteHeader {
		return
	}
	b.wroteHeader, b.status = true, code
	block := appendLiteral(nil, ":status", strconv.Itoa(code))
	for name, values := range b.header {
		if name != "Trailer" && !strings.HasPrefix(name, http.TrailerPrefix) {
			block = appendFields(block, name, values)
		}
	}
	c := b.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := b.stream; !s.gone {
		s.answered = true
		c.sendBlockLocked(s, append(c.encoder.begin(nil), block...), false)
	}
}

func appendFields(block []byte, name string, values []string) []byte {
	for _, v := range values {
		block = appendLiteral(block, strings.ToLower(name), v)
	}
	return block
}

// Write implements http.ResponseWriter. It waits while the client takes nothing.
func (b *bridge) Write(p []byte) (int, error) {
	b.WriteHeader(http.StatusOK)
	c, s := b.conn, b.stream
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(s.pending) >= bridgePendingMax && !b.ending && !s.gone {
		if !c.out.flushing && c.sendWindow > 0 && s.sendWindow > 0 {
			c.flushLocked()
			continue
		}
		b.changed.Wait()
	}
	if s.gone {
		return 0, errStreamEnded
	}
	s.pending = append(s.pending, p...)
	c.queueLocked(s)
	return len(p), nil
}

// Flush implements http.Flusher.
func (b *bridge) Flush() {
	b.WriteHeader(http.StatusOK)
	b.conn.flush()
}

// end sends the end of the answer.
func (b *bridge) end() {
	b.WriteHeader(http.StatusOK)
	trailers := []byte{}
	if b.status == http.StatusOK {
		for _, name := range trailerDeclared {
			trailers = appendFields(trailers, name, b.header[name])
		}
		for name, values := range b.header {
			if after, is := strings.CutPrefix(name, http.TrailerPrefix); is {
				trailers = appendFields(trailers, after, values)
			}
		}
	}
	c, s := b.conn, b.stream
	c.mu.Lock()
	b.closeLocked()
	b.releaseLocked()
	if s.gone {
		c.closeStreamLocked()
	} else {
		b.returned, s.trailers, s.last = true, trailers, true
		c.queueLocked(s)
	}
	c.drainedLocked()
	c.mu.Unlock()
	c.flush()
}

var _ interface {
	http.ResponseWriter
	http.Flusher
	io.ReadCloser
} = (*bridge)(nil)
