package server

import (
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"
)

// patientListener is a listener that goes on after the errors of accept(2) that pass: a shortage of memory, and what has happened to the
// connection that was to be accepted. Both transports and the HTTP server would end with them, and the server with these. They go on by
// themselves while descriptors are short.
type patientListener struct {
	net.Listener
	failed func(error)
	close  func() error
	closed chan struct{}
}

// passing are the errors. The man page of accept names them.
var passing = []syscall.Errno{
	syscall.ENOMEM, syscall.ENOBUFS, syscall.EPERM, syscall.ECONNABORTED, syscall.ECONNRESET, syscall.EPROTO, syscall.ENOPROTOOPT, syscall.EOPNOTSUPP,
	syscall.ENETDOWN, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.EHOSTUNREACH, syscall.ENONET,
}

func newPatientListener(l net.Listener, failed func(error)) *patientListener {
	p := &patientListener{Listener: l, failed: failed, closed: make(chan struct{})}
	p.close = sync.OnceValue(func() error {
		close(p.closed)
		return l.Close()
	})
	return p
}

// Accept implements net.Listener.
func (p *patientListener) Accept() (net.Conn, error) {
	const pauseMax = time.Second
	for pause := time.Millisecond; ; pause = min(2*pause, pauseMax) {
		conn, err := p.Listener.Accept()
		if err == nil || !slices.ContainsFunc(passing, func(e syscall.Errno) bool { return errors.Is(err, e) }) {
			return conn, err
		}
		p.failed(err)
		select {
		case <-time.After(pause):
		case <-p.closed:
		}
	}
}

// Close implements net.Listener.
func (p *patientListener) Close() error { return p.close() }

// acceptFailed logs that a connection could not be accepted.
func (s *Server) acceptFailed(err error) {
	s.log.incident(slog.LevelWarn, "accept", "a connection cannot be accepted; trying again", err)
}

// listenTo listens to an address.
func (s *Server) listenTo(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	return newPatientListener(l, s.acceptFailed), nil
}
