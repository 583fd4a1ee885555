package transport

import (
	"container/list"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
)

// secureConn is a connection over TLS. Its Close does not wait: that of tls.Conn sends an alert, for
// which a client that reads nothing may let it wait for seconds.
type secureConn struct{ *tls.Conn }

// Close implements net.Conn.
func (c secureConn) Close() error { return c.NetConn().Close() }

// CloseWrite tells the client that nothing follows. Nothing may be written afterwards.
func (c secureConn) CloseWrite() error {
	_ = c.SetWriteDeadline(time.Now().Add(lingerTime)) // of a write at the moment; that of the alert is 5 s
	err := c.Conn.CloseWrite()
	return errors.Join(err, closeWrite(c.NetConn()))
}

// closeWrite closes the sending side of a connection.
func closeWrite(raw net.Conn) error {
	half, ok := raw.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// HandshakeOptions are the limits of Handshakes. All are required.
type HandshakeOptions struct {
	Config    func() *tls.Config    // asked for each handshake; what it returns must not change any more
	Protocols []string              // of ALPN. A client must offer h2 if it is the first
	Most      int                   // at once: beyond it one ends
	Timeout   time.Duration         // of a handshake
	Ended     func(net.Addr, error) // is told of each end; nil: the client may be served
}

// Handshakes makes the TLS handshakes of a listener, and bounds them: their number, their time, what
// a client may send, and how many compute at once. Nothing else exists for a connection until its
// handshake has succeeded.
type Handshakes struct {
	options  HandshakeOptions
	prepared atomic.Pointer[preparedConfig]

	mu     sync.Mutex           // a leaf; guards what follows
	open   list.List            // of *handshake, oldest first
	from   map[netip.Prefix]int // how many each network has of them
	turns  computeTurns
	closed bool
}

// handshake is one that is under way.
type handshake struct {
	conn  net.Conn
	from  netip.Prefix
	ended chan struct{} // closed when it is ended from outside
}

// NetworkOf is where a client comes from: its address, or the first 64 bits of one of IPv6, because a host has all addresses that begin with them.
func NetworkOf(peer net.Addr) netip.Prefix {
	tcp, ok := peer.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := tcp.AddrPort().Addr().Unmap()
	network, _ := ip.Prefix(min(ip.BitLen(), 64)) // the length is right
	return network
}

// preparedConfig is a configuration with what HTTP demands.
type preparedConfig struct{ from, config *tls.Config }

// ErrTooManyHandshakes is the end of a handshake that was the oldest of its network when HandshakeOptions.Most were under way and another began.
var ErrTooManyHandshakes = errors.New("transport: too many TLS handshakes at once")

// The other ends of handshakes that crypto/tls has no error for.
var (
	ErrNotHTTP2         = errors.New("transport: the client did not offer HTTP/2 (h2) by ALPN")
	ErrNotTLS           = errors.New("transport: the client does not speak TLS")
	errHandshakeTooLong = errors.New("transport: the client sent more than a handshake needs")
)

// handshakeBytesMax bounds what a client may send in a handshake: a chain of certificates has a few
// KiB, and crypto/tls would take 256.
const handshakeBytesMax = 32 << 10

// ciphers12 are those of TLS 1.2 that HTTP/2 permits. Those of TLS 1.3 are not configurable.
var ciphers12 = []uint16{
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
	tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
	tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
}

// NewHandshakes makes the handshakes of a listener.
func NewHandshakes(o HandshakeOptions) *Handshakes {
	return &Handshakes{
		options: o, from: make(map[netip.Prefix]int),
		turns: computeTurns{free: max(runtime.GOMAXPROCS(0)/2, 1)},
	}
}

// config is the configuration of the next handshake. It is prepared once, so that its session
// tickets can be used.
func (h *Handshakes) config() *tls.Config {
	from := h.options.Config()
	if p := h.prepared.Load(); p != nil && p.from == from {
		return p.config
	}
	config := from.Clone()
	config.NextProtos = h.options.Protocols
	if config.MinVersion == 0 {
		config.MinVersion = tls.VersionTLS13
	}
	config.CipherSuites = ciphers12
	// Small first records are for browsers: here each record of a burst of answers is a system call.
	config.DynamicRecordSizingDisabled = true
	h.prepared.Store(&preparedConfig{from, config})
	return config
}

// begin adds a handshake. If there are too many, the oldest of the network that has most ends. Clients that answer need
// milliseconds, and those that do not must not keep others out for a whole timeout. However fast a client connects, it ends no
// handshake of another network. begin returns nil after Close. If goroutines is not nil, the handshake's own is counted before.
func (h *Handshakes) begin(raw net.Conn, goroutines *sync.WaitGroup) *begun {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	if goroutines != nil {
		goroutines.Add(1)
	}
	if h.open.Len() >= h.options.Most {
		h.endLocked(h.surplusLocked())
	}
	s := &handshake{raw, NetworkOf(raw.RemoteAddr()), make(chan struct{})}
	h.from[s.from]++
	return &begun{h.open.PushBack(s), s.from, s.ended}
}

// begun is a handshake as its own goroutine knows it.
type begun struct {
	place *list.Element // guarded by the mutex of Handshakes
	from  netip.Prefix
	ended chan struct{}
}

// surplusLocked is the oldest handshake of the network that has most.
func (h *Handshakes) surplusLocked() *list.Element {
	most := 0
	for _, n := range h.from {
		most = max(most, n)
	}
	e := h.open.Front()
	for h.from[e.Value.(*handshake).from] < most { //nolint:forcetypeassert // there is nothing else
		e = e.Next()
	}
	return e
}

// endLocked ends a handshake from outside.
func (h *Handshakes) endLocked(e *list.Element) {
	s := h.removeLocked(e)
	close(s.ended)
	_ = s.conn.Close()
	e.Value = nil
}

func (h *Handshakes) removeLocked(e *list.Element) *handshake {
	s := h.open.Remove(e).(*handshake) //nolint:forcetypeassert // there is nothing else
	if h.from[s.from]--; h.from[s.from] == 0 {
		delete(h.from, s.from)
	}
	return s
}

// renew makes a handshake the newest: the wait for its turn was no fault of its client, which must have as long to answer as others.
func (h *Handshakes) renew(b *begun) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b.place.Value == nil {
		return net.ErrClosed
	}
	h.open.MoveToBack(b.place)
	return nil
}

