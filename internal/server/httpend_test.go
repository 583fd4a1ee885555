package server

import (
	"errors"
	"net"
	"net/http"
	"testing"
	"time"
)

// slowToClose are connections that take long to close, as those with TLS may whose clients take nothing.
type slowToClose struct{ net.Listener }

const closeTakes = 100 * time.Millisecond

type slowConn struct{ net.Conn }

func (l slowToClose) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return slowConn{c}, err
}

func (c slowConn) Close() error {
	time.Sleep(closeTakes)
	return c.Conn.Close()
}

// TestEndOfTheHTTPServerIsBounded: however long its connections take to close, one after the other.
func TestEndOfTheHTTPServerIsBounded(t *testing.T) {
	const conns, most = 20, 300 * time.Millisecond
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Minute}
	served := make(chan error, 1)
	go func() { served <- h.Serve(slowToClose{l}) }()
	for range conns {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte("GET / HTTP/1.1\r\nHost: h\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	if err := endHTTP(h, most); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > conns*closeTakes/2 {
		t.Errorf("%d connections took %v to close", conns, took)
	}
	_ = h.Close() // when the connections are closed
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
}
