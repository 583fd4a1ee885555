package transport

import (
	"net"
	"runtime"
)

// Yielder lets other goroutines run once its goroutine, whose client may always have more, has done much. Otherwise they wait until nothing is left to
// do, or until the scheduler ends its time slice after 10 ms; and that for each goroutine that does the same. It is for one goroutine.
type Yielder struct{ frames int }

const (
	// yieldFrames is how much is done in a turn, in frames of whatever kind, or in reads of a connection: over TLS a read returns one record, which
	// may have a byte. It is a few hundred microseconds at most.
	yieldFrames = 2 * burstMax
	// MessageFrames is what a message of a stream counts. Thousands of small ones may come in a frame.
	MessageFrames = 2
	// HeaderBytes is how many bytes of headers, or of settings, count as a frame. Each may stand for a field.
	HeaderBytes = 128
)

// Did counts frames.
func (y *Yielder) Did(frames int) {
	if y.frames += frames; y.frames >= yieldFrames {
		y.frames = 0
		runtime.Gosched()
	}
}

// YieldingConn lets other goroutines run before each read. It is for connections that need not be fast.
type YieldingConn struct{ net.Conn }

// Read implements net.Conn.
func (c YieldingConn) Read(b []byte) (int, error) {
	runtime.Gosched()
	return c.Conn.Read(b)
}

// CloseWrite closes the sending side.
func (c YieldingConn) CloseWrite() error { return closeWrite(c.Conn) }

// YieldingListener accepts YieldingConn.
type YieldingListener struct{ net.Listener }

// Accept implements net.Listener.
func (l YieldingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return YieldingConn{conn}, nil
}
