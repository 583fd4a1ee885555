package transport

import (
	"cmp"
	"encoding/binary"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// messages is the receiving side of a fast stream of messages. The reader executes a message as
// soon as it is complete. While a message is executed that has cost the reader its role, and while
// too much waits to be sent or answered, complete messages wait in the stream's body, and the
// client's window with them. The connection's mutex guards it.
type messages struct {
	service Messages
	busy    bool           // a goroutine executes messages
	within  bool           // a message is being executed
	resumed bool           // Resume was called meanwhile
	held    bool           // the service has asked for a pause, until Resume
	full    bool           // too much waits to be sent
	ended   bool           // End has been called
	failed  *status.Status // why the next message cannot be taken; nothing that follows is executed
	count   int            // messages that were executed
	widened int            // bytes at the begin of the body that the client's window no longer counts
}

const (
	// pendingMax is how many bytes of a stream of messages wait for its windows before no more messages
	// are executed; and how many bytes all streams of a connection may have waiting before
	// pendingLeast is in force.
	pendingMax = 64 << 10
	// pendingLeast is pendingMax beside much else that waits for the windows of the connection. Messages
	// that are smaller are counted by nothing but the number of streams: with 64 KiB for each of
	// thousands of streams, clients that take nothing had gigabytes.
	pendingLeast = 4 << 10
)

// pendingMaxLocked is how many bytes of small messages a stream may have waiting now.
func (c *Conn) pendingMaxLocked() int {
	if c.pending > pendingMax {
		return pendingLeast
	}
	return pendingMax
}

// messagesLocked takes the payload of a data frame. It returns what is to be executed.
func (c *Conn) messagesLocked(s *stream, payload []byte) execution {
	m := s.messages
	if m.failed != nil {
		c.takenLocked(len(payload))
		return execution{}
	}
	if m.busy || m.held || m.full || s.err != nil || len(s.message.body) > 0 || !isWhole(payload) {
		s.message.append(payload)
		payload = nil
		c.countMessagesLocked(s)
	}
	if m.busy || m.held || m.full {
		return execution{}
	}
	m.busy, m.within = true, payload != nil
	return execution{request: Request{conn: c, stream: s, id: s.id}, message: payload, messages: true}
}

// countMessagesLocked counts the messages that wait, or refuses them.
func (c *Conn) countMessagesLocked(s *stream) {
	err := c.countWaitingLocked(s, len(s.message.body)-s.message.reserved)
	if err == nil {
		return
	}
	if s.messages.count > 0 || s.messages.busy {
		err = &LaterError{Cause: err}
	}
	c.refuseMessageLocked(s, c.client.Status(err))
}

// isWhole reports whether b is one message.
func isWhole(b []byte) bool {
	return len(b) >= grpcPrefixBytes && b[0] == 0 && len(b) == grpcPrefixBytes+int(binary.BigEndian.Uint32(b[1:]))
}

// executeMessages executes a message, unless it is nil, and all that are complete after it.
func (c *Conn) executeMessages(l Lane, s *stream, whole []byte) {
	m, reserved := s.messages, 0
	var yielder Yielder
	sent := time.Time{} // long ago: whole may take long, and what is ready is sent after it
	if whole == nil {
		sent = time.Now()
	}
	for {
		if whole == nil {
			c.mu.Lock()
			if whole, reserved = c.nextMessageLocked(s); whole == nil {
				m.busy = false
				end := (s.recvEnded || m.failed != nil) && !m.ended && !m.held && !m.full && !s.gone
				m.ended = m.ended || end
				st := m.failed
				c.mu.Unlock()
				if end {
					m.service.End(cmp.Or(st, statusOK))
				}
				return
			}
			sent = c.sendDueLocked(sent)
			c.mu.Unlock()
		}
		more := m.service.Execute(l, whole[grpcPrefixBytes:])
		if reserved > 0 {
			c.client.Received(reserved)
			reserved = 0
		}
		c.mu.Lock()
		m.count++
		m.held = !more && !m.resumed
		m.within, m.resumed = false, false
		m.full = s.pending.bytes > c.pendingMaxLocked()
		c.consumedLocked(s, len(whole))
		c.mu.Unlock()
		whole = nil
		yielder.Did(MessageFrames)
	}
}

// sendDueLocked sends what is ready before a message that was waiting is executed, if it has not done so for long. The goroutine that reads may have
// nothing to read, and the rest of the messages may take seconds.
func (c *Conn) sendDueLocked(sent time.Time) time.Time {
	now := time.Now()
	if now.Sub(sent) < c.server.options.HandOverAfter {
		return sent
	}
	if len(c.out.buf)+len(c.senders) > 0 {
		c.flushAsideLocked()
	}
	return now
}

// consumedLocked counts bytes that have been executed, and were not counted when they came.
func (c *Conn) consumedLocked(s *stream, n int) {
	counted := min(s.messages.widened, n)
	s.messages.widened -= counted
	c.takenLocked(n - counted)
	c.widenLocked(s, n-counted)
}

// dropMessagesLocked drops what has come and will not be executed, and lets the client send as much
// on other streams.
func (c *Conn) dropMessagesLocked(s *stream) {
	m, n := s.messages, len(s.message.body)
	if !m.within { // otherwise they are bytes of the message that is executed
		n -= m.widened
		m.widened = 0
	}
	c.takenLocked(n)
	s.message.body = nil
	c.countMessagesLocked(s)
}

// nextMessageLocked takes the next message, if it is complete and may be executed, and what is
// reserved for it.
func (c *Conn) nextMessageLocked(s *stream) (whole []byte, reserved int) {
	m, body := s.messages, s.message.body
	if m.held || m.full || s.gone {
		return nil, 0
	}
	if s.err != nil { // the deadline has passed while a message was executed
		c.failLocked(s, c.client.Status(s.err))
		return nil, 0
	}
	if len(body) >= grpcPrefixBytes {
		n := grpcPrefixBytes + int(binary.BigEndian.Uint32(body[1:]))
		switch {
		case body[0] != 0:
			c.refuseMessageLocked(s, statusCompressed())
			return nil, 0
		case len(body) >= n:
			reserved, s.message.reserved = s.message.reserved, 0
			m.within = true
			s.message.before += n
			s.message.body = ownArray(body[n:], &s.message.before)
			c.countMessagesLocked(s)
			return body[:n:n], reserved
		}
		if st := c.admitMessage(s, n-grpcPrefixBytes); st != nil {
			c.refuseMessageLocked(s, st)
			return nil, 0
		}
	}
	if s.recvEnded && len(body) > 0 {
		c.refuseMessageLocked(s, status.New(codes.Internal, "the stream ended within a message"))
		return nil, 0
	}
	// The rest must come, whatever the window.
	c.takenLocked(len(body) - m.widened)
	c.widenLocked(s, len(body)-m.widened)
	m.widened = len(body)
	return nil, 0
}

var statusOK = status.New(codes.OK, "")

// refuseMessageLocked ends the receiving side of a stream whose next message cannot be taken. The service ends the stream,
// after the answers to what it has executed, which its client may not take.
func (c *Conn) refuseMessageLocked(s *stream, st *status.Status) {
	s.messages.failed = st
	c.endMessage(&s.message)
	c.dropMessagesLocked(s)
}

// Resume ends the pause that Messages.Execute has asked for.
func (r Request) Resume() {
	c := r.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	s := r.stream
	if s.id != r.id || s.messages == nil {
		return
	}
	if m := s.messages; m.within { // which is about to ask for the pause
		m.resumed = true
	} else {
		m.held = false
		c.resumeLocked(s)
	}
}

// resumeLocked goes on executing messages that wait, in a goroutine of its own.
func (c *Conn) resumeLocked(s *stream) {
	m := s.messages
	if m.busy || m.held || m.full || s.gone || len(s.message.body) == 0 && (!s.recvEnded && m.failed == nil || m.ended) {
		return
	}
	m.busy = true
	c.beside.Add(1)
	c.server.goroutines.Go(func() {
		lane := laneHolder{client: c.client}
		c.executeMessages(lane.take(), s, nil)
		lane.rest()
		c.beside.Add(-1)
		c.flush()
	})
}

// Send sends a message on a stream of messages. Release is as for Answer. It reports false if no
// client waits for it.
func (r Request) Send(msg Message, release func()) bool {
	c, s, size := r.conn, r.stream, msg.SizeVT()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !r.streamsLocked() {
		if release != nil {
			release()
		}
		return false
	}
	b := c.out.buf
	if !s.answered {
		b = c.answerHeadersLocked(b, s)
	}
	n := grpcPrefixBytes + size
	if direct := s.pending.bytes == 0 && n <= min(s.sendWindow, c.sendWindow, smallAnswerMax) && len(b) < outMax; direct {
		b = AppendFrameHeader(b, n, 0, 0, s.id)
		from := len(b)
		b = grow(b, n)
		encodeMessage(b[from:], msg)
		s.sendWindow -= n
		c.sendWindow -= n
		c.out.buf, c.liveness.answered = b, true
		if release != nil {
			release()
		}
		return true
	}
	c.out.buf = b
	if release != nil {
		b = make([]byte, n)
		s.pending.push(b, release)
	} else {
		b = s.pending.extend(n)
		c.countUnsentLocked(n)
	}
	encodeMessage(b, msg)
	c.pending += n
	c.queueLocked(s)
	return true
}

// countUnsentLocked counts more, or fewer, bytes of small messages that streams of messages have.
func (c *Conn) countUnsentLocked(more int) {
	if more != 0 {
		c.unsent += more
		c.client.Unsent(c.unsent)
	}
}

// encodeMessage fills b with a message and its prefix. Encoding messages of the generated code does not fail.
func encodeMessage(b []byte, m Message) {
	putPrefix(b, len(b)-grpcPrefixBytes)
	_, _ = m.MarshalToSizedBufferVT(b[grpcPrefixBytes:])
}

// EndStream ends a stream of messages with a status, after what was sent.
func (r Request) EndStream(st *status.Status) {
	c, s := r.conn, r.stream
	c.mu.Lock()
	defer c.mu.Unlock()
	if !r.streamsLocked() {
		return
	}
	if !s.answered {
		c.out.buf = c.answerHeadersLocked(c.out.buf, s)
	}
	if st.Code() != codes.OK {
		s.trailers = appendStatus(nil, st)
	}
	s.last = true
	s.moved, s.gained = time.Time{}, 0 // from now on its client has to take what was sent
	c.queueLocked(s)
}

// streamsLocked reports whether messages can be sent.
func (r Request) streamsLocked() bool {
	s := r.stream
	return s.id == r.id && !s.gone && !s.last && !r.conn.ended
}
