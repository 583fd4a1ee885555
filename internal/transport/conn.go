package transport

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
)

// Conn is a connection.
type Conn struct {
	server *Server
	raw    net.Conn
	client Client

	reader // of the holder of the reader role

	// role is even while the holder of the reader role reads, and odd while it executes a request. It
	// grows with each request. See watchdog.
	role    atomic.Uint64
	watched atomic.Bool   // the watchdog has the connection in its list
	reads   atomic.Uint64 // frames read
	beside  atomic.Int64  // goroutines that execute requests without the reader role

	halfFrame atomic.Bool // the reader waits for the rest of a frame

	mu sync.Mutex // after the server's; before a Client's own locks; guards what follows
	streamTable
	windows
	phase
	out      output
	encoder  answerEncoder
	senders  []*stream // that may send, in turn
	liveness liveness

	handlers sync.WaitGroup // of calls
}

// reader is the state of reading a connection.
type reader struct {
	in         input
	headers    headers
	control    controlCount
	emptyData  int  // empty data frames since the last other frame
	handshaken bool // the client's first settings have come
	crowded    bool // the output was full when the newest data frame, or header block, was read
}

// streamTable is the streams of a connection.
type streamTable struct {
	streams    map[uint32]*stream
	free       *stream
	freeBytes  int    // that the free streams take
	lastStream uint32 // newest stream that the client has opened
	open       int    // streams, and handlers of calls that have not returned

	callMessages uint64          // messages that calls have taken
	calls        context.Context // what the contexts of all calls have in common; nil before the first
	woke         bool            // the burst at hand has woken handlers: the reader lets them run, and then flushes

	streamsMost int // that were in the map at once
}

// windows are what a connection may receive and send.
type windows struct {
	connWindow   int // what the client may still send on the connection
	untaken      int // bytes taken and not yet told
	sendWindow   int // what the server may still send on the connection
	streamWindow int // the first window of a stream that the server sends on
	pending      int // bytes that all streams have pending
	unsent       int // of them, small messages of streams of messages; see Client.Unsent
	framePayload int // the largest that the client takes
}

// phase is where a connection is on its way to its end.
type phase struct {
	draining bool      // no new streams
	drainAt  time.Time // since when
	goneAway bool      // the last GOAWAY has been sent
	closing  bool      // end when everything is sent

	halfClosed bool // nothing is sent any more
	ended      bool
	cause      error // of the end
}

const (
	windowMax    = math.MaxInt32 // HTTP/2's
	firstWindow  = 65535         // HTTP/2's default
	emptyDataMax = 1_000

	// burstMax is how many requests are executed before answers are sent although more requests have come, so
	// that a client with a single connection works on answers while the server works on requests.
	burstMax = 32
)

var (
	errAllSent = errors.New("transport: everything is sent")
	errPreface = errors.New("transport: the connection does not begin with the HTTP/2 preface")
)

func newConn(t *Server, raw net.Conn) *Conn {
	c := &Conn{server: t, raw: raw}
	c.streams = map[uint32]*stream{}
	c.windows = windows{connWindow: t.options.ConnWindow, sendWindow: firstWindow, streamWindow: firstWindow, framePayload: framePayloadMax}
	c.in.init(raw)
	c.headers.init(t.options.HeaderBytes)
	c.out.room.L = &c.mu
	c.liveness.init(time.Now(), t.options.MaxAge)
	c.control.since = c.liveness.started
	c.greet()
	return c
}

// RemoteAddr is the client's address.
func (c *Conn) RemoteAddr() net.Addr { return c.raw.RemoteAddr() }

// TLS is the state of a connection over TLS; nil in plain text.
func (c *Conn) TLS() *tls.ConnectionState {
	if s, ok := c.raw.(interface{ ConnectionState() tls.ConnectionState }); ok {
		state := s.ConnectionState()
		return &state
	}
	return nil
}

