package transport

import (
	"context"
	"math/rand/v2"
	"time"

	"golang.org/x/net/http2"
)

// liveness is what the checks know of a connection. The connection's mutex guards it.
type liveness struct {
	now        time.Time // of the last check
	started    time.Time
	handshaken bool
	aged       time.Time // when the connection is old; zero: never

	reads   uint64    // frames that had been read at the last sign of life
	written uint64    // bytes that had been written then, and the ping
	signAt  time.Time // when that was
	pinged  bool      // the client has been asked since

	taking  takes // of answers
	writing takes // of the bytes that are being written to the socket

	pingAt      time.Time // the client's last ping
	answered    bool      // something of an answer has been sent since
	pingStrikes int       // pings that came too early
}

// progressBytes is how much of a message must arrive within the progress timeout, if it does not
// end before.
const progressBytes = 256 << 10

// pingStrikesMax is how often a client may ping too early before it loses its connection.
const pingStrikesMax = 2

// AgePart divides Options.MaxAge: by that part ages differ, so that clients which have connected together do not do so again, and
// in that part an old connection may end what is under way.
const AgePart = 10

func (l *liveness) init(now time.Time, maxAge time.Duration) {
	l.now, l.started, l.signAt, l.taking.at, l.writing.at = now, now, now, now, now
	if maxAge > 0 {
		l.aged = now.Add(maxAge - rand.N(maxAge/AgePart+1))
	}
}

// allowsPing counts a ping of the client. An answer since the one before excuses it: clients
// measure round trips while they receive.
func (l *liveness) allowsPing(now time.Time, interval time.Duration) bool {
	if !l.answered && now.Sub(l.pingAt) < interval {
		l.pingStrikes++
	} else {
		l.pingStrikes = 0
	}
	l.pingAt, l.answered = now, false
	return l.pingStrikes <= pingStrikesMax
}

// takes watches whether a client takes what waits for it.
type takes struct {
	written uint64    // bytes that had been written at the time
	at      time.Time // of the last progress
}

// proceeds reports whether the client has taken so many bytes within the timeout, or there was
// nothing to take.
func (t *takes) proceeds(now time.Time, waits bool, written, least uint64, timeout time.Duration) bool {
	if !waits || written-t.written >= least {
		t.written, t.at = written, now
	}
	return now.Sub(t.at) <= timeout
}

// takesLocked reports whether the client takes what waits for it. Whatever else it sends, no write to the socket
// may last for ever: the goroutine that writes may be that of a handler, with all that the handler has.
func (c *Conn) takesLocked(now time.Time) bool {
	l, written, timeout := &c.liveness, c.out.written, c.server.options.ProgressTimeout
	answers := l.taking.proceeds(now, c.waitsLocked(), written, progressBytes, timeout) && !c.client.Overdue()
	socket := l.writing.proceeds(now, c.out.writing > 0, written, 1, timeout)
	return answers && socket
}

// waitsLocked reports whether answers of fast requests, those of calls that RequireProgress names, or the socket wait for the client.
func (c *Conn) waitsLocked() bool {
	if c.out.writing+len(c.out.buf) >= outMax {
		return true
	}
	for _, s := range c.streams {
		if (s.call == nil || s.call.mustProgress) && s.pending.bytes > 0 {
			return true
		}
	}
	return false
}

// quietReads frames between two checks are so few that it costs nothing to make again what a connection keeps to be used again, and which
// its largest burst has grown.
const quietReads = 1000

// shrinkLocked gives back what a connection keeps to be used again, also if it has streams, which may be idle, too.
func (c *Conn) shrinkLocked() {
	if c.out.flushing || len(c.out.buf) > 0 || len(c.senders) > 0 {
		return
	}
	c.out.buf, c.out.spare, c.senders, c.free, c.freeBytes = nil, nil, nil, nil, 0
	if c.streamsMost > 0 && c.open == 0 && len(c.streams) == 0 {
		c.streams, c.streamsMost = map[uint32]*stream{}, 0 // a map never gets smaller
	}
}

// silenceLocked is why a client that does not answer pings loses its connection.
func (c *Conn) silenceLocked() error {
	if c.halfFrame.Load() {
		return errHalfFrame
	}
	return errSilent
}

