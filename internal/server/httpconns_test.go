package server

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// TestConnectionsOfHTTPAreBounded: clients that open connections, with a request or without one, and keep them open take no more of them
// than there may be. Probes are answered meanwhile, and so is a request that is executed.
func TestConnectionsOfHTTPAreBounded(t *testing.T) {
	h := mustStart(t)
	busy := mustDialHTTP(t, h)
	if _, err := io.WriteString(busy, "GET /debug/pprof/trace?seconds=2 HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer "+testUser+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	probe := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for i := range 3 * httpConnectionsMax {
		c := mustDialHTTP(t, h)
		if i%2 == 0 {
			if _, err := io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatalf("connection %d: %v", i, err)
			}
		}
		answer, err := probe.Get("http://" + h.HTTPAddress() + "/healthz")
		if err != nil {
			t.Fatalf("a probe beside %d connections: %v", i+1, err)
		}
		_ = answer.Body.Close()
	}
	conns := &h.endpoints.httpConns
	conns.mu.Lock()
	if n := len(conns.open); n > httpConnectionsMax {
		t.Errorf("%d connections are open", n)
	}
	conns.mu.Unlock()
	if _, err := busy.Read(make([]byte, 1)); err != nil {
		t.Errorf("a request that was executed: %v", err)
	}
}

// TestSlowRequestsKeepNoProbeOut: neither do clients that send a part of a request and no more.
func TestSlowRequestsKeepNoProbeOut(t *testing.T) {
	for what, part := range map[string]string{
		"headers": "GET /healthz HTTP/1.1\r\nHost:",
		"a body":  "POST /debug/pprof/symbol HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer " + testUser + "\r\nContent-Length: 100\r\n\r\n0",
	} {
		t.Run(what, func(t *testing.T) {
			h := mustStart(t)
			probe := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			for i := range 2 * httpConnectionsMax {
				if _, err := io.WriteString(mustDialHTTP(t, h), part); err != nil {
					t.Fatal(err)
				}
				if i < httpConnectionsMax/2 {
					continue
				}
				answer, err := probe.Get("http://" + h.HTTPAddress() + "/healthz")
				if err != nil {
					t.Fatalf("a probe beside %d connections that send a part of %s: %v", i+1, what, err)
				}
				_ = answer.Body.Close()
			}
		})
	}
}

func mustDialHTTP(t *testing.T, h *harness) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", h.HTTPAddress())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// hostConn is a connection of a host.
type hostConn struct {
	net.Conn
	host   string
	closed bool
}

func (c *hostConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.host), Port: 1} }
func (c *hostConn) Close() error         { c.closed = true; return nil }

// TestConnectionsOfAHostEndNoneOfAnother: a host that opens more and more of them loses its own, whether the probe of another host waits or is executed.
// It may have as many addresses of IPv6 as it likes.
func TestConnectionsOfAHostEndNoneOfAnother(t *testing.T) {
	t.Run("IPv4", func(t *testing.T) { connectAsAHost(t, func(int) string { return "10.0.0.2" }) })
	t.Run("IPv6", func(t *testing.T) { connectAsAHost(t, func(i int) string { return fmt.Sprintf("2001:db8::%x", i) }) })
}

func connectAsAHost(t *testing.T, address func(i int) string) {
	t.Helper()
	for _, state := range []http.ConnState{http.StateNew, http.StateActive, http.StateIdle} {
		h := new(httpConns)
		probe := &hostConn{host: "10.0.0.1"}
		h.changed(probe, http.StateNew)
		h.changed(probe, state)
		var others []*hostConn
		for i := range 3 * httpConnectionsMax {
			c := &hostConn{host: address(i)}
			h.changed(c, http.StateNew)
			if i%2 == 0 {
				h.changed(c, http.StateActive)
			}
			others = append(others, c)
			if probe.closed {
				t.Fatalf("%v: the connection of another host was closed for connection %d", state, i+1)
			}
		}
		closed := 0
		for _, c := range others {
			if c.closed {
				closed++
			}
		}
		if want := 1 + len(others) - httpConnectionsMax; closed != want || len(h.open) != httpConnectionsMax {
			t.Errorf("%v: %d were closed and %d are open, want %d and %d", state, closed, len(h.open), want, httpConnectionsMax)
		}
	}
}
