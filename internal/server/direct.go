package server

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// The direct transport (package transport) executes unary requests, pipelines and keep-alives in the
// goroutine that reads their connection. The files direct*.go connect it with admission, executors and
// metrics; other streams, and all that is unusual, are served by the same handlers as with gRPC's own
// transport.

// directMethods are the methods that the direct transport executes, by number less one.
var directMethods = []telemetry.Method{
	telemetry.MethodGet, telemetry.MethodPut, telemetry.MethodDelete, telemetry.MethodBatchGet, telemetry.MethodBatchWrite,
	telemetry.MethodDeleteRange, telemetry.MethodInvoke, telemetry.MethodInvokeAll, telemetry.MethodExecute, telemetry.MethodPipeline,
	telemetry.MethodKeepAlive,
}

// directPaths are their numbers by path.
var directPaths = func() map[string]int {
	paths := map[string]int{}
	for i, m := range directMethods {
		service := pb.KVService_ServiceDesc.ServiceName
		switch m { //nolint:exhaustive // most are of KVService
		case telemetry.MethodExecute:
			service = pb.TransactionService_ServiceDesc.ServiceName
		case telemetry.MethodKeepAlive:
			service = pb.LeaseService_ServiceDesc.ServiceName
		}
		paths["/"+service+"/"+m.String()] = i + 1
	}
	return paths
}()

// directRows are what they need, in the same order.
var directRows = func() []*rpcRow {
	rows := make([]*rpcRow, len(directMethods))
	for path, number := range directPaths {
		rows[number-1] = rpcRows[path]
	}
	return rows
}()

// directInputs are their requests, in the same order.
var directInputs = func() []protoreflect.MessageDescriptor {
	inputs := make([]protoreflect.MessageDescriptor, len(directMethods))
	for path, number := range directPaths {
		name := strings.ReplaceAll(strings.TrimPrefix(path, "/"), "/", ".")
		if d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name)); err == nil {
			inputs[number-1] = d.(protoreflect.MethodDescriptor).Input() //nolint:forcetypeassert // a path names a method
		}
	}
	return inputs
}()

// directServer is the direct transport's part of a server. It is empty with gRPC's own transport.
type directServer struct {
	transport *transport.Server
	lanes     sync.Pool // of *lane
	streams   directStreams
	readers   workers
}

// handOverAfter is how long a request holds up the other requests of its connection at most, or twice
// as long. Tests change it.
var handOverAfter = time.Millisecond

// newDirect makes the direct transport, which serves all other methods through their handlers.
func (s *Server) newDirect() *transport.Services {
	services := &transport.Services{
		Codec: s.codec(), Buffers: pb.Buffers, MessageBytesMax: answerBytesMax, Receives: s.largestMessage, Unary: s.unary,
	}
	s.direct.readers.goroutines = &s.drain.receivers
	s.direct.lanes.New = func() any { return &lane{server: s, getOut: new(pb.GetResponse)} }
	s.direct.transport = transport.New(transport.Options{
		TLS:              s.endpoints.tls.grpc,
		Streams:          min(s.config.Limits.Streams, s.receiving.streamsOfOne()),
		StreamWindow:     streamWindowBytes,
		ConnWindow:       connWindowBytes,
		HeaderBytes:      headerBytesMax,
		HandshakeTimeout: handshakeTimeout,
		MaxAge:           s.config.TLS.MaxConnectionAge,
		KeepaliveTime:    keepaliveParams.Time,
		KeepaliveTimeout: keepaliveParams.Timeout,
		PingInterval:     keepaliveClientMin,
		HandOverAfter:    handOverAfter,
		ProgressTimeout:  s.config.MessageTimeout,
		AcceptFailed:     s.acceptFailed,
	}, (*directService)(s), services)
	return services
}