// greet puts what a server sends first into the output. It precedes everything else, also a GOAWAY of a server that stops.
func (c *Conn) greet() {
	o := &c.server.options
	c.out.buf = appendSettings(c.out.buf,
		http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: uint32(o.Streams)},
		http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(o.StreamWindow)},
		http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: uint32(o.HeaderBytes)})
	if more := o.ConnWindow - firstWindow; more > 0 {
		c.out.buf = appendWindow(c.out.buf, 0, more)
	}
}

// start begins the connection, and serves it until it ends or the reader role is taken.
func (c *Conn) start() {
	c.flush()
	for {
		complete, ok := c.in.preface()
		if !ok {
			c.close(errPreface)
			return
		}
		if complete {
			break
		}
		if err := c.in.fill(); err != nil {
			c.close(err)
			return
		}
	}
	c.serve()
}

// serve has the reader role until the connection ends or the role is taken.
func (c *Conn) serve() {
	lane := laneHolder{client: c.client}
	defer lane.rest()
	var yielder Yielder
	for executed := 0; ; {
		f, complete, err := c.in.next()
		frames := 1
		if complete {
			if f.kind != http2.FrameData {
				frames += len(f.payload) / HeaderBytes
			}
			var work execution
			if work, err = c.handle(f); err == nil && work.request.stream != nil {
				if !c.execute(lane.take(), work) {
					c.flush()
					return // another goroutine has the role
				}
				executed++
			}
		}
		if err == nil && (!complete || c.crowded || executed == burstMax) {
			c.crowded, executed = false, 0
			lane.rest()
			if !c.rest() {
				c.close(errAllSent)
				return
			}
		}
		if err == nil {
			yielder.Did(frames)
		}
		if err == nil && !complete {
			if half := c.in.r < c.in.w; half != c.halfFrame.Load() {
				c.halfFrame.Store(half)
			}
			err = c.in.fill()
		}
		if err != nil {
			c.fail(err)
			return
		}
	}
}

// rest sends the answers of a burst, or of a part of it. It reports false if the connection has ended.
func (c *Conn) rest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.woke {
		c.mu.Unlock()
		runtime.Gosched() // so that answers of handlers that need not wait share the system call
		c.mu.Lock()
		c.woke = false
	}
	if c.sendsMuchLocked() {
		c.flushAsideLocked()
	} else if !c.out.flushing {
		c.flushLocked()
	}
	return c.waitRoomLocked()
}

// laneHolder has a lane from the first request of a burst to its end.
type laneHolder struct {
	client Client
	lane   Lane
}

func (h *laneHolder) take() Lane {
	if h.lane == nil {
		h.lane = h.client.Lane()
	}
	return h.lane
}

func (h *laneHolder) rest() {
	if h.lane != nil {
		h.lane.Rest()
		h.lane = nil
	}
}

// execution is a complete request.
type execution struct {
	request  Request
	message  []byte // not nil, unless there are messages to be found in the stream
	reserved int    // what Receive has admitted for it
	messages bool   // of a stream
}

// execute executes a request. It reports whether the goroutine still has the reader role.
func (c *Conn) execute(l Lane, w execution) bool {
	c.control.frames = 0
	role := c.role.Load() + 1
	c.role.Store(role) // before the look at watched: the watchdog stores watched and then looks at the role
	if !c.watched.Load() {
		c.server.watchdog.watch(c)
	}
	if w.messages {
		c.executeMessages(l, w.request.stream, w.message)
	} else {
		l.Execute(w.request, w.message)
	}
	if w.reserved > 0 {
		c.client.Received(w.reserved)
	}
	if c.role.CompareAndSwap(role, role+1) {
		return true
	}
	c.beside.Add(-1)
	return false
}

