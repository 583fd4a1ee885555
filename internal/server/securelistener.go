package server

import (
	"net"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/transport"
)

// secureListener makes the handshakes of an HTTP server's connections, each in a goroutine, so that
// a client that says nothing does not hold up Accept.
type secureListener struct {
	net.Listener
	handshakes *transport.Handshakes

	accepted chan net.Conn
	ended    chan struct{}
	err      error // why Accept ended; set before ended is closed
	stop     func() error
	shaking  sync.WaitGroup
}

func newSecureListener(l net.Listener, h *transport.Handshakes) *secureListener {
	s := &secureListener{Listener: l, handshakes: h, accepted: make(chan net.Conn), ended: make(chan struct{})}
	s.stop = sync.OnceValue(l.Close)
	return s
}

// run accepts connections until the listener is closed. The HTTP server calls Accept meanwhile.
func (s *secureListener) run() {
	defer s.shaking.Wait()
	defer s.handshakes.Close()
	defer close(s.ended)
	for {
		raw, err := s.Listener.Accept()
		if err != nil {
			if temporary, ok := err.(interface{ Temporary() bool }); ok && temporary.Temporary() {
				time.Sleep(acceptPause)
				continue
			}
			s.err = err
			break
		}
		s.shaking.Go(func() {
			conn, err := s.handshakes.Shake(raw)
			if err != nil {
				return
			}
			select {
			case s.accepted <- conn:
			case <-s.ended:
				_ = conn.NetConn().Close()
			}
		})
	}
}

// acceptPause is the wait after descriptors were short.
const acceptPause = 50 * time.Millisecond

// Accept implements net.Listener.
func (s *secureListener) Accept() (net.Conn, error) {
	select {
	case conn := <-s.accepted:
		return conn, nil
	case <-s.ended:
		return nil, s.err
	}
}

// Close implements net.Listener.
func (s *secureListener) Close() error {
	err := s.stop()
	s.handshakes.Close()
	return err
}
