package server

import (
	"bufio"
	"context"

	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/proto"

	"github.com/epochkv/epochkv/internal/transport"
)

// libraryStream is a stream of the gRPC library that a handler serves. The library says neither when it has decoded a message, except by windows of 64
// KiB, nor when it has sent one. So the handler says what it received and what it is going to send, and the frames say what was sent. A nil one does nothing.
type libraryStream struct {
	conn *countedConn
	id   uint32
	room chan struct{} // a token for the sender that waits

	tooMany bool // there was no room for the stream when it began: it is refused

	// Guarded by the connection's mutex.
	ended  bool
	timed  bool // see requireProgress
	waits  bool
	unsent int64 // bytes that the handler has sent, and the library has not
	cost   int64 // of them, with what a message takes beside its bytes
}

const (
	// unsentMax is how much the streams of a connection may have unsent before each of them waits until it has no more than unsentLeast. The direct
	// transport does the same.
	unsentMax   = 64 << 10
	unsentLeast = 4 << 10
	// unsentMessage is what the library takes for a message beside its bytes.
	unsentMessage = 256
)

// libraryConn is a connection as the gRPC library reads it: it knows the frame that was read last. The library has no buffer of its own to read from.
type libraryConn struct {
	*countedConn
	buffered *bufio.Reader
	at       frames
	yielder  transport.Yielder
}

// frameBytes is how many bytes count as a frame.
const frameBytes = 512

func newLibraryConn(c *countedConn) *libraryConn {
	l := &libraryConn{countedConn: c, buffered: bufio.NewReaderSize(c, readBufBytes), at: frames{skip: prefaceBytes}}
	c.info.library = l
	return l
}

// Read implements net.Conn.
func (l *libraryConn) Read(b []byte) (int, error) {
	n, err := l.buffered.Read(b)
	per, count := frameBytes, 0
	if kind := l.at.kind(); kind == frameHeaders || kind == frameContinued {
		per = transport.HeaderBytes
	}
	if n < len(b) { // over TLS, a record may have a byte
		count = 1
	}
	for rest := b[:n]; len(rest) > 0; {
		var begins bool
		if rest, begins = l.at.next(rest); begins {
			l.at.skip = l.at.length()
			count++
		}
	}
	l.yielder.Did(count + n/per)
	return n, err
}

type libraryKey struct{}

// beginLibraryStream is called by the library when it has read the headers of a stream, and no more. What has no stream ended meanwhile.
func beginLibraryStream(ctx context.Context, _ *tap.Info) (context.Context, error) {
	c := connectionOf(ctx)
	if c == nil || c.library == nil {
		return ctx, nil
	}
	if s := c.library.begin(c.library.at.stream()); s != nil {
		ctx = context.WithValue(ctx, libraryKey{}, s)
	}
	return ctx, nil
}

func libraryStreamOf(ctx context.Context) *libraryStream {
	s, _ := ctx.Value(libraryKey{}).(*libraryStream)
	return s
}

func (c *countedConn) begin(id uint32) *libraryStream {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inbound == nil {
		return nil
	}
	s := &libraryStream{conn: c, id: id, room: make(chan struct{}, 1)}
	if !c.inbound.change(id, func(m *receivedStream) { m.library, s.tooMany = s, m.tooMany }) {
		return nil
	}
	return s
}

// took says that the handler has received a message of so many bytes.
func (s *libraryStream) took(bytes int) {
	if s == nil {
		return
	}
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	if in := s.conn.inbound; in != nil {
		in.took(s.id, int64(bytes))
	}
}

// dropped says that the handler keeps nothing of the messages that it has received.
func (s *libraryStream) dropped() {
	if s == nil {
		return
	}
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	if in := s.conn.inbound; in != nil {
		in.change(s.id, in.drop)
	}
}

// messageDropped says that the handler with this context keeps nothing of the message that it received last, before it waits for its client: otherwise
// the client could keep the room of others by not taking what it is sent. No other goroutine may receive meanwhile: see transport.Dropped.
func messageDropped(ctx context.Context) {
	transport.Dropped(ctx)
	libraryStreamOf(ctx).dropped()
}

// tookAll says that the handler has received all that the client has sent.
func (s *libraryStream) tookAll() {
	if s == nil {
		return
	}
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	if in := s.conn.inbound; in != nil {
		in.change(s.id, in.takeAll)
	}
}

// sends says that the handler is going to send a message, once there is room for it.
func (s *libraryStream) sends(ctx context.Context, message any) error {
	if s == nil {
		return nil
	}
	for !s.take(encodedBytes(message)) {
		select {
		case <-s.room:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
	return nil
}

func encodedBytes(message any) int64 {
	switch m := message.(type) {
	case encoder:
		return int64(m.SizeVT()) + grpcPrefixBytes
	case proto.Message:
		return int64(proto.Size(m)) + grpcPrefixBytes
	}
	return grpcPrefixBytes
}

// take counts a message, or reports that it has to wait.
func (s *libraryStream) take(bytes int64) bool {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	in := s.conn.inbound
	if in == nil || s.ended {
		return true
	}
	if s.waits = in.unsent > unsentMax && s.cost > unsentLeast; s.waits {
		return false
	}
	s.unsent += bytes
	s.cost += bytes + unsentMessage
	in.unsent += bytes + unsentMessage
	return true
}

// requireProgress lets a client that takes nothing of what the stream has unsent lose its connection; see unread.
func (s *libraryStream) requireProgress() {
	if s != nil {
		s.conn.mu.Lock()
		defer s.conn.mu.Unlock()
		s.timed = true
	}
}

// timed is what those streams have unsent that require progress.
func (in *inbound) timed() (bytes int64) {
	for _, m := range in.open {
		if m.library != nil && m.library.timed {
			bytes += m.library.unsent
		}
	}
	return bytes
}

// sent counts bytes that the library has sent.
func (s *libraryStream) sent(in *inbound, bytes int64) {
	if s == nil || bytes == 0 || s.unsent == 0 {
		return
	}
	bytes = min(bytes, s.unsent)
	cost := s.cost
	if bytes < s.unsent {
		cost = bytes * cost / s.unsent
	}
	s.unsent -= bytes
	s.leave(in, cost)
}

// end forgets what was not sent.
func (s *libraryStream) end(in *inbound) {
	if s != nil {
		s.ended = true
		s.leave(in, s.cost)
	}
}

func (s *libraryStream) leave(in *inbound, cost int64) {
	s.cost -= cost
	in.unsent -= cost
	if s.waits && (s.ended || s.cost <= unsentLeast) {
		s.waits = false
		select {
		case s.room <- struct{}{}:
		default: // the token of a sender that has gone
		}
	}
}
