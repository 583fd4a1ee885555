package server

import (
	"context"
	"crypto/tls"
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

// connection is the server's state of one client connection. It is the AuthInfo of the connection,
// because gRPC passes AuthInfo to handlers. The alternative, a stats handler, costs allocations for
// each message.
type connection struct {
	credentials.CommonAuthInfo
	shard   *telemetry.Shard
	addr    net.Addr    // of the client
	refused atomic.Bool // over the limit: its requests get an error with the reason; see connections.refuses

	caller atomic.Pointer[caller] // of the newest request; see gate

	scansMu sync.Mutex // a leaf; guards what follows
	scans   map[*openScan]struct{}
	closed  bool

	claims [shareCount]claim // to the large slots
	connectionCounts
	connectionLayers

	mu      sync.Mutex // a leaf; guards the counts of answers and pages, and changes of refused
	answers int64
	waiting int64 // the part of answers that waits for the transport
	charges uint64
	ended   bool // the connection has closed, and nothing is counted any more

	queued map[*chargedBytes]func() bool // answers in queues of pipelines, and whether each may be sent
	pages  map[int]int                   // how many scans have ended before their pages were sent, by the room of those
}

// connectionLayers are what is between the socket and the requests. They are constant once the connection serves.
type connectionLayers struct {
	tls     *tls.ConnectionState // nil in plain text
	library *libraryConn         // nil with the direct transport
	streams *connStreams         // nil without a server
}

// connectionCounts are of what a connection has beside bytes.
type connectionCounts struct {
	owned   [ownedKinds]atomic.Int64
	opens   atomic.Int64 // streams of methods that every client may call; see enterOpen
	commits commitClaim  // of transactions, that wait
}

// join makes it one of its client's connections, before it is served.
func (c *connection) join(s *connStreams) {
	c.streams, c.commits.claim.client = s, s.client
	for sh := range c.claims {
		c.claims[sh].client = s.client
	}
}

// client is what the connections of its client share; nil without a server.
func (c *connection) client() *streamClient {
	if c == nil || c.streams == nil {
		return nil
	}
	return c.streams.client
}

// peer is the address of the client.
func (c *connection) peer() string {
	if c.addr == nil {
		return ""
	}
	a := c.addr.String()
	return a[:min(len(a), peerBytesMax)]
}

// peerBytesMax bounds the text of a peer. An address is shorter.
const peerBytesMax = 64

// openScan is a Scan stream that has not ended.
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

// endScan reports whether the client cancelled the scan while the connection was open. The handler
// may learn of the cancellation only after the connection has closed.
func (c *connection) endScan(scan *openScan) (brokenOff bool) {
	if c != nil {
		c.scansMu.Lock()
		defer c.scansMu.Unlock()
		delete(c.scans, scan)
	}
	return !scan.lost && errors.Is(scan.ctx.Err(), context.Canceled)
}

// close marks the scans whose connection closes before they end. gRPC closes a connection before it
// cancels the streams that are open on it. So a stream that is canceled already was reset by the
// client.
func (c *connection) close() {
	c.scansMu.Lock()
	defer c.scansMu.Unlock()
	c.closed = true
	for scan := range c.scans {
		scan.lost = scan.lost || scan.ctx.Err() == nil
	}
}

// bytes is what the connection has in a share.
func (c *connection) bytes(sh share) int64 {
	if c == nil {
		return 0
	}
	return c.owned[sh].Load()
}

// AuthType implements credentials.AuthInfo.
func (*connection) AuthType() string { return "epochkv" }

// refusedConnectionsMax bounds the connections above the limit, whose requests get the error.
const refusedConnectionsMax = 64

// connections counts the open connections and bounds them.
type connections struct {
	max       int64
	requests  *telemetry.Requests
	admission *admission
	receiving *receiving
	open      atomic.Int64
	served    atomic.Int64 // of them, those within the limit
	beyond    atomic.Int64 // the others
	refused   atomic.Uint64

	violations [transport.Violations]atomic.Uint64 // connections closed because of their clients; see transport.Violation

	mu  sync.Mutex // a leaf; guards all
	all map[*countedConn]struct{}
}

// violated counts and logs what a client did.
func (c *connections) violated(log *operatorLog, kind transport.Violation, what string, cause error, args ...any) {
	c.violations[kind].Add(1)
	log.incident(slog.LevelWarn, "connection "+kind.String(), what, cause, append([]any{"kind", kind.String()}, args...)...)
}

// violationStats are the counts of each kind.
func (c *connections) violationStats() []telemetry.Violation {
	stats := make([]telemetry.Violation, len(c.violations))
	for kind := range c.violations {
		stats[kind] = telemetry.Violation{Kind: transport.Violation(kind).String(), Count: c.violations[kind].Load()}
	}
	return stats
}

// admit counts a new connection; nil means that it is closed at once.
func (c *connections) admit(addr net.Addr) *connection {
	conn := &connection{
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity},
		shard:          c.requests.Shard(),
		addr:           addr,
	}
	if c.receiving != nil {
		conn.join(c.receiving.clients.enter(transport.NetworkOf(addr).String()))
	}
	c.open.Add(1)
	if c.takePlace(conn) {
		return conn
	}
	c.refused.Add(1)
	conn.refused.Store(true)
	if c.beyond.Add(1) > refusedConnectionsMax {
		c.uncount(conn)
		return nil
	}
	return conn
}

// takePlace counts a connection as served, if there is room for it, and for its client, which leaves some to others.
func (c *connections) takePlace(conn *connection) bool {
	if free := c.max - c.served.Add(1); free >= 0 && conn.owns(ownedConnections).takeOne(free, c.max) {
		return true
	}
	c.served.Add(-1)
	return false
}

