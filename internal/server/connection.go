package server

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// connection is what the server knows of one client connection. It travels as the connection's
// AuthInfo, which is how gRPC hands per-connection state to handlers without a stats handler (and a
// stats handler costs allocations per message).
type connection struct {
	credentials.CommonAuthInfo
	shard   *telemetry.Shard
	refused bool // over the limit: its requests are told so, instead of being cut off without a word

	refusals refusals // by the follower of its frames

	scansMu sync.Mutex // a leaf; guards what follows
	scans   map[*openScan]struct{}
	closed  bool

	held [shareAnswers]atomic.Int64 // bytes in each share, of requests of countedBytesMin and more

	mu      sync.Mutex // a leaf; guards what answers hold
	answers int64
	waiting int64 // the part of answers that waits for the transport
	charges uint64
	ended   bool // nothing is counted any more
}

// openScan is a Scan stream that is under way.
type openScan struct {
	ctx  context.Context // the stream's
	lost bool            // the connection closed before the stream ended
}

func (c *connection) beginScan(ctx context.Context) *openScan {
	scan := &openScan{ctx: ctx}
	if c == nil {
		return scan
	}
	c.scansMu.Lock()
	defer c.scansMu.Unlock()
	scan.lost = c.closed
	if c.scans == nil {
		c.scans = make(map[*openScan]struct{})
	}
	c.scans[scan] = struct{}{}
	return scan
}

// endScan reports whether the client broke the scan off while the connection was open. The handler
// may hear of that only after the connection has closed.
func (c *connection) endScan(scan *openScan) (brokenOff bool) {
	if c != nil {
		c.scansMu.Lock()
		defer c.scansMu.Unlock()
		delete(c.scans, scan)
	}
	return !scan.lost && errors.Is(scan.ctx.Err(), context.Canceled)
}

// close marks the scans that lose their connection. gRPC closes a connection before it cancels the
// streams that are open on it, so a stream that is canceled already was reset by the client.
func (c *connection) close() {
	c.scansMu.Lock()
	defer c.scansMu.Unlock()
	c.closed = true
	for scan := range c.scans {
		scan.lost = scan.lost || scan.ctx.Err() == nil
	}
}

// enter counts bytes of a share, unless the connection has others in it and comes to more than is
// free with them.
func (c *connection) enter(sh share, bytes, free int64) bool {
	if c == nil {
		return true
	}
	if all := c.held[sh].Add(bytes); all > free && all != bytes {
		c.held[sh].Add(-bytes)
		return false
	}
	return true
}

func (c *connection) leave(sh share, bytes int64) {
	if c != nil {
		c.held[sh].Add(-bytes)
	}
}

// charge counts an answer for the connection and in its share. What a closed connection is answered
// goes nowhere.
func (c *connection) charge(a *admission, bytes int64, must bool) bool {
	w, delta := &a.words[shareAnswers], admissionOne+uint64(bytes)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return must
	}
	after := w.word.Add(delta)
	fits := w.limit.allows(after) && (c.answers == 0 || c.answers+bytes <= w.limit.free(after))
	if !fits && !must {
		w.word.Add(-delta)
		return false
	}
	c.answers += bytes
	c.charges++
	return true
}

func (c *connection) releaseCharge(d *chargedBytes) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	c.answers -= d.bytes
	c.charges--
	if d.handedOver {
		c.waiting -= d.bytes
	}
	d.admission.words[shareAnswers].word.Add(-(admissionOne + uint64(d.bytes)))
}

// handOver counts an answer as waiting for the transport from now on.
func (c *connection) handOver(d *chargedBytes) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d.handedOver = true
	c.waiting += d.bytes
}

func (c *connection) waitingBytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waiting
}

func (c *connection) answerBytes() int64 {
	if c == nil {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.answers
}

// end ends all that the connection's answers count: the transport lets go of them without a word.
func (c *connection) end(a *admission) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	a.words[shareAnswers].word.Add(-(c.charges<<admissionShift + uint64(c.answers)))
	c.answers, c.waiting, c.charges = 0, 0, 0
}

// AuthType implements credentials.AuthInfo.
func (*connection) AuthType() string { return "epochkv" }

// refusedConnectionsMax bounds the connections that are kept open beyond the limit only to be told
// about it.
const refusedConnectionsMax = 64

// connections counts the open connections and bounds them.
type connections struct {
	max       int64
	requests  *telemetry.Requests
	admission *admission
	receiving *receiving
	open      atomic.Int64
	refused   atomic.Uint64
	unread    atomic.Uint64 // closed because of answers that the client did not take

	mu  sync.Mutex // a leaf; guards all
	all map[*countedConn]struct{}
}

// admit counts a new connection; nil means that it is closed at once.
func (c *connections) admit() *connection {
	n := c.open.Add(1)
	if n > c.max {
		c.refused.Add(1)
	}
	if n > c.max+refusedConnectionsMax {
		c.open.Add(-1)
		return nil
	}
	return &connection{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity},
		shard:          c.requests.Shard(),
		refused:        n > c.max,
	}
}

// credentials are transport credentials that register each connection.
func (c *connections) credentials() credentials.TransportCredentials {
	return &registering{TransportCredentials: insecure.NewCredentials(), connections: c}
}

type registering struct {
	credentials.TransportCredentials
	connections *connections
}

var errTooManyConnections = errors.New("server: too many connections")