// largestMessage is how large a message to a method may be. To the methods that clients may call which are not known the messages are small: what a
// client declares counts as being received, and must not take the room of others before the client is known.
func (s *Server) largestMessage(path string) int {
	row := rpcRows[path]
	switch {
	case path == pb.KVService_BulkLoad_FullMethodName:
		return bulkMessageMax(&s.config)
	case row == nil || !row.open:
		return messageBytesMax(&s.config)
	case row.sender:
		return s.codec().plainMessageMax()
	}
	return openMessageMax
}

// drain returns when no request of the direct transport is left, or those that are have been cut off
// because ctx ended.
func (d *directServer) drain(ctx context.Context) {
	d.streams.drain()
	_ = d.transport.Drain(ctx) // Close cuts off the rest
	d.transport.Close()
}

// directService implements transport.Service.
type directService Server

// Connect implements transport.Service.
func (s *directService) Connect(tc *transport.Conn) transport.Client {
	conn := s.connections.admit(tc.RemoteAddr())
	if conn == nil {
		return nil
	}
	conn.tls = tc.TLS()
	c := &directClient{server: (*Server)(s), connection: conn, conn: tc, claim: claim{client: conn.client()}}
	c.ctx, c.cancel = context.WithCancel(peer.NewContext(context.Background(), &peer.Peer{Addr: tc.RemoteAddr(), AuthInfo: conn})) // as that of a request
	return c
}

// directClient is a connection of the direct transport. It implements transport.Client.
type directClient struct {
	*connection
	server *Server
	conn   *transport.Conn
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	acks   directAcks
	unsent int64 // what the transport has of small answers, as waitingAnswers knows; guarded by the mutex of conn

	mu           sync.Mutex // a leaf; guards what follows
	claim        claim      // to the place beside the share of large messages
	large, small int64      // bytes reserved for messages that are being received
	streamsOpen  int64
	beyond       int64 // of them, beyond what is reserved; see receiving.beyond
}

// Fast implements transport.Client.
func (c *directClient) Fast(path string) int { return directPaths[path] }

// OpenStream implements transport.Client. A caller that is not known gets no further. An operator must get through.
func (c *directClient) OpenStream(path, authorization string) error {
	if err := c.server.gate.admit(c.connection, path, authorization); err != nil {
		c.server.auditStreamless(c.peer(), path, err)
		return err
	}
	if !c.takeStream(forOperators(path)) {
		c.server.admission.refused.Add(1)
		c.server.auditStreamless(c.peer(), path, errTooManyStreams)
		return errTooManyStreams
	}
	return nil
}

// takeStream reserves what one more open stream needs, and reports whether there is that much, or it is an operator's.
func (c *directClient) takeStream(operator bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streamsOpen++
	if (c.countStreams() || operator) && c.countBeyond() {
		return true
	}
	c.streamsOpen--
	return false
}

// CloseStream implements transport.Client.
func (c *directClient) CloseStream() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streamsOpen--
	c.countStreams()
	c.countBeyond()
}

// countStreams reserves what the open streams need, and reports whether there is that much.
func (c *directClient) countStreams() bool {
	return c.server.receiving.countStreams(c.streams, c.streamsOpen)
}

// countBeyond counts the open streams for which nothing is reserved, and reports whether there may be as many.
func (c *directClient) countBeyond() bool {
	return c.server.receiving.countBeyond(&c.beyond, max(0, c.streamsOpen-config.StreamsOwn-c.streams.used))
}

// Receive implements transport.Client.
func (c *directClient) Receive(bytes int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if most := messageBytesMax(&c.server.config); bytes > most {
		return &mvcc.LimitError{What: "batch bytes", Limit: most, Got: bytes}
	}
	var admitted bool
	r := &c.server.receiving
	if bytes >= receivedBytesMin {
		_, admitted = r.addLarge(&c.large, c.streams.of(ownedLarge), c, &c.claim, int64(bytes), 0)
	} else {
		admitted = r.small.add(&c.small, c.streams.of(ownedSmall), int64(bytes))
	}
	if !admitted {
		r.refused.Add(1)
		return errOverloaded
	}
	return nil
}

