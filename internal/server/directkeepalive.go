package server

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// directKeepAlives is a stream of keep-alives of the direct transport: the goroutine that reads the
// connection executes them, and sends the answers of a burst with one system call. A keep-alive that
// waits, for the end of a revocation or for a commit, loses the reader role like any request.
type directKeepAlives struct {
	server  *Server
	conn    *connection
	request transport.Request
	start   time.Duration
	ctx     context.Context // ends with the stream
	cancel  context.CancelFunc
	origin  origin
	ended   atomic.Bool
	access  access
	limiter *auth.Limiter             // of the user; it counts the open stream
	noted   atomic.Pointer[auditNote] // its note, until the stream is reported

	keepAliveMessages // of the goroutine that executes messages
}

// keepAliveMessages are a keep-alive and its answer, which are used again.
type keepAliveMessages struct {
	in   pb.KeepAliveRequest
	out  pb.KeepAliveResponse
	slab []pb.LeaseAlive
	ttls []time.Duration
}

// keptIDsMax bounds what a stream keeps between messages: about 100 bytes an id, 4 KiB with all.
const keptIDsMax = 32

// idBytesMax is the longest encoding of an id.
const idBytesMax = 11

func (c *directClient) openKeepAlives(r transport.Request, l *auth.Limiter) directStream {
	k := &directKeepAlives{
		server: c.server, conn: c.connection, request: r, limiter: l, start: c.server.clock.now(), origin: origin{traceparent: r.Traceparent()},
	}
	k.access = access{gate: &c.server.gate, conn: c.connection, header: r.Authorization()}
	if deadline := r.Deadline(); deadline.IsZero() {
		k.ctx, k.cancel = context.WithCancel(c.ctx)
	} else {
		k.ctx, k.cancel = context.WithDeadline(c.ctx, deadline)
	}
	return k
}

// keepAliveRow is what keep-alives need.
var keepAliveRow = rpcRows[pb.LeaseService_KeepAlive_FullMethodName]

// Execute implements transport.Messages.
func (k *directKeepAlives) Execute(_ transport.Lane, message []byte) bool {
	if k.ended.Load() {
		return false
	}
	if len(message) > leaseListMax*idBytesMax { // it would be decoded before it is refused
		k.noteCaller()
		k.end(k.server.failed(telemetry.MethodKeepAlive, errTooManyIDs))
		return false
	}
	if err := k.decode(message); err != nil {
		k.noteCaller()
		k.end(status.Newf(codes.Internal, "%v: %v", errDecode, err))
		return false
	}
	err := k.access.check(keepAliveRow, &k.in)
	if k.server.observer.audit.log != nil && k.access.note == nil {
		err = k.note(err)
	}
	if err == nil {
		err = k.access.take(len(message))
	}
	if err == nil {
		err = k.keepAlive(k.ctx, k.server)
	}
	if err != nil {
		k.end(k.server.failed(telemetry.MethodKeepAlive, err))
		return false
	}
	held, err := k.server.admission.charge(k.conn, k.out.SizeVT(), false)
	if err != nil { // the leases have been kept alive
		k.end(k.server.failed(telemetry.MethodKeepAlive, err))
		return false
	}
	var release func()
	if held != nil {
		release = held.release
	}
	sent := k.request.Send(&k.out, release)
	if len(k.in.Ids) > keptIDsMax || len(message) > keptIDsMax*idBytesMax { // with fields that are not known
		k.keepAliveMessages = keepAliveMessages{}
	}
	return sent
}

// noteCaller keeps the user for the audit line of a stream whose first message is refused before its rights are checked.
func (k *directKeepAlives) noteCaller() {
	if k.server.observer.audit.log == nil || k.access.note != nil {
		return
	}
	k.in.Ids = k.in.Ids[:0]
	n := &auditNote{denied: isDenial(k.access.check(keepAliveRow, &k.in))}
	n.user = k.access.userName() // known after the check
	k.access.note = n
	k.noted.Store(n)
}

// note keeps what the audit log says of the stream, which may end meanwhile.
func (k *directKeepAlives) note(refused error) (err error) {
	s := k.server
	k.access.note, err = s.noteRequest(k.ctx, &k.access, keepAliveRow.class, keepAliveRow, &k.in, refused)
	k.noted.Store(k.access.note)
	if k.ended.Load() {
		if n := k.noted.Swap(nil); n != nil {
			s.observer.audit.log.Release(n.admitted)
		}
	}
	return err
}

// decode decodes a message into the one before.
func (m *keepAliveMessages) decode(message []byte) error {
	ids := m.in.Ids[:0]
	m.in.Reset() // of unknown fields, too: the generated decoder adds those of each message to those before
	m.in.Ids = ids
	return m.in.UnmarshalVT(message)
}

// keepAlive begins the leases of the request anew, and fills the answer.
func (m *keepAliveMessages) keepAlive(ctx context.Context, s *Server) error {
	n := len(m.in.Ids)
	if n > leaseListMax {
		return errTooManyIDs
	}
	m.size(n)
	if err := s.leases.KeepAliveAll(ctx, m.in.Ids, m.ttls); err != nil {
		return err
	}
	for i, id := range m.in.Ids {
		m.slab[i].Id, m.slab[i].TtlMs = id, uint64(m.ttls[i].Milliseconds())
	}
	return nil
}

// size makes room for the answer of n leases.
func (m *keepAliveMessages) size(n int) {
	if n > len(m.slab) {
		m.slab, m.ttls = make([]pb.LeaseAlive, n), make([]time.Duration, n)
		m.out.Leases = make([]*pb.LeaseAlive, n)
		for i := range m.slab {
			m.out.Leases[i] = &m.slab[i]
		}
	}
	m.ttls, m.out.Leases = m.ttls[:n], m.out.Leases[:n]
}

// End implements transport.Messages.
func (k *directKeepAlives) End(st *status.Status) { k.end(st) }

// drain implements directStream.
func (k *directKeepAlives) drain() { k.end(statusOf(errShuttingDown)) }

// trim implements directStream: keptIDsMax bounds what the stream keeps.
func (*directKeepAlives) trim() {}

func (k *directKeepAlives) end(st *status.Status) {
	if k.server.direct.streams.take(k.request) != nil {
		k.request.EndStream(st)
		k.request.FlushAside() // a drain ends those of all clients
		k.observe(st.Code())
	}
}

// observe implements directStream.
func (k *directKeepAlives) observe(code codes.Code) {
	k.ended.Store(true)
	k.cancel()
	k.limiter.Close(auth.Streams)
	k.server.counters.streams.Add(-1)
	k.server.ended(k.conn, &requestEnd{method: telemetry.MethodKeepAlive, code: code, start: k.start, origin: k.origin}, &details{note: k.noted.Swap(nil)})
}
