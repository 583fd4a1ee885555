package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/transport"
)

// The functions in this file check the requests that handlers serve, on both transports. What the direct transport executes
// itself is checked by lane, directPipeline and directKeepAlives.

// beginUnary makes the access of a unary request whose message has not been decoded, and refuses callers that are not known.
// While users are not checked it does nothing, but for requests that may last until they are.
func (s *Server) beginUnary(ctx context.Context, row *rpcRow) (context.Context, *access, error) {
	if !s.gates() && (row == nil || !row.lasts) {
		return ctx, nil, nil
	}
	a := s.newAccess(ctx)
	if err := a.check(row, nil); err != nil {
		return ctx, nil, s.refuse(ctx, a, row, err)
	}
	return withAccess(ctx, a), a, nil
}

// checkMessage checks a message that was decoded. An error is a status.
func (s *Server) checkMessage(ctx context.Context, a *access, row *rpcRow, request any) error {
	if a == nil {
		if !s.gates() {
			return nil
		}
		a = s.newAccess(ctx) // users are checked since a moment
	}
	err := a.check(row, request)
	if err == nil {
		err = a.takeMessage(request)
	}
	if s.observer.audit.log != nil && a.note == nil && row != nil {
		a.note, err = s.noteRequest(ctx, a, row.class, row, request, err)
		if err == nil && row.class == audit.ClassAdmin { // it may have waited for room; what reads, and what commits, is checked later
			err = a.again()
		}
	}
	if err != nil {
		s.admission.decoding.end(request)
		return s.refuse(ctx, a, row, err)
	}
	return nil
}

// checkAgain checks a unary request again if the users have changed since.
func (s *Server) checkAgain(ctx context.Context) error { return s.gate.checkAgain(accessOf(ctx)) }

// holdMessage counts a message without operations, which takes so many bytes, until it is released, which the caller does when the request has ended.
// Nothing else counts it, and the request may wait as long as its client likes: for a lock, for a change of users, or for the client. So it has a
// share of its own, and no large slot. That of a keep-alive is not counted: leases would end if it were refused.
func (s *Server) holdMessage(ctx context.Context, request any, bytes int) (release func(), err error) {
	conn := connectionOf(ctx)
	if _, keeps := request.(*pb.KeepAliveRequest); keeps || bytes < countedBytesMin || conn == nil || carriesOperations(request) {
		return nothingHeld, nil
	}
	if _, admitted := methodOf(request); admitted {
		return nothingHeld, nil
	}
	if !s.admission.add(conn, shareMessages, admissionOne+uint64(bytes), bytes) {
		s.admission.refused.Add(1)
		return nothingHeld, errOverloaded
	}
	return func() { s.admission.leave(conn, shareMessages, bytes) }, nil
}

func nothingHeld() {}

// takeMessage counts a message among those of the user.
func (a *access) takeMessage(request any) error {
	if a.limiter() == nil {
		return nil
	}
	size := 0
	if m, ok := request.(interface{ SizeVT() int }); ok {
		size = m.SizeVT()
	}
	return a.take(size)
}

// refuse counts a request that is refused, and returns the status.
func (s *Server) refuse(ctx context.Context, a *access, row *rpcRow, err error) error {
	if s.observer.audit.log != nil && a.note == nil && row != nil {
		a.note, _ = s.noteRequest(ctx, a, row.class, row, nil, err) // it is refused anyway
	}
	st := statusOf(err)
	s.endedRow(ctx, a, row, st.Code(), s.clock.now())
	return st.Err()
}

// endedRow reports the end of a request that its handler does not report.
func (s *Server) endedRow(ctx context.Context, a *access, row *rpcRow, code codes.Code, start time.Duration) {
	if row == nil {
		return
	}
	end := requestEnd{method: row.counts, code: code, start: start, origin: origin{ctx: ctx}}
	if row.rare {
		end.row = row
	}
	s.ended(connectionOf(ctx), &end, a.details(nil))
}

// details adds the note of a request that a handler serves to its details, which may be nil.
func (a *access) details(d *details) *details {
	if a == nil || a.note == nil {
		return d
	}
	if d == nil {
		d = new(details)
	}
	d.note = a.note
	return d
}

// openStreamsMax is how many streams of methods that every client may call a connection has at once while users are checked. A client that is not
// known could otherwise take all streams that all connections share, with streams that watch the health for ever.
const openStreamsMax = 16

