package server

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/transport"
)

// scriptedListener returns errors, and then a connection.
type scriptedListener struct {
	net.Listener
	errors []error
}

func (l *scriptedListener) Accept() (net.Conn, error) {
	if len(l.errors) == 0 {
		return new(net.TCPConn), nil
	}
	err := l.errors[0]
	l.errors = l.errors[1:]
	return nil, err
}

func acceptError(e syscall.Errno) error {
	return &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", e)}
}

// TestAcceptGoesOnAfterAShortage: the server must not end because the system had no memory for a connection, or because of what has become of
// one.
func TestAcceptGoesOnAfterAShortage(t *testing.T) {
	for _, e := range passing {
		failed := 0
		l := newPatientListener(&scriptedListener{errors: []error{acceptError(e), acceptError(e)}}, func(error) { failed++ })
		if conn, err := l.Accept(); err != nil || conn == nil || failed != 2 {
			t.Errorf("%v: %v, %v after %d failures", e, conn, err, failed)
		}
	}
	for _, final := range []error{net.ErrClosed, acceptError(syscall.EBADF), acceptError(syscall.EMFILE)} {
		l := newPatientListener(&scriptedListener{errors: []error{final}}, func(error) {})
		if _, err := l.Accept(); !errors.Is(err, final) {
			t.Errorf("got %v, want %v", err, final)
		}
	}
}

// TestAcceptEndsWhenItsListenerIsClosed: of both listeners, and also while it pauses.
func TestAcceptEndsWhenItsListenerIsClosed(t *testing.T) {
	h := mustStart(t)
	for i, l := range []net.Listener{h.endpoints.listener, h.endpoints.metrics} {
		if secured, ok := l.(*secureListener); ok {
			l = secured.Listener
		}
		if i == 1 {
			l = l.(transport.YieldingListener).Listener
		}
		if _, ok := l.(*patientListener); !ok {
			t.Errorf("%T is not patient", l)
		}
	}
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	fails := &scriptedListener{Listener: raw, errors: []error{acceptError(syscall.ENOMEM), net.ErrClosed}}
	l := newPatientListener(fails, func(error) {})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if err := l.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
}