// fail ends the connection for an error of reading or of the client.
func (c *Conn) fail(err error) {
	var e connError
	if errors.As(err, &e) {
		c.mu.Lock()
		if c.cause == nil { // before it is told: meanwhile the last stream may end, and the connection with it
			c.cause = err
		}
		c.out.buf = appendGoAway(c.out.buf, c.lastStream, e.code, e.text)
		c.draining, c.goneAway = true, true
		for end := c.out.written + uint64(c.out.writing+len(c.out.buf)); c.out.flushing && c.out.written < end && !c.ended; {
			c.out.room.Wait()
		}
		if !c.out.flushing {
			c.flushLocked()
		}
		c.halfClosed = true
		c.mu.Unlock()
		linger(c.raw)
	}
	c.close(err)
}

// lingerTime is how long a client that has been told everything may take to close the connection.
const lingerTime = 500 * time.Millisecond

// linger reads what still comes, for a moment: closing a socket with unread bytes resets the
// connection, and the client might lose what was sent last.
func linger(raw net.Conn) {
	const bytesMax = 1 << 20
	if closeWrite(raw) == nil && raw.SetReadDeadline(time.Now().Add(lingerTime)) == nil {
		_, _ = io.CopyN(io.Discard, YieldingConn{raw}, bytesMax) // whatever ends it, the connection is closed next
	}
}

// halfCloseLocked closes the sending side of a connection on which everything is sent. The reader
// reads on, for a moment, for the reason that linger has.
func (c *Conn) halfCloseLocked() {
	if c.halfClosed = true; c.cause == nil {
		c.cause = errAllSent
	}
	c.mu.Unlock()
	err := closeWrite(c.raw)
	if err == nil {
		err = c.raw.SetReadDeadline(time.Now().Add(lingerTime))
	}
	c.mu.Lock()
	if err != nil {
		c.endLocked(errAllSent)
	}
}

// close ends the connection at once.
func (c *Conn) close(err error) {
	c.mu.Lock()
	c.endLocked(err)
	c.mu.Unlock()
}

func (c *Conn) endLocked(err error) {
	if c.ended {
		return
	}
	c.ended = true
	if c.cause == nil {
		c.cause = err
	}
	c.client.Closed(c.cause)
	for _, s := range c.streams {
		c.cancelStreamLocked(s, context.Canceled)
	}
	c.out.buf, c.out.spare = nil, nil
	c.out.room.Broadcast()
	_ = c.raw.Close()
	c.server.goroutines.Go(func() { // the server's mutex comes before the connection's
		c.handlers.Wait()
		c.server.remove(c)
	})
}

// drain tells the client to open no more streams: first in advance, so that streams which are on
// their way are still served, and then with the number of the last one.
func (c *Conn) drain() {
	c.mu.Lock()
	c.drainLocked(time.Now(), "draining")
	c.mu.Unlock()
	c.flush()
}

func (c *Conn) drainLocked(now time.Time, reason string) {
	if !c.draining {
		c.draining, c.drainAt = true, now
		c.out.buf = appendGoAway(c.out.buf, windowMax, http2.ErrCodeNo, reason)
		c.out.buf = appendPing(c.out.buf, drainPing)
	}
}

// goAwayLocked ends the time in which streams are still taken.
func (c *Conn) goAwayLocked() {
	if c.draining && !c.goneAway {
		c.goneAway = true
		c.out.buf = appendGoAway(c.out.buf, c.lastStream, http2.ErrCodeNo, "draining")
		c.drainedLocked()
	}
}

// drainedLocked ends a connection that drains and has no more streams.
func (c *Conn) drainedLocked() {
	if c.goneAway && c.open == 0 && len(c.streams) == 0 && !c.closing {
		c.closing = true
		if !c.out.flushing {
			c.server.goroutines.Go(c.flush)
		}
	}
}

func (c *Conn) closeStreamLocked() {
	c.open--
	c.client.CloseStream()
}

// The payloads of the server's pings.
const (
	drainPing     = 1
	keepalivePing = 2

	pingFrameBytes = frameHeaderBytes + 8
)

func appendPing(b []byte, payload uint64) []byte {
	b = AppendFrameHeader(b, 8, http2.FramePing, 0, 0)
	return binary.BigEndian.AppendUint64(b, payload)
}
