package main

import (
	"bytes"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/client/clienttest"
)

func TestEndpointsGetTheDefaultPort(t *testing.T) {
	for endpoint, want := range map[string]string{
		"db1": "db1:7400", "db1:": "db1:7400", "db1:7500": "db1:7500", "10.0.0.1": "10.0.0.1:7400", "::1": "[::1]:7400",
		"[::1]": "[::1]:7400", "[::1]:7500": "[::1]:7500", "dns:///db1:7400": "dns:///db1:7400", "unix:/run/kv.sock": "unix:/run/kv.sock",
	} {
		if got, err := withPort(endpoint); got != want || err != nil {
			t.Errorf("%q became %q, %v", endpoint, got, err)
		}
	}
	for _, endpoint := range []string{"http://db1:7401", "https://db1", "a:b:c"} {
		if got, err := withPort(endpoint); err == nil {
			t.Errorf("%q became %q", endpoint, got)
		}
	}
}

// TestWrongPortsAreNamed: what listens at the endpoint is found out, and the message says which option helps.
func TestWrongPortsAreNamed(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	plain, overTLS, twice := httptest.NewServer(handler), httptest.NewUnstartedServer(handler), httptest.NewUnstartedServer(handler)
	quiet := log.New(io.Discard, "", 0)
	overTLS.Config.ErrorLog, twice.Config.ErrorLog, twice.EnableHTTP2 = quiet, quiet, true
	overTLS.StartTLS()
	twice.StartTLS()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	for name, row := range map[string]struct {
		address, want string
		args          []string
	}{
		"HTTP":                   {plain.Listener.Addr().String(), "is an HTTP port", nil},
		"HTTP asked with TLS":    {plain.Listener.Addr().String(), "is an HTTP port", []string{"--tls"}},
		"HTTP over TLS":          {overTLS.Listener.Addr().String(), "is an HTTP port", nil},
		"TLS asked in plain":     {twice.Listener.Addr().String(), "speaks TLS", nil},
		"plain text over TLS":    {clienttest.Start(t).Endpoint, "--insecure", []string{"--tls"}},
		"nothing at the address": {closed.Addr().String(), "Nothing listens at " + closed.Addr().String(), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var errs bytes.Buffer
			a := &app{in: strings.NewReader(""), out: io.Discard, err: &errs, getenv: func(string) string { return "" }}
			code := a.run(t.Context(), append([]string{"get", "k", "--endpoint", row.address, "--timeout", "5s"}, row.args...))
			if code != exitUnavailable || !strings.Contains(errs.String(), row.want) {
				t.Errorf("exit %d: %s", code, errs.String())
			}
		})
	}
	t.Cleanup(func() {
		plain.Close()
		overTLS.Close()
		twice.Close()
	})
}

// TestASlowPortIsNotCalledHTTP: a server of TLS that takes long for a handshake answers plain text at once, and in HTTP/1, as that of the
// standard library does.
func TestASlowPortIsNotCalledHTTP(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				first := make([]byte, 1)
				if _, err := conn.Read(first); err == nil && first[0] == 'G' {
					_, _ = io.WriteString(conn, "HTTP/1.0 400 Bad Request\r\n\r\n")
					return
				}
				_, _ = io.Copy(io.Discard, conn) // until the client gives up
			}()
		}
	}()
	if got := probePort(l.Addr().String()); got != portSilent {
		t.Errorf("kind %d, want %d", got, portSilent)
	}
}
