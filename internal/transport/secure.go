package transport

import (
	"container/list"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
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

// handshakes are the TLS handshakes that have not ended. Nothing else exists for their connections.
type handshakes struct {
	config *tls.Config // nil: connections are plain text
	most   int

	mu     sync.Mutex // a leaf; guards what follows
	open   list.List  // of net.Conn, oldest first
	closed bool
}

// ErrCrowded is the end of a handshake that was the oldest of Options.Handshakes when another began.
var ErrCrowded = errors.New("transport: too many TLS handshakes at once")

var (
	errNotHTTP2 = errors.New("transport: the client did not offer HTTP/2 (h2) by ALPN")
	errNotTLS   = errors.New("transport: the client does not speak TLS")
)

func (h *handshakes) init(o *Options) {
	if o.TLS == nil {
		return
	}
	h.most, h.config = o.Handshakes, o.TLS.Clone()
	h.config.NextProtos = []string{http2.NextProtoTLS}
	h.config.MinVersion = max(h.config.MinVersion, tls.VersionTLS13) // HTTP/2 forbids most ciphers of 1.2
	// Small first records are for browsers: here each record of a burst of answers is a system call.
	h.config.DynamicRecordSizingDisabled = true
}

// begin adds a handshake, and its goroutine. If there are too many, the oldest ends: clients that
// answer need milliseconds, and those that do not must not keep others out for a whole timeout. It
// returns nil once the server is closed.
func (h *handshakes) begin(raw net.Conn, goroutines *sync.WaitGroup) *list.Element {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	goroutines.Add(1)
	if h.open.Len() >= h.most {
		h.endLocked(h.open.Front())
	}
	return h.open.PushBack(raw)
}

// endLocked ends a handshake from outside.
func (h *handshakes) endLocked(e *list.Element) {
	_ = h.open.Remove(e).(net.Conn).Close() //nolint:forcetypeassert // there is nothing else
	e.Value = nil
}

// end reports whether a handshake that has returned was not ended from outside.
func (h *handshakes) end(e *list.Element) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if e.Value == nil {
		return false
	}
	h.open.Remove(e)
	return true
}

func (h *handshakes) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for h.open.Len() > 0 {
		h.endLocked(h.open.Front())
	}
}

// secure makes the handshake of a connection, in a goroutine of its own, and then serves it.
func (t *Server) secure(raw net.Conn) {
	e := t.handshakes.begin(raw, &t.goroutines)
	if e == nil {
		_ = raw.Close()
		return
	}
	go func() {
		defer t.goroutines.Done()
		conn, err := shake(raw, t.handshakes.config, t.options.HandshakeTimeout)
		if !t.handshakes.end(e) {
			err = ErrCrowded
		}
		if err != nil {
			_ = raw.Close()
			if !t.isClosing() {
				t.options.HandshakeFailed(raw.RemoteAddr(), err)
			}
			return
		}
		t.serve(conn)
	}()
}

// shake makes a handshake, and tells clients that it refuses why, in the protocol that they speak.
func shake(raw net.Conn, config *tls.Config, timeout time.Duration) (net.Conn, error) {
	if err := raw.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	conn := secureConn{tls.Server(raw, config)}
	err := conn.Handshake()
	var header tls.RecordHeaderError
	switch {
	case errors.As(err, &header) && header.Conn != nil:
		refusePlain(header.Conn, header.RecordHeader[:])
		return nil, errors.Join(errNotTLS, err)
	case err != nil:
		return nil, err
	case conn.ConnectionState().NegotiatedProtocol != http2.NextProtoTLS:
		_, _ = io.WriteString(conn, refusalHTTP1(http.StatusHTTPVersionNotSupported, "this port serves gRPC: offer HTTP/2 (h2) by ALPN"))
		linger(conn)
		return nil, errNotHTTP2
	}
	return conn, raw.SetDeadline(time.Time{})
}

// refusePlain answers a client that does not speak TLS.
func refusePlain(raw net.Conn, begins []byte) {
	const text = "this port serves TLS only"
	if strings.HasPrefix(http2.ClientPreface, string(begins)) {
		_, _ = raw.Write(appendGoAway(appendSettings(nil), 0, http2.ErrCodeInadequateSecurity, text))
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
