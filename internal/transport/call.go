package transport

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// call is a request that the handler of a service serves, in a goroutine of its own. It implements
// grpc.ServerStream. As there, one goroutine may receive while another sends.
//
// What has come and was not received by the handler is bounded by the windows, which are given back
// with each message that the handler takes. What was sent and waits for the client's windows is
// bounded by callPendingMax and one message: then SendMsg waits.
type call struct {
	conn   *Conn
	stream *stream
	method *method
	ctx    context.Context
	cancel context.CancelFunc
	late   func() bool // ends the wait for the deadline; nil without one

	// The connection's mutex guards the rest.
	changed  sync.Cond // of the goroutines that receive and send
	returned bool      // the handler has returned: the stream counts until its answer is sent
	failed   error     // with which the stream ends when what is pending has been sent
	header   metadata.MD
	trailer  metadata.MD
	inbox
	mustProgress bool // what is pending counts against a client that takes nothing; see RequireProgress
	restLimited  bool // what is pending must be taken within one progress timeout; see LimitRest
	crowded      int  // a goroutine that sends waits until less than this is pending; 0: none does
}

var (
	errHandshake = errors.New("transport: no settings came in time")
	errSilent    = errors.New("transport: the client does not answer pings")
	errHalfFrame = errors.New("transport: the rest of a frame did not come")
	errAge       = errors.New("transport: the connection is old")
)

// ErrUnknownMethod is the error of a request for a method that is not registered.
var ErrUnknownMethod = errors.New("transport: the method is unknown")

// HTTP statuses of requests that are no gRPC. Clients of gRPC look at grpc-status.
const (
	httpBadRequest       = "400"
	httpMethodNotAllowed = "405"
	httpUnsupported      = "415"
)

// echoMax is how many characters of a field a status repeats: clients accept some KiB of metadata.
const echoMax = 100

// callLocked begins to serve a stream through the handler of its method, or refuses it.
func (c *Conn) callLocked(s *stream, l *headerList) {
	switch {
	case !l.isGRPC():
		c.abortLocked(s, httpUnsupported, status.Newf(codes.InvalidArgument, "invalid gRPC request content-type %.*q", echoMax, l.contentType))
		return
	case l.method != "POST":
		c.abortLocked(s, httpMethodNotAllowed, status.Newf(codes.Internal, "the method of a gRPC request is POST, not %.*q", echoMax, l.method))
		return
	case l.encoding != "" && l.encoding != "identity":
		c.failLocked(s, status.Newf(codes.Unimplemented, "grpc: Decompressor is not installed for grpc-encoding %.*q", echoMax, l.encoding))
		return
	}
	m := c.server.services.methods[l.path]
	if m == nil {
		c.failLocked(s, c.client.Status(ErrUnknownMethod))
		return
	}
	md, err := l.metadata()
	if err != nil {
		c.abortLocked(s, httpBadRequest, status.New(codes.Internal, err.Error()))
		return
	}
	k := &call{conn: c, stream: s, method: m}
	k.changed.L = &c.mu
	s.call = k
	k.setContext(md)
	c.woke = true
	c.handlers.Add(1)
	c.server.goroutines.Go(func() {
		defer c.handlers.Done()
		k.end(m.handle(k))
	})
}

// setContext makes the handler's context. It ends with the stream, or at the deadline.
func (k *call) setContext(md metadata.MD) {
	ctx := grpc.NewContextWithServerTransportStream(metadata.NewIncomingContext(k.conn.callContext(), md), transportStream{k})
	if k.stream.deadline.IsZero() {
		k.ctx, k.cancel = context.WithCancel(ctx)
		return
	}
	k.ctx, k.cancel = context.WithDeadline(ctx, k.stream.deadline)
	k.late = context.AfterFunc(k.ctx, k.wake)
}

