// Package transport serves gRPC over HTTP/2 with one goroutine a connection.
//
// Terms. A unary request of a fast method is executed by the goroutine that reads its connection.
// All other requests are calls: handlers that generated code has registered serve them, in goroutines
// of their own, and share the connection's frames and windows. A lane is what one goroutine executes fast requests
// with. The reader role of a connection is the right to read its frames and to execute its fast
// requests; one goroutine has it at a time.
//
//	socket ─► input ─► frames ─► header block ─► stream ─┬─► complete ─► Lane.Execute ─► answer ─┐
//	                                                     └─► call ─► grpc.ServiceDesc ─► answer ─┤
//	socket ◄─ flush (one system call for all answers that are ready) ◄─ out ◄─ windows ◄─────────┘
//
// The reader executes the requests that it has read, in order, until its buffer has no complete
// frame. Then it sends all answers with one system call, and reads again. An answer that is not
// ready when Execute returns is given later, by any goroutine.
//
// Execute may wait: for a latch, for memory, for a device. The watchdog finds requests that have
// been executed for one to two times HandOverAfter, and gives the reader role of their connection to
// another goroutine, with a buffer of its own. The goroutine that has lost the role answers its
// request and ends. So a request that waits delays the other requests of its connection by at most
// twice that time.
//
// Bounds. For each connection: streams (SETTINGS_MAX_CONCURRENT_STREAMS, counted until a handler
// has returned and its answer is sent), goroutines that execute requests (as many), bytes received
// and not taken (the windows), bytes of a header block, bytes to send (a sender waits beyond outMax;
// the service counts answers of fast requests), and time without progress of messages, answers,
// pings and the connection's start.
//
// Invariants. Frames are read and header blocks decoded by the holder of the reader role only. A
// stream has at most one answer: later ones are dropped. What the mutex of a connection guards is
// consistent when it is free, and no goroutine waits while it holds it. Release of an answer is
// called once, also when the connection ends.
package transport

import (
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/status"
)

// Options are the limits of a Server. All are required, but those of TLS.
type Options struct {
	TLS *Handshakes // nil: plain text

	Streams          int           // open on one connection
	StreamWindow     int           // bytes that a client may send on a stream before they are taken
	ConnWindow       int           // the same of a connection
	HeaderBytes      int           // of a request's metadata, as HTTP/2 counts them
	HandshakeTimeout time.Duration // for preface and settings
	MaxAge           time.Duration // from which on a client must connect again, up to a tenth earlier; requests under way have another tenth. 0: none
	KeepaliveTime    time.Duration // of silence before a ping
	KeepaliveTimeout time.Duration // for a sign of life after it
	PingInterval     time.Duration // clients that ping more often lose their connection
	HandOverAfter    time.Duration // a request that is executed for longer no longer holds up its connection
	ProgressTimeout  time.Duration // a message that arrives, or an answer that is sent, must proceed in it
	AcceptFailed     func(error)   // is told that no connection could be accepted for a moment
}

// Service is what a Server serves. Its methods are called from many goroutines.
type Service interface {
	// Connect is called for each new connection. Nil refuses it.
	Connect(c *Conn) Client
}