// Received implements transport.Client.
func (c *directClient) Received(bytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch r := &c.server.receiving; {
	case bytes < receivedBytesMin:
		r.small.release(&c.small, c.streams.of(ownedSmall), int64(bytes))
	case !r.beside.leave(c, int64(bytes)):
		r.large.release(&c.large, c.streams.of(ownedLarge), int64(bytes))
	}
}

// Unsent implements transport.Client.
func (c *directClient) Unsent(bytes int) {
	c.server.admission.waiting.count(c.owns(ownedWaiting), &c.unsent, int64(bytes))
}

// LeastProgress implements transport.Client.
func (c *directClient) LeastProgress(bytes int) int {
	r := &c.server.receiving
	return int(r.progress(int64(bytes), r.beside.holds(c, int64(bytes))))
}

// IsWanted implements transport.Client.
func (c *directClient) IsWanted(bytes int) bool {
	return c.server.receiving.isWanted(c.server.receiving.beside.holds(c, int64(bytes)))
}

// Status implements transport.Client.
func (c *directClient) Status(err error) *status.Status {
	later := errors.As(err, new(*transport.LaterError))
	if errors.Is(err, transport.ErrIncomplete) {
		err = errIncomplete
	}
	if errors.Is(err, transport.ErrMetadata) {
		err = errMetadata
	}
	if errors.Is(err, transport.ErrUnknownMethod) {
		err = errUnimplemented
	}
	if large, ok := errors.AsType[*transport.TooLargeError](err); ok {
		err = &mvcc.LimitError{What: "batch bytes", Limit: large.Most, Got: large.Got}
	}
	if later {
		err = &laterMessageError{cause: err}
	}
	return statusOf(err)
}

// Cancelled implements transport.Client.
func (c *directClient) Cancelled(r transport.Request) {
	method := directMethods[r.Method()-1]
	if method != telemetry.MethodPipeline && method != telemetry.MethodKeepAlive {
		c.acks.cancel(c, r)
		return
	}
	if s := c.server.direct.streams.take(r); s != nil {
		s.observe(codes.Canceled)
	} // otherwise it has ended with a status that its client does not wait for
	if method == telemetry.MethodPipeline {
		c.server.drain.receivers.Go(func() { c.acks.cancel(c, r) }) // a pipeline's mutex comes before the connection's
	}
}

// Closed implements transport.Client.
func (c *directClient) Closed(cause error) {
	c.report(cause)
	c.acks.close()
	c.server.connections.release(c.connection)
	c.server.receiving.beside.forget(&c.claim)
	c.cancel()
}

// report counts and logs the end of a connection that the server has ended because of its client.
func (c *directClient) report(cause error) {
	kind, ok := transport.ViolationOf(cause)
	switch s, peer := c.server, c.conn.RemoteAddr().String(); {
	case !ok:
	case kind == transport.ViolationUnread:
		s.connections.violated(&s.log, kind, unreadAnswers, cause, "peer", peer, "bytes", c.waitingBytes(), "message_timeout", s.config.MessageTimeout)
	default:
		s.connections.violated(&s.log, kind, "a connection is closed because of what its client sent", cause, "peer", peer)
	}
}

// Overdue implements transport.Client.
func (c *directClient) Overdue() bool {
	return c.isOverdue(&c.server.admission, 0)
}

// HeadersRefused implements transport.Client.
func (c *directClient) HeadersRefused(bytes int) {
	s := c.server
	s.connections.violated(&s.log, transport.ViolationHeaderList, "a request is refused because its metadata is too large", errMetadata,
		"peer", c.conn.RemoteAddr().String(), "bytes", bytes)
}

// Lane implements transport.Client.
func (c *directClient) Lane() transport.Lane {
	l := c.server.direct.lanes.Get().(*lane)
	l.client = c
	return l
}