// end reports whether a handshake that has returned was not ended from outside.
func (h *Handshakes) end(b *begun) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b.place.Value == nil {
		return false
	}
	h.removeLocked(b.place)
	return true
}

// Close ends all handshakes, and refuses others.
func (h *Handshakes) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for h.open.Len() > 0 {
		h.endLocked(h.open.Front())
	}
}

// Shake makes the handshake of a connection. If it fails, the connection is closed.
func (h *Handshakes) Shake(raw net.Conn) (*tls.Conn, error) {
	b := h.begin(raw, nil)
	if b == nil {
		return nil, errors.Join(ErrClosed, raw.Close())
	}
	return h.complete(raw, b)
}

// complete makes a handshake that has begun.
func (h *Handshakes) complete(raw net.Conn, b *begun) (*tls.Conn, error) {
	conn, err := h.shake(raw, b)
	if !h.end(b) {
		err = ErrTooManyHandshakes
	}
	h.mu.Lock()
	closed := h.closed
	h.mu.Unlock()
	if err != nil {
		_ = raw.Close()
		conn = nil
	}
	if !closed {
		h.options.Ended(raw.RemoteAddr(), err)
	}
	return conn, err
}

// secure makes the handshake of a connection, in a goroutine of its own, and then serves it.
func (t *Server) secure(raw net.Conn) {
	h := t.options.TLS
	b := h.begin(raw, &t.goroutines)
	if b == nil {
		_ = raw.Close()
		return
	}
	go func() {
		defer t.goroutines.Done()
		if conn, err := h.complete(raw, b); err == nil {
			t.serve(Secured(conn))
		}
	}()
}

// Secured is a connection whose handshake has succeeded, for a transport that must not wait when it
// closes the connection.
func Secured(conn *tls.Conn) net.Conn { return secureConn{conn} }

// firstBytes bounds what a client sends until its handshake has ended.
type firstBytes struct {
	net.Conn
	left int // used by the goroutine of the handshake, then constant
	done bool
	turn turn
}

// Read implements net.Conn.
func (c *firstBytes) Read(b []byte) (int, error) {
	if c.done {
		return c.Conn.Read(b)
	}
	if c.left == 0 {
		return 0, errHandshakeTooLong
	}
	c.turn.end()
	n, err := c.Conn.Read(b[:min(len(b), c.left)])
	c.left -= n
	if err == nil {
		err = c.turn.begin()
	}
	return n, err
}

// Write implements net.Conn. A client that takes nothing keeps no turn.
func (c *firstBytes) Write(b []byte) (int, error) {
	if !c.done {
		c.turn.end()
	}
	return c.Conn.Write(b)
}

// CloseWrite closes the sending side.
func (c *firstBytes) CloseWrite() error { return closeWrite(c.Conn) }

// shake makes a handshake, and tells clients that it refuses why, in the protocol that they speak.
func (h *Handshakes) shake(raw net.Conn, b *begun) (*tls.Conn, error) {
	deadline := time.Now().Add(h.options.Timeout)
	if err := raw.SetDeadline(deadline); err != nil {
		return nil, err
	}
	first := &firstBytes{Conn: raw, left: handshakeBytesMax, turn: turn{all: h, of: b, deadline: deadline}}
	conn := tls.Server(first, h.config())
	err := conn.Handshake()
	first.turn.end()
	first.turn.over = true
	var header tls.RecordHeaderError
	switch {
	case errors.As(err, &header) && header.Conn != nil:
		refusePlain(raw, header.RecordHeader[:])
		return nil, errors.Join(ErrNotTLS, err)
	case err != nil:
		if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, errHandshakeTooLong) {
			linger(raw) // so that the client reads the alert, and not that its connection was reset
		}
		return nil, err
	case h.options.Protocols[0] == http2.NextProtoTLS && conn.ConnectionState().NegotiatedProtocol != http2.NextProtoTLS:
		_, _ = io.WriteString(conn, refusalHTTP1(http.StatusHTTPVersionNotSupported, "this port serves gRPC: offer HTTP/2 (h2) by ALPN"))
		linger(secureConn{conn})
		return nil, ErrNotHTTP2
	}
	first.done = true
	return conn, raw.SetDeadline(time.Time{})
}

// refusePlain answers a client that does not speak TLS.
func refusePlain(raw net.Conn, begins []byte) {
	const text = "this port serves TLS only"
	if strings.HasPrefix(http2.ClientPreface, string(begins)) {
		// Without settings before it: after them, clients count the connection as made, and try again for
		// as long as their deadline allows.
		_, _ = raw.Write(appendGoAway(nil, 0, http2.ErrCodeInadequateSecurity, text))
	} else {
		_, _ = io.WriteString(raw, refusalHTTP1(http.StatusBadRequest, text))
	}
	linger(raw)
}

// refusalHTTP1 is an answer that clients of HTTP/1.1 show.
func refusalHTTP1(code int, text string) string {
	return fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s\n",
		code, http.StatusText(code), len(text)+1, text)
}