// enterOpen counts a stream of such a method, or refuses it. After nil the caller calls leave.
func (s *Server) enterOpen(ctx context.Context, row *rpcRow) (leave func(), err error) {
	conn := connectionOf(ctx)
	if row == nil || !row.open || row.sender || conn == nil || s.gate.table.Load() == nil {
		return func() {}, nil
	}
	if conn.opens.Add(1) > openStreamsMax {
		conn.opens.Add(-1)
		s.admission.refused.Add(1)
		return nil, errTooManyStreams
	}
	return func() { conn.opens.Add(-1) }, nil
}

// reflectionsMax bounds the streams of reflection that are open at once. Every client may open them, and their answers, each of up to some
// ten KiB, count nowhere.
const reflectionsMax = 64

// serveGated serves a stream with its access in its context.
func (s *Server) serveGated(srv any, stream grpc.ServerStream, path string, handler grpc.StreamHandler) error {
	row := rpcRows[path]
	ctx := stream.Context()
	a := s.newAccess(ctx)
	if err := a.check(row, nil); err != nil {
		return s.refuse(ctx, a, row, err)
	}
	end, err := s.enterStream(ctx, path)
	if err != nil {
		return s.refuse(ctx, a, row, err)
	}
	defer end()
	if l := a.limiter(); l != nil {
		if err := l.Open(auth.Streams); err != nil {
			return s.refuse(ctx, a, row, err)
		}
		defer l.Close(auth.Streams)
	}
	leave, err := s.enterOpen(ctx, row)
	if err != nil {
		return s.refuse(ctx, a, row, err)
	}
	defer leave()
	if row != nil && row.reflects {
		defer s.reflections.Add(-1)
		if s.reflections.Add(1) > reflectionsMax {
			return s.refuse(ctx, a, row, errTooManyStreams)
		}
	}
	g := &gatedStream{ServerStream: stream, server: s, row: row, access: a, ctx: context.WithValue(ctx, accessKey{}, a), library: libraryStreamOf(ctx)}
	g.held.release = nothingHeld
	defer g.held.end()
	defer messageDropped(g.ctx) // the client may not take the answers before the status
	return handler(srv, g)
}

// gatedStream checks the messages of a stream, unless its handler does.
type gatedStream struct {
	grpc.ServerStream
	server  *Server
	row     *rpcRow
	access  *access
	ctx     context.Context
	held    heldMessage
	yielder transport.Yielder

	library *libraryStream // nil with the direct transport

	received streamMessage
}

// Context implements grpc.ServerStream.
func (g *gatedStream) Context() context.Context { return g.ctx }

// RecvMsg implements grpc.ServerStream.
func (g *gatedStream) RecvMsg(m any) error {
	g.received = streamMessage{ctx: g.ctx, request: m}
	err := g.ServerStream.RecvMsg(&g.received)
	g.yielder.Did(transport.MessageFrames + g.received.bytes/frameBytes)
	gaveUp := g.received.gaveUp
	if err == nil || g.received.bytes > 0 {
		g.library.took(g.received.bytes)
	}
	if err != nil && g.received.bytes > 0 { // the codec has refused it
		g.library.dropped()
	}
	g.received = streamMessage{} // the message is its receiver's
	if gaveUp != nil {
		return gaveUp.Err()
	}
	if err != nil || g.row == nil || g.row.itself || g.row.open {
		return err
	}
	err = g.server.checkMessage(g.ctx, g.access, g.row, m)
	if sized, ours := m.(encoder); err == nil && ours {
		release, err := g.server.holdMessage(g.ctx, m, sized.SizeVT())
		if err != nil {
			return g.server.refuse(g.ctx, g.access, g.row, err)
		}
		g.held.replace(release)
	}
	return err
}

// heldMessage is the message that a stream has received last. A goroutine of the handler may receive one more when the handler has returned.
type heldMessage struct {
	mu      sync.Mutex // a leaf
	release func()
	ended   bool
}

// replace releases the message before.
func (h *heldMessage) replace(release func()) {
	h.mu.Lock()
	if !h.ended {
		release, h.release = h.release, release
	}
	h.mu.Unlock()
	release()
}

// end releases the last message, and those that come.
func (h *heldMessage) end() {
	h.mu.Lock()
	h.ended = true
	h.mu.Unlock()
	h.release()
}

// SendMsg implements grpc.ServerStream.
func (g *gatedStream) SendMsg(m any) error {
	if err := g.library.sends(g.ctx, m); err != nil {
		return err
	}
	return g.ServerStream.SendMsg(m)
}