// uncount forgets a connection that has been counted.
func (c *connections) uncount(conn *connection) {
	c.open.Add(-1)
	if conn.refused.Load() {
		c.beyond.Add(-1)
	} else {
		c.served.Add(-1)
		conn.owns(ownedConnections).add(-1)
	}
	if conn.streams != nil {
		c.receiving.clients.leave(transport.NetworkOf(conn.addr).String(), conn.streams)
	}
}

// refuses reports whether a connection is over the limit. One that was takes a place that has become free since: its client keeps it.
func (c *connections) refuses(conn *connection) bool {
	if !conn.refused.Load() {
		return false
	}
	conn.mu.Lock()
	defer conn.mu.Unlock()
	if conn.refused.Load() && !conn.ended && c.takePlace(conn) {
		conn.refused.Store(false)
		c.beyond.Add(-1)
	}
	return conn.refused.Load()
}

// release ends a connection that admit has returned.
func (c *connections) release(conn *connection) {
	conn.close()
	conn.end(c.admission)
	c.admission.forget(conn)
	c.uncount(conn) // whether it is refused does not change any more
}

// credentials are transport credentials that register each connection, after its TLS handshake
// unless h is nil.
func (c *connections) credentials(h *transport.Handshakes) credentials.TransportCredentials {
	return &registering{TransportCredentials: insecure.NewCredentials(), connections: c, handshakes: h}
}

type registering struct {
	credentials.TransportCredentials
	connections *connections
	handshakes  *transport.Handshakes // nil: plain text
}

var errTooManyConnections = errors.New("server: too many connections")

// ServerHandshake implements credentials.TransportCredentials.
func (r *registering) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, err := r.secure(raw)
	if err != nil {
		return nil, nil, err
	}
	info := r.connections.admit(conn.RemoteAddr())
	if info == nil {
		return nil, nil, errTooManyConnections
	}
	if secured, ok := conn.(interface{ ConnectionState() tls.ConnectionState }); ok {
		state := secured.ConnectionState()
		info.tls = &state
	}
	counted := &countedConn{
		Conn: conn, connections: r.connections, info: info, inbound: newInbound(r.connections.receiving, info.streams),
		unread: unread{step: r.connections.receiving.step.Load()},
	}
	r.connections.add(counted)
	return newLibraryConn(counted), info, nil
}

// secure makes the TLS handshake, if the server speaks TLS. The time until the client's settings
// begins anew afterwards.
func (r *registering) secure(raw net.Conn) (net.Conn, error) {
	if r.handshakes == nil {
		return raw, nil
	}
	conn, err := r.handshakes.Shake(raw)
	if err != nil {
		return nil, err
	}
	return transport.Secured(conn), raw.SetDeadline(time.Now().Add(handshakeTimeout))
}

// Clone implements credentials.TransportCredentials.
func (r *registering) Clone() credentials.TransportCredentials {
	return &registering{TransportCredentials: r.TransportCredentials.Clone(), connections: r.connections, handshakes: r.handshakes}
}

// countedConn is no longer counted after its first Close.
type countedConn struct {
	net.Conn
	connections *connections
	info        *connection
	once        sync.Once

	ending  atomic.Bool // inbound has streams to end; the current read is interrupted
	telling atomic.Bool // inbound has frames to send to the client
	writing sync.Mutex  // held while bytes are written; before mu

	mu      sync.Mutex // guards the fields below, which the reader, the writer and Close use
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
		return c.Read(b) // once more: endStreams has removed the deadline
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

// endStreams makes gRPC read reset frames for the streams that inbound ends. Between two frames
// they are put into b at once, as n bytes. Within a frame, bytes of the frame must be read first:
// room is the number of bytes that may be read into b.
func (c *countedConn) endStreams(b []byte) (n, room int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.Conn.SetReadDeadline(time.Time{}); err != nil { // endStalled has set it to interrupt a read
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

// tellingMax is how many bytes of frames for the client may wait for another write. Beyond it nothing more is read from the client, which takes nothing.
const tellingMax = 16 << 10

// tell sends the frames that inbound has for the client. If another write is running, that write
// sends them when it ends.
func (c *countedConn) tell() {
	for c.telling.Load() && c.lockToTell() {
		told := c.tellLocked()
		c.writing.Unlock()
		if !told {
			return // within a frame: the write that completes the frame calls tell again
		}
	}
}

// lockToTell reports whether the caller may write now.
func (c *countedConn) lockToTell() bool {
	if c.writing.TryLock() {
		return true
	}
	c.mu.Lock()
	full := c.inbound != nil && len(c.inbound.telling) > tellingMax
	c.mu.Unlock()
	if full {
		c.writing.Lock()
	}
	return full
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
	_, _ = c.Conn.Write(frames) // gRPC's next write gets the same error
	return true
}

// endStalled ends the streams whose messages make no progress.
func (c *countedConn) endStalled() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inbound == nil || !c.inbound.findStalled() {
		return
	}
	c.noteEnding()
	_ = c.Conn.SetReadDeadline(time.Unix(1, 0)) // fails only if the connection is closed
}

// stallSteps is the number of checks for progress in the time that a message has.
const stallSteps = 4

// watchMessages ends streams on which a message has made no progress for the configured time, and
// connections whose answers have made none.
func (c *connections) watchMessages(ctx context.Context, timeout time.Duration, log *operatorLog) {
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

// Write follows the answers, window updates and ends of streams that are sent.
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
		c.connections.remove(c)
		c.connections.release(c.info)
		c.mu.Lock()
		c.inbound.end()
		c.inbound = nil
		c.mu.Unlock()
	})
	return c.Conn.Close()
}

// connectionOf is the connection of a request.
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