// ServerHandshake implements credentials.TransportCredentials.
func (r *registering) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, _, err := r.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	info := r.connections.admit()
	if info == nil {
		return nil, nil, errTooManyConnections
	}
	counted := &countedConn{Conn: conn, connections: r.connections, info: info, inbound: newInbound(r.connections.receiving, &info.refusals)}
	r.connections.add(counted)
	return counted, info, nil
}

// Clone implements credentials.TransportCredentials.
func (r *registering) Clone() credentials.TransportCredentials {
	return &registering{TransportCredentials: r.TransportCredentials.Clone(), connections: r.connections}
}

// countedConn leaves the count when it is closed, however often that is.
type countedConn struct {
	net.Conn
	connections *connections
	info        *connection
	once        sync.Once

	ending  atomic.Bool // inbound has streams to end; the read under way is interrupted
	telling atomic.Bool // inbound has something to tell the client
	writing sync.Mutex  // held while bytes are written; before mu

	mu      sync.Mutex // guards what follows: reader and writer follow, and whatever closes the connection ends
	inbound *inbound   // nil once closed
	unread  unread
}

// Read follows the messages that come in; see receiving. It also ends streams on which a message
// does not proceed.
func (c *countedConn) Read(b []byte) (int, error) {
	if c.ending.Load() {
		n, room, err := c.endStreams(b)
		c.tell()
		if n > 0 || err != nil {
			return n, err
		}
		b = b[:min(len(b), room)]
	}
	n, err := c.Conn.Read(b)
	if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) && c.ending.Load() {
		return c.Read(b) // once more: endStreams has taken the deadline away
	}
	n, err = c.follow(b, n, err)
	c.tell()
	return n, err
}

func (c *countedConn) follow(b []byte, n int, err error) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inbound == nil || n == 0 {
		return n, err
	}
	if refused := c.inbound.follow(b[:n]); refused != nil {
		return 0, refused
	}
	c.noteEnding()
	return n, err
}

func (c *countedConn) noteEnding() {
	if len(c.inbound.ending) > 0 {
		c.ending.Store(true)
		c.telling.Store(true)
	}
}

// endStreams makes gRPC read the ends of the streams that inbound ends. Within a frame there is no
// place for them: so many bytes are to be read before.
func (c *countedConn) endStreams(b []byte) (n, room int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.Conn.SetReadDeadline(time.Time{}); err != nil { // which endStalled has set to interrupt a read
		return 0, 0, err
	}
	if c.inbound == nil {
		return 0, len(b), nil
	}
	if !c.inbound.betweenFrames() {
		return 0, c.inbound.untilFrame(), nil
	}
	n = c.inbound.endStreams(b)
	c.ending.Store(len(c.inbound.ending) > 0)
	return n, len(b), nil
}

// tell sends what inbound has to tell the client, if nothing else is being written: what is being
// written does so at its end.
func (c *countedConn) tell() {
	for c.telling.Load() && c.writing.TryLock() {
		told := c.tellLocked()
		c.writing.Unlock()
		if !told {
			return // within a frame: the write that ends it comes back to this
		}
	}
}

func (c *countedConn) tellLocked() bool {
	c.mu.Lock()
	var frames []byte
	if c.inbound != nil {
		if frames = c.inbound.takeTelling(); frames != nil {
			c.telling.Store(false)
		}
	}
	c.mu.Unlock()
	if frames == nil {
		return false
	}
	_, _ = c.Conn.Write(frames) // gRPC meets the same error
	return true
}

// endStalled ends the streams whose messages do not proceed.
func (c *countedConn) endStalled() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inbound == nil || !c.inbound.findStalled() {
		return
	}
	c.noteEnding()
	_ = c.Conn.SetReadDeadline(time.Unix(1, 0)) // fails only if the connection is closed
}

// stallSteps is how often in a message's time its progress is looked at.
const stallSteps = 4

// watchMessages ends streams on which a message has not proceeded for so long, and connections whose
// answers have not.
func (c *connections) watchMessages(ctx context.Context, timeout time.Duration, log *slog.Logger) {
	ticker := time.NewTicker(timeout / stallSteps)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		c.receiving.step.Add(1)
		c.mu.Lock()
		all := slices.Collect(maps.Keys(c.all))
		c.mu.Unlock()
		for _, conn := range all {
			conn.endStalled()
		}
		c.endUnread(all, timeout, log)
	}
}

func (c *connections) add(conn *countedConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all == nil {
		c.all = make(map[*countedConn]struct{})
	}
	c.all[conn] = struct{}{}
}

func (c *connections) remove(conn *countedConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.all, conn)
}

// Write follows the answers, windows and ends of streams that go out.
func (c *countedConn) Write(b []byte) (int, error) {
	c.writing.Lock()
	c.mu.Lock()
	if c.inbound != nil {
		c.inbound.answered(b)
	}
	c.mu.Unlock()
	n, err := c.Conn.Write(b)
	c.writing.Unlock()
	c.tell()
	return n, err
}

func (c *countedConn) Close() error {
	c.once.Do(func() {
		c.info.close()
		c.connections.remove(c)
		c.connections.open.Add(-1)
		c.info.end(c.connections.admission)
		c.mu.Lock()
		c.inbound.end()
		c.inbound = nil
		c.mu.Unlock()
	})
	return c.Conn.Close()
}

// connectionOf is the connection that a request came over.
func connectionOf(ctx context.Context) *connection {
	if c, ok := transport.ClientOf(ctx).(*directClient); ok {
		return c.connection
	}
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(*connection); ok {
			return c
		}
	}
	return nil
}
