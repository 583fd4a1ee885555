package main

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/epochkv/epochkv/client"
)

// portDefault is the port of an endpoint that names none.
const portDefault = "7400"

// withPort completes an endpoint. Names with a slash are for the resolvers of gRPC and stay as they are.
func withPort(endpoint string) (string, error) {
	scheme, rest, isURL := strings.Cut(endpoint, "://")
	switch {
	case isURL && (scheme == "http" || scheme == "https"):
		host, _, _ := strings.Cut(rest, "/")
		return "", fmt.Errorf("endpoint %q: expected HOST or HOST:PORT without %s://, for instance %s", endpoint, scheme, host)
	case strings.Contains(endpoint, "/") || strings.HasPrefix(endpoint, "unix:"):
		return endpoint, nil
	}
	if host, port, err := net.SplitHostPort(endpoint); err == nil {
		if port == "" {
			port = portDefault
		}
		return net.JoinHostPort(host, port), nil
	}
	host := strings.Trim(endpoint, "[]")
	if strings.Contains(host, ":") && net.ParseIP(host) == nil {
		return "", fmt.Errorf("endpoint %q: expected HOST or HOST:PORT; an IPv6 address with a port is in brackets, [::1]:%s", endpoint, portDefault)
	}
	return net.JoinHostPort(host, portDefault), nil
}

// portKind is what listens at an address.
type portKind int

const (
	portSilent portKind = iota // something that says nothing that kvctl knows
	portClosed
	portHTTP     // HTTP/1.1: metrics and health
	portGRPC     // HTTP/2 in plain text
	portTLS      // HTTP/2 over TLS
	portHTTPOver // HTTP/1.1 over TLS
)

// portWait bounds each question of probePort.
const portWait = time.Second

// probePort finds out what listens at an address, after a connection to it has failed: first it asks as a client of TLS, then in plain text.
func probePort(address string) portKind {
	conn, err := net.DialTimeout("tcp", address, portWait)
	if err != nil {
		return portClosed
	}
	_ = conn.SetDeadline(time.Now().Add(portWait))
	//nolint:gosec // nothing is sent over the connection: the handshake tells that the port speaks TLS
	secure := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2", "http/1.1"}})
	err = secure.Handshake()
	protocol := secure.ConnectionState().NegotiatedProtocol
	_ = conn.Close()
	if alert := tls.AlertError(0); err == nil || errors.As(err, &alert) {
		if protocol == "http/1.1" {
			return portHTTPOver
		}
		return portTLS
	}
	if errors.Is(err, os.ErrDeadlineExceeded) { // a slow port that speaks TLS would answer a question in plain text as one of HTTP
		return portSilent
	}
	if conn, err = net.DialTimeout("tcp", address, portWait); err != nil {
		return portClosed
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(portWait))
	_, _ = conn.Write([]byte("GET /healthz HTTP/1.1\r\nHost: kvctl\r\nConnection: close\r\n\r\n")) // the answer tells
	head, _ := bufio.NewReader(conn).Peek(5)
	switch {
	case string(head) == "HTTP/":
		return portHTTP
	case len(head) >= 4 && (head[3] == 4 || head[3] == 7): // SETTINGS or GOAWAY
		return portGRPC
	}
	return portSilent
}

// portAdvice says what is wrong with the port of an endpoint, or is empty. What the error itself says about TLS is more exact than what the
// port reveals, but for a port that is no gRPC port.
func (a *app) portAdvice(e *client.Error) string {
	secure := a.speaksTLS()
	switch kind := probePort(a.endpoint); {
	case kind == portHTTP || kind == portHTTPOver:
		return a.endpoint + " is an HTTP port, for metrics and health. kvctl needs the gRPC port: that of the server's --listen, " + portDefault + " by default."
	case kind == portClosed:
		return "Nothing listens at " + a.endpoint + ". Is the server running at " + a.endpoint + "? Set --endpoint or " + endpointEnv + " if it is elsewhere."
	case e.TLSAdvice() != "":
		return "The connection failed: " + e.TLSAdvice() + "."
	case kind == portTLS && !secure:
		return a.endpoint + " speaks TLS: use --tls, and --tls-ca FILE if no public authority has signed its certificate."
	case kind == portGRPC && secure:
		return a.endpoint + " speaks plain text: use --insecure, or give the server a certificate (--tls-cert)."
	}
	return ""
}
