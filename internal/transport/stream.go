package transport

import (
	"context"
	"encoding/binary"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// stream is an open stream. It is the context of its request. The connection's mutex guards what
// changes, but for the message, which the reader role guards.
type stream struct {
	conn     *Conn
	id       uint32
	fast     int       // number of the fast method; 0 if it is a call
	call     *call     // nil if fast
	messages *messages // nil unless it is a fast stream of messages

	deadline      time.Time // zero: none
	authorization string    // of the metadata
	traceparent   string    // the same
	receiving
	sending
	cancellation
	message   message
	gone      bool    // the stream has ended, or was reset
	uncounted bool    // OpenStream has refused it
	next      *stream // in the connection's list of free streams
}

// receiving is a stream's side that the client sends on.
type receiving struct {
	recvWindow int       // what the client may still send
	untaken    int       // bytes taken and not yet told
	recvEnded  bool      // the client has ended its side
	gained     int       // bytes received or sent since moved
	moved      time.Time // when the stream last made progress, as of the checks; zero: since the last one
}

// sending is a stream's side that the server sends on.
type sending struct {
	sendWindow int
	answered   bool // headers have been sent
	pending    pending
	trailers   []byte // header block that ends the stream after pending; nil: status OK, empty: none
	last       bool   // the stream ends after pending
	queued     bool   // the stream is in the connection's queue of senders
}

// cancellation is the stream as a context.
type cancellation struct {
	done  chan struct{}
	timer *time.Timer // of the deadline; nil while done is
	err   error       // why the stream was cancelled; set before done is closed
}

// message is the message of a fast request, while it is received. Its bytes are kept only if they
// come in several frames.
type message struct {
	body     []byte // prefix included
	before   int    // bytes that were taken from its array since that was new, or more
	reserved int    // what Receive has admitted
	waiting  int    // what Receive has admitted for other messages of a stream, which wait to be taken
}

// append appends what has come of the message.
func (m *message) append(payload []byte) {
	all := 0
	if m.reserved > 0 {
		all = grpcPrefixBytes + m.reserved
	}
	m.body = appendPart(m.body, payload, all)
}

// appendPart appends what has come of a message that takes so many bytes in all; 0 is not known. Once an eighth of a message has come, its buffer has
// room for all of it, and for the beginning of the next in the same frame, and does not grow any more: it would be in memory twice meanwhile.
func appendPart(b, payload []byte, all int) []byte {
	if n := len(b) + len(payload); n > cap(b) && n <= all && n >= all/8 {
		b = append(make([]byte, 0, all+min(all/8, framePayloadMax)), b...)
	}
	return append(b, payload...)
}

// ownArray is what remains of what has come, after so many bytes that were taken before it. If its array is much larger, it gets its own: a client could have a
// byte of the next message follow each large one, and nothing counts the array. It copies less than was taken, and of small messages in one frame next to
// nothing.
func ownArray(rest []byte, before *int) []byte {
	switch array := *before + cap(rest); {
	case len(rest) == 0:
		rest = nil
	case array > 2*len(rest)+framePayloadMax:
		rest = slices.Clone(rest)
	default:
		return rest
	}
	*before = 0
	return rest
}

// Deadline implements context.Context.
func (s *stream) Deadline() (time.Time, bool) { return s.deadline, !s.deadline.IsZero() }

// Done implements context.Context. Most requests never ask for it, so the channel and the timer are
// made when they do.
func (s *stream) Done() <-chan struct{} {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.done == nil {
		s.done = make(chan struct{})
		if s.err == nil && s.gone {
			s.err = context.Canceled
		}
		if s.err != nil {
			close(s.done)
		} else if !s.deadline.IsZero() {
			id := s.id
			s.timer = time.AfterFunc(time.Until(s.deadline), func() {
				c.mu.Lock()
				defer c.mu.Unlock()
				if s.id == id {
					s.cancelLocked(context.DeadlineExceeded)
				}
			})
		}
	}
	return s.done
}

// Err implements context.Context.
func (s *stream) Err() error {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	if s.err == nil && !s.deadline.IsZero() && !time.Now().Before(s.deadline) {
		s.cancelLocked(context.DeadlineExceeded)
	}
	return s.err
}

// Value implements context.Context.
func (s *stream) Value(key any) any {
	if key == (clientKey{}) {
		return s.conn.client
	}
	return nil
}

type clientKey struct{}

// ClientOf is the client of a request's connection, or nil.
func ClientOf(ctx context.Context) Client {
	c, _ := ctx.Value(clientKey{}).(Client)
	return c
}

func (s *stream) cancelLocked(err error) {
	if s.err == nil {
		s.err = err
		if s.done != nil {
			close(s.done)
		}
	}
}

// Context ends when the client cancels the request, its deadline passes, or the connection ends. It
// must not be used after the request was answered.
func (r Request) Context() context.Context { return r.stream }

// Method is the number of the request's method.
func (r Request) Method() int { return r.stream.fast }

// Authorization is the field of that name in the request's metadata.
func (r Request) Authorization() string { return r.stream.authorization }

// Traceparent is the field of that name in the request's metadata.
func (r Request) Traceparent() string { return r.stream.traceparent }

// Deadline is when the client stops waiting, or zero.
func (r Request) Deadline() time.Time { return r.stream.deadline }

// newStreamLocked makes a stream, or takes a free one.
func (c *Conn) newStreamLocked(id uint32) *stream {
	s := c.free
	if s == nil {
		s = new(stream)
	} else {
		c.free = s.next
		c.freeBytes -= s.keptBytes()
	}
	*s = stream{conn: c, id: id, message: message{body: s.message.body[:0]}, sending: sending{sendWindow: c.streamWindow}}
	s.recvWindow = c.server.options.StreamWindow
	c.streams[id] = s
	c.streamsMost = max(c.streamsMost, len(c.streams))
	return s
}

// removeLocked ends a stream that was answered or reset.
func (c *Conn) removeLocked(s *stream) {
	if s.gone {
		return
	}
	s.gone = true
	c.pending -= s.pending.bytes
	delete(c.streams, s.id)
	if s.call != nil {
		s.call.removedLocked()
	}
	small := s.pending.small
	s.pending.drop()
	if s.queued {
		c.senders = slices.DeleteFunc(c.senders, func(other *stream) bool { return other == s })
		s.queued = false
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	c.endMessage(&s.message)
	if s.messages != nil {
		c.dropMessagesLocked(s)
		c.countUnsentLocked(-small)
	}
	if !s.recvEnded && !s.conn.ended { // the client may send more: it must not, and is not waited for
		c.out.buf = AppendReset(c.out.buf, s.id, http2.ErrCodeNo)
	}
	if !s.uncounted && (s.call == nil || s.call.returned) {
		c.closeStreamLocked()
	}
	c.freeLocked(s)
	c.drainedLocked()
}

// freeBytesMax is how much the free streams of a connection take: nothing counts them, and a client may have had as many as there may be.
const freeBytesMax = 64 << 10

// keptBytes is what a free stream takes.
func (s *stream) keptBytes() int { return int(unsafe.Sizeof(*s)) + cap(s.message.body) }

// freeLocked keeps a stream that nothing refers to any more, except for requests that know its id.
//
// A request that was cancelled may still be executed, so its stream is left to the collector.
func (c *Conn) freeLocked(s *stream) {
	if s.err != nil || s.done != nil || s.call != nil || s.messages != nil || !s.recvEnded || c.freeBytes+s.keptBytes() > freeBytesMax {
		return
	}
	s.id, s.authorization, s.traceparent, s.trailers, s.next = 0, "", "", nil, c.free
	c.free = s
	c.freeBytes += s.keptBytes()
}

// endMessage gives back what a message has reserved.
func (c *Conn) endMessage(m *message) {
	if m.reserved > 0 {
		c.client.Received(m.reserved)
		m.reserved = 0
	}
}

// waitingStep is how much Receive is asked about at a time for messages that wait on a stream.
const waitingStep = 16 << 10

// countWaitingLocked asks Receive about what has come on a stream and was not taken, but for receivedBytesMin of it and the message whose
// size Receive has admitted; or gives it back. All windows together may be far more than there is room for. It fails for more bytes only.
func (c *Conn) countWaitingLocked(s *stream, bytes int) error {
	m, n := &s.message, bytes-receivedBytesMin
	for ; n > m.waiting; m.waiting += waitingStep {
		if err := c.client.Receive(waitingStep); err != nil {
			return err
		}
	}
	for ; m.waiting > 0 && (bytes == 0 || m.waiting-n >= 2*waitingStep); m.waiting -= waitingStep {
		c.client.Received(waitingStep)
	}
	return nil
}

// cancelStreamLocked ends a stream that the client has reset, or whose connection has ended.
func (c *Conn) cancelStreamLocked(s *stream, err error) {
	s.recvEnded = true
	s.cancelLocked(err)
	if s.fast != 0 && (!s.answered || s.messages != nil) {
		c.client.Cancelled(Request{conn: c, stream: s, id: s.id})
	}
	c.removeLocked(s)
}

// receive takes the payload of a data frame of a fast stream. It returns the message when the
// request is complete.
func (c *Conn) receive(s *stream, payload []byte, end bool) (complete []byte, st *status.Status) {
	m := &s.message
	if end && len(m.body) == 0 {
		complete = payload // the usual case
	} else {
		m.append(payload)
		complete = m.body
	}
	if len(complete) >= grpcPrefixBytes {
		length := int(binary.BigEndian.Uint32(complete[1:]))
		if st := c.admitMessage(s, length); st != nil {
			return nil, st
		}
		if len(complete) > grpcPrefixBytes+length {
			return nil, status.New(codes.Internal, "the request has more than one message")
		}
		if end && len(complete) == grpcPrefixBytes+length {
			if complete[0] != 0 {
				return nil, statusCompressed()
			}
			return complete[grpcPrefixBytes:], nil
		}
	}
	if end {
		return nil, status.New(codes.Internal, "the request ended before its message")
	}
	return nil, nil
}

// admitMessage admits a message whose prefix has arrived, once. It returns the status of a refusal.
func (c *Conn) admitMessage(s *stream, length int) *status.Status {
	m := &s.message
	if m.reserved > 0 || length < receivedBytesMin {
		return nil
	}
	if err := c.client.Receive(length); err != nil {
		if s.messages != nil && s.messages.count > 0 {
			err = &LaterError{Cause: err}
		}
		return c.client.Status(err)
	}
	m.reserved = length
	return nil
}

// statusCompressed ends a request with a compressed message and no encoding in its metadata.
func statusCompressed() *status.Status {
	return status.New(codes.Internal, "the message is compressed, and grpc-encoding does not say how")
}

// receivedBytesMin is the smallest message that Receive is asked about. Smaller ones are bounded by
// the number of streams.
const receivedBytesMin = 4 << 10