// Client is what a Service keeps for a connection.
type Client interface {
	// Fast is the number of the fast method of a path, or 0.
	Fast(path string) int

	// Messages is called when a request of a fast method begins. Nil means that the method is unary.
	// The connection's mutex is held meanwhile.
	Messages(r Request) (Messages, error)

	// Lane is called when a goroutine begins to execute requests.
	Lane() Lane

	// OpenStream admits a stream for a path or refuses it, with an error that Status knows. After
	// nil, CloseStream is called at its end. The connection's mutex is held meanwhile.
	OpenStream(path, authorization string) error
	CloseStream()

	// Receive admits a message of so many bytes, of which the prefix has arrived, or refuses it.
	// Small messages are not asked about. After nil, Received is called with the same number when the
	// message has been executed or is lost.
	Receive(bytes int) error
	Received(bytes int)

	// Cancelled is called when a fast request that has not been answered, or a stream of messages
	// that has not ended, is cancelled by the client, or when the transport fails such a stream. The
	// connection's mutex is held meanwhile.
	Cancelled(r Request)

	// Overdue reports whether the client keeps others waiting for too long with an answer that it does not take. It is called at each check of
	// the connection, whose mutex is held meanwhile.
	Overdue() bool

	// Unsent is called when that changes which streams of messages have of small messages that the client's windows do not allow to be sent yet, with
	// the bytes of all of them. The connection's mutex is held meanwhile.
	Unsent(bytes int)

	// LeastProgress is how much of a message of so many bytes must arrive within Options.ProgressTimeout; at least progressBytes count. The
	// connection's mutex is held meanwhile.
	LeastProgress(bytes int) int

	// IsWanted reports whether others are refused because a message of so many bytes is being received: then it must come, whatever the windows. The
	// connection's mutex is held meanwhile.
	IsWanted(bytes int) bool

	// HeadersRefused is called when a request is refused with ErrMetadata, with the size of its metadata. The connection's mutex is
	// held meanwhile.
	HeadersRefused(bytes int)

	// Status maps an error to what is sent: those of OpenStream, Messages and Receive, ErrMetadata,
	// ErrIncomplete, ErrUnknownMethod, *TooLargeError, context.DeadlineExceeded, and *LaterError of them.
	Status(err error) *status.Status

	// Closed is called at the end of the connection, with its cause, before its requests are
	// cancelled. No answer is sent any more.
	Closed(cause error)
}

// Lane executes requests one after the other.
type Lane interface {
	// Execute executes a request and answers it, or keeps the Request and answers later. The
	// request's message is valid until Execute returns.
	Execute(r Request, message []byte)

	// Rest is called when no request is at hand.
	Rest()
}

// Messages executes the messages of a stream, one after the other.
type Messages interface {
	// Execute executes a message, which is valid until it returns. If it reports false, the next
	// message is not executed before Request.Resume.
	Execute(l Lane, message []byte) (more bool)

	// End is called after the last message, when the client has closed its side: then the status is OK. Another status
	// says why the message after the last one cannot be taken. The stream ends with it once what was executed is
	// answered.
	End(st *status.Status)
}

// ErrIncomplete is the error when the rest of a message, or the end of a request, did not arrive in time.
var ErrIncomplete = errors.New("transport: the rest of the request did not arrive in time")

// ErrMetadata is the error when the metadata of a request is larger than Options.HeaderBytes.
var ErrMetadata = errors.New("transport: the metadata of the request is too large")

// ErrUnread is the end of a connection whose client does not take its answers.
var ErrUnread = errors.New("transport: the client does not take its answers")

// LaterError is the error of a message on a stream that has carried others: earlier requests of the
// stream may have been executed.
type LaterError struct{ Cause error }

func (e *LaterError) Error() string { return e.Cause.Error() }

// Unwrap returns the cause.
func (e *LaterError) Unwrap() error { return e.Cause }

// Server serves connections.
type Server struct {
	options Options
	service Service

	services *Services

	mu        sync.Mutex
	conns     map[*Conn]struct{}
	listeners map[net.Listener]struct{}
	draining  bool
	closed    bool
	ended     chan struct{} // closed when draining, and no connection is left

	goroutines sync.WaitGroup
	watchdog   watchdog
	stop       context.CancelFunc
}

// ErrClosed is what Serve returns after Drain or Close.
var ErrClosed = errors.New("transport: closed")