// drainPingTimeout is how long a client that drains may take to answer the ping.
const drainPingTimeout = time.Second

// check ends what has not proceeded for too long.
func (c *Conn) check(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, o := &c.liveness, &c.server.options
	l.now = now
	if c.ended {
		return
	}
	if !l.handshaken && now.Sub(l.started) > o.HandshakeTimeout {
		c.endLocked(errHandshake)
		return
	}
	if !c.takesLocked(now) {
		c.endLocked(ErrUnread)
		return
	}
	reads := c.reads.Load()
	quiet := reads-l.reads < quietReads
	if reads != l.reads || c.out.written > l.written {
		l.reads, l.written, l.signAt, l.pinged = reads, c.out.written, now, false
	}
	switch silence := now.Sub(l.signAt); {
	case l.pinged && silence > o.KeepaliveTime+o.KeepaliveTimeout:
		c.endLocked(c.silenceLocked())
		return
	case !l.pinged && silence > o.KeepaliveTime:
		l.pinged = true
		c.out.buf = appendPing(c.out.buf, keepalivePing)
		l.written += pingFrameBytes // to write them is no sign of life, and they may never be written
	}
	if quiet {
		c.shrinkLocked()
	}
	if !l.aged.IsZero() && now.After(l.aged) {
		c.drainLocked(now, "the connection is old; connect again")
		if now.Sub(l.aged) > o.MaxAge/AgePart {
			c.endLocked(errAge)
			return
		}
	}
	if c.draining && now.Sub(c.drainAt) > drainPingTimeout {
		c.goAwayLocked()
	}
	for _, s := range c.streams {
		c.checkStreamLocked(s, now)
	}
	if len(c.out.buf) > 0 && !c.out.flushing {
		c.server.goroutines.Go(c.flush)
	}
}

func (c *Conn) checkStreamLocked(s *stream, now time.Time) {
	sends := s.pending.bytes > 0 && (s.call != nil || s.messages != nil) && s.last // a handler that has not returned decides itself
	// A client that has no window cannot send; but it may itself keep the connection's window, and no others wait for that.
	receives := s.incomplete() && (s.recvWindow > 0 && c.connWindow > 0 || c.client.IsWanted(s.declared()))
	switch {
	case s.fast != 0 && (receives || s.messages != nil) && !s.deadline.IsZero() && !now.Before(s.deadline):
		c.failLocked(s, c.client.Status(context.DeadlineExceeded))
	case !sends && !receives || s.moved.IsZero():
		s.moved, s.gained = now, 0
	case now.Sub(s.moved) <= c.server.options.ProgressTimeout:
	case sends:
		c.resetLocked(s, http2.ErrCodeCancel)
	case s.call != nil:
		s.call.refuseRestLocked(c.client.Status(s.call.incompleteError()))
	case s.messages != nil:
		err := ErrIncomplete
		if s.messages.count > 0 {
			err = &LaterError{Cause: err}
		}
		c.refuseMessageLocked(s, c.client.Status(err))
		c.resumeLocked(s)
	default:
		c.failLocked(s, c.client.Status(ErrIncomplete))
	}
}

// incomplete reports whether the client must send more: the rest of a message or, until the server
// has answered, the end of its request.
func (s *stream) incomplete() bool {
	if s.recvEnded {
		return false
	}
	if s.messages != nil {
		return len(s.message.body) > 0 && !s.messages.busy && !s.messages.held && !s.messages.full
	}
	return s.call != nil && s.call.refused == nil && (!s.answered || s.call.within()) || s.call == nil && !s.answered
}

// progressLocked counts bytes that have arrived, or were sent.
func (s *stream) progressLocked(bytes int) {
	if s.gained += bytes; s.gained >= progressBytes && s.gained >= s.leastProgress() && (s.call == nil || !s.call.restLimited) {
		s.gained, s.moved = 0, time.Time{}
	}
}

// leastProgress is how much must arrive, or be sent, within the progress timeout.
func (s *stream) leastProgress() int { return s.conn.client.LeastProgress(s.declared()) }

// declared is what Receive has admitted for the message at hand.
func (s *stream) declared() int {
	if s.call != nil {
		return s.call.reserved
	}
	return s.message.reserved
}