// callContext has what the contexts of all calls of the connection have in common.
func (c *Conn) callContext() context.Context {
	if c.calls == nil {
		p := &grpcpeer.Peer{Addr: c.raw.RemoteAddr(), LocalAddr: c.raw.LocalAddr()}
		if state := c.TLS(); state != nil {
			p.AuthInfo = credentials.TLSInfo{
				State: *state, CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
			}
		}
		c.calls = context.WithValue(grpcpeer.NewContext(context.Background(), p), clientKey{}, c.client)
	}
	return c.calls
}

// Context implements grpc.ServerStream.
func (k *call) Context() context.Context { return k.ctx }

func (k *call) wake() {
	k.conn.mu.Lock()
	k.changed.Broadcast()
	k.conn.mu.Unlock()
}

// removedLocked tells the handler that its stream has ended.
func (k *call) removedLocked() {
	k.stopLocked()
	k.dropLocked()
	k.changed.Broadcast()
}

func (k *call) stopLocked() {
	if k.late != nil {
		k.late()
	}
	k.cancel()
}

// endedLocked is why nothing can be received or sent any more, or nil.
func (k *call) endedLocked() error {
	if k.failed != nil {
		return k.failed
	}
	if k.stream.gone || k.returned || k.late != nil && k.ctx.Err() != nil {
		return status.FromContextError(k.reasonLocked()).Err()
	}
	return nil
}

func (k *call) reasonLocked() error {
	if err := k.ctx.Err(); err != nil {
		return err
	}
	return context.Canceled
}

// fail ends the stream with an error of receiving or sending, unless it has ended. What the handler
// returns later is dropped. The status comes after what was sent: within a message, clients of gRPC would
// not look at it. After its deadline the client waits for neither.
func (k *call) fail(err error) error {
	st := status.Convert(err)
	k.conn.mu.Lock()
	defer k.conn.mu.Unlock()
	switch {
	case k.stream.gone || k.returned || k.failed != nil:
		return st.Err()
	case k.stream.pending.bytes == 0 || k.endedLocked() != nil:
		k.conn.failLocked(k.stream, st)
	default:
		k.failed = st.Err()
		k.dropLocked()
		k.stopLocked()
		k.changed.Broadcast()
		k.conn.endWithLocked(k.stream, st, k.trailer)
		k.conn.queueLocked(k.stream)
	}
	k.conn.flushSoonLocked()
	return st.Err()
}

// end sends the end of the answer, after what was sent.
func (k *call) end(err error) {
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err)
	}
	c, s := k.conn, k.stream
	c.mu.Lock()
	defer c.mu.Unlock()
	k.dropLocked()
	k.releaseLocked()
	k.returned = true
	k.stopLocked()
	k.changed.Broadcast()
	if s.gone {
		c.closeStreamLocked()
		c.drainedLocked()
		return
	}
	if k.failed != nil { // its status is on its way
		return
	}
	if st.Code() == codes.OK && len(k.trailer) == 0 {
		k.sendHeaderLocked(nil)
		s.last = true // with the usual trailers
	} else {
		if !s.answered && (st.Code() == codes.OK || len(k.header) > 0) {
			k.sendHeaderLocked(nil)
		}
		c.endWithLocked(s, st, k.trailer)
	}
	c.queueLocked(s)
	c.flushSoonLocked()
}

// abortLocked refuses a request that is no request of gRPC.
func (c *Conn) abortLocked(s *stream, code string, st *status.Status) {
	s.answered = true
	block := appendLiteral(c.encoder.begin(nil), ":status", code)
	block = appendContentType(block, 0)
	c.sendBlockLocked(s, appendStatus(block, st), true)
	c.removeLocked(s)
}

const contentTypeGRPC = "application/grpc"

// deadlineLocked sets the deadline that the client has sent. It reports false if the stream has ended
// because of it.
func (c *Conn) deadlineLocked(s *stream, timeout string) bool {
	if timeout == "" {
		return true
	}
	d, ok := parseTimeout(timeout)
	if !ok {
		c.abortLocked(s, httpBadRequest, status.New(codes.Internal, fmt.Sprintf("malformed grpc-timeout: %.*q", echoMax, timeout)))
		return false
	}
	s.deadline = time.Now().Add(d)
	return true
}