// New makes a server. Requests that no fast method serves are calls of the services. Their context has
// the connection's Client, for ClientOf.
func New(o Options, s Service, services *Services) *Server {
	ctx, stop := context.WithCancel(context.Background())
	t := &Server{
		options: o, service: s, services: services, conns: map[*Conn]struct{}{}, listeners: map[net.Listener]struct{}{},
		ended: make(chan struct{}), stop: stop,
	}
	t.watchdog.wake, t.watchdog.every = make(chan struct{}, 1), o.HandOverAfter
	t.goroutines.Go(func() { t.watchdog.run(ctx) })
	t.goroutines.Go(func() { t.checkAll(ctx) })
	return t
}

// Serve accepts connections until the listener fails, or Drain or Close are called: ErrClosed.
func (t *Server) Serve(l net.Listener) error {
	if !t.listen(l) {
		return errors.Join(ErrClosed, l.Close())
	}
	const pauseMax = time.Second
	pause := time.Duration(0)
	for {
		raw, err := l.Accept()
		switch {
		case err == nil:
			pause = 0
			t.begin(raw)
		case t.isClosing():
			return ErrClosed
		case isTemporary(err):
			t.options.AcceptFailed(err)
			pause = min(max(2*pause, time.Millisecond), pauseMax)
			time.Sleep(pause)
		default:
			return err
		}
	}
}

// isTemporary reports whether Accept may succeed later: descriptors may be short for a moment.
func isTemporary(err error) bool {
	var t interface{ Temporary() bool }
	return errors.As(err, &t) && t.Temporary()
}

func (t *Server) listen(l net.Listener) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.draining || t.closed {
		return false
	}
	t.listeners[l] = struct{}{}
	return true
}

func (t *Server) isClosing() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.draining || t.closed
}

// begin begins with a connection that was accepted.
func (t *Server) begin(raw net.Conn) {
	if t.options.TLS != nil {
		t.secure(raw)
	} else {
		t.serve(raw)
	}
}

// serve serves a connection.
func (t *Server) serve(raw net.Conn) {
	c := newConn(t, raw)
	if c.client = t.service.Connect(c); c.client == nil {
		_ = raw.Close()
		return
	}
	t.mu.Lock()
	refused := t.draining || t.closed
	if !refused {
		t.conns[c] = struct{}{}
		t.goroutines.Add(1)
	}
	t.mu.Unlock()
	if refused {
		c.client.Closed(ErrClosed)
		_ = raw.Close()
		return
	}
	go func() {
		defer t.goroutines.Done()
		c.start()
	}()
}

// remove forgets a connection that has ended.
func (t *Server) remove(c *Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, c)
	t.endLocked()
}

func (t *Server) endLocked() {
	if t.draining && len(t.conns) == 0 {
		select {
		case <-t.ended:
		default:
			close(t.ended)
		}
	}
}

// Drain stops accepting, tells all clients to open no more streams, and returns when the streams
// that are open have ended, or ctx ends.
func (t *Server) Drain(ctx context.Context) error {
	t.mu.Lock()
	t.draining = true
	for l := range t.listeners {
		_ = l.Close()
	}
	for c := range t.conns {
		t.goroutines.Go(c.drain)
	}
	t.endLocked()
	t.mu.Unlock()
	select {
	case <-t.ended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close closes all connections and returns when their goroutines have ended, those of handlers
// included.
func (t *Server) Close() {
	t.mu.Lock()
	t.closed = true
	for l := range t.listeners {
		_ = l.Close()
	}
	t.mu.Unlock()
	if t.options.TLS != nil {
		t.options.TLS.Close()
	}
	for _, c := range t.open() {
		c.close(ErrClosed)
	}
	t.stop()
	t.goroutines.Wait()
}

// open lists the connections.
func (t *Server) open() []*Conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.conns))
}

// checkAll looks for what does not proceed.
func (t *Server) checkAll(ctx context.Context) {
	const checks = 8 // in the shortest time that is watched
	o := &t.options
	ticker := time.NewTicker(max(min(o.HandshakeTimeout, o.KeepaliveTime, o.KeepaliveTimeout, o.ProgressTimeout)/checks, time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			for _, c := range t.open() {
				c.check(now)
			}
		}
	}
}
