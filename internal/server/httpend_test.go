package server

import (
	"errors"
	"net"
	"net/http"
	"testing"
	"time"
)

// slowToClose are connections that close when the test lets them, as late as those with TLS may whose clients take nothing.
type slowToClose struct {
	net.Listener
	until chan struct{}
}

type slowConn struct {
	net.Conn
	until chan struct{}
}

func (l slowToClose) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return slowConn{c, l.until}, err
}

func (c slowConn) Close() error {
	<-c.until
	return c.Conn.Close()
}

// TestEndOfTheHTTPServerIsBounded: however long its connections take to close, one after the other.
func TestEndOfTheHTTPServerIsBounded(t *testing.T) {
	const conns, most = 20, 100 * time.Millisecond
	until := make(chan struct{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Minute}
	served := make(chan error, 1)
	go func() { served <- h.Serve(slowToClose{l, until}) }()
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
	ended := make(chan error, 1)
	go func() { ended <- endHTTP(h, most) }()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the end waits for connections that do not close")
	}
	close(until)
	_ = h.Close() // when the connections are closed
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
}
