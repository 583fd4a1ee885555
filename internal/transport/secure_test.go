package transport

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// testAuthority signs certificates.
type testAuthority struct {
	t           testing.TB
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
}

// authority is the certificate authority of all tests; its certificates are for 127.0.0.1.
func authority(t testing.TB) testAuthority {
	return testAuthority{t: t, key: theAuthority().key, certificate: theAuthority().certificate}
}

var theAuthority = sync.OnceValue(newAuthority)

func newAuthority() testAuthority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		panic(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	return testAuthority{key: key, certificate: certificate}
}

func (a testAuthority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

func (a testAuthority) sign() tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (a testAuthority) server() *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{a.sign()}} //nolint:gosec // the transport sets the lowest version
}

// client trusts the authority and offers HTTP/2.
func (a testAuthority) client() *tls.Config {
	return &tls.Config{RootCAs: a.pool(), ServerName: "127.0.0.1", NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}
}

func handshakeOptions(t testing.TB) HandshakeOptions {
	config := authority(t).server()
	return HandshakeOptions{
		Config: func() *tls.Config { return config }, Protocols: []string{"h2"}, Most: 16, Timeout: 5 * time.Second, Ended: func(net.Addr, error) {},
	}
}

// startSecure serves over TLS and counts failed handshakes.
func startSecure(t testing.TB, adjust ...func(*tls.Config, *HandshakeOptions)) (s *service, server *Server, address string, failed *atomic.Int64) {
	t.Helper()
	failed = new(atomic.Int64)
	options := handshakeOptions(t)
	options.Ended = func(_ net.Addr, err error) {
		if err != nil {
			failed.Add(1)
		}
	}
	for _, f := range adjust {
		f(options.Config(), &options)
	}
	s, server, address = start(t, func(o *Options) { o.TLS = NewHandshakes(options) })
	return s, server, address, failed
}

func dialGRPC(t testing.TB, address string, config *tls.Config) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// echo sends so many bytes, and wants them back.
func echo(ctx context.Context, conn *grpc.ClientConn, size int) error {
	in, out := wrapperspb.Bytes(bytes.Repeat([]byte("x"), size)), new(wrapperspb.BytesValue)
	if err := conn.Invoke(ctx, pathEcho, in, out); err != nil {
		return err
	}
	if !bytes.Equal(in.Value, out.Value) {
		return errors.New("the answer is not the request")
	}
	return nil
}

// TestGRPCOverTLS: gRPC's own client is served over TLS, with messages of every size and at once, and
// with client certificates only if the authority has signed them.
func TestGRPCOverTLS(t *testing.T) {
	mutual := func(c *tls.Config, _ *HandshakeOptions) {
		c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, authority(t).pool()
	}
	with := func(c tls.Certificate) *tls.Config {
		config := authority(t).client()
		config.Certificates = []tls.Certificate{c}
		return config
	}
	stranger := newAuthority()
	stranger.t = t
	for _, c := range []struct {
		name   string
		adjust func(*tls.Config, *HandshakeOptions)
		client *tls.Config
		works  bool
	}{
		{"server certificate", func(*tls.Config, *HandshakeOptions) {}, authority(t).client(), true},
		{"a server that is not trusted", func(*tls.Config, *HandshakeOptions) {}, &tls.Config{RootCAs: stranger.pool(), MinVersion: tls.VersionTLS13}, false},
		{"client certificate", mutual, with(authority(t).sign()), true},
		{"no client certificate", mutual, authority(t).client(), false},
		{"a client certificate of another authority", mutual, with(stranger.sign()), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, _, address, failed := startSecure(t, c.adjust)
			conn := dialGRPC(t, address, c.client)
			if !c.works {
				if err := echo(t.Context(), conn, 1); status.Code(err) != codes.Unavailable {
					t.Errorf("the request ended with %v", err)
				}
				eventually(t, "the handshake has failed", func() bool { return failed.Load() > 0 })
				if s.executed.Load() != 0 || s.lanes.Load() != 0 {
					t.Error("a request was executed")
				}
				return
			}
			var all sync.WaitGroup
			for i := range 32 {
				all.Go(func() {
					for _, size := range []int{0, 1, 100, 5_000, 16_384, 100_000} {
						if err := echo(t.Context(), conn, size+i); err != nil {
							t.Errorf("%d bytes: %v", size+i, err)
						}
					}
				})
			}
			all.Wait()
			if failed.Load() != 0 || s.clients.Load() != 1 {
				t.Errorf("%d handshakes failed, %d connections", failed.Load(), s.clients.Load())
			}
		})
	}
}

// TestRefusedClientsAreToldWhy: a client without TLS, without HTTP/2 or with an old version of TLS is
// told so in its own protocol, and nothing is kept for it.
func TestRefusedClientsAreToldWhy(t *testing.T) {
	s, _, address, failed := startSecure(t)
	offer := func(protocols ...string) *tls.Config {
		return &tls.Config{RootCAs: authority(t).pool(), ServerName: "127.0.0.1", NextProtos: protocols, MinVersion: tls.VersionTLS13}
	}
	const get = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
	const old = "protocol version not supported"
	for _, c := range []struct {
		name   string
		config *tls.Config // nil: plain text
		sends  string
		want   string // in the answer, or in the error of the handshake
	}{
		{"HTTP/1.1 without TLS", nil, get, "HTTP/1.1 400 Bad Request"},
		{"HTTP/2 without TLS", nil, http2.ClientPreface, "this port serves TLS only"},
		{"no ALPN", offer(), get, "offer HTTP/2 (h2) by ALPN"},
		{"HTTP/1.1 by ALPN", offer("http/1.1"), get, "HTTP/1.1 505"},
		{"another protocol by ALPN", offer("mqtt"), get, "no application protocol"},
		{"TLS 1.2", &tls.Config{RootCAs: authority(t).pool(), ServerName: "127.0.0.1", NextProtos: []string{"h2"}, MaxVersion: tls.VersionTLS12}, get, old}, //nolint:gosec // refused
	} {
		t.Run(c.name, func(t *testing.T) {
			before := failed.Load()
			conn, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			if c.config != nil {
				conn = tls.Client(conn, c.config)
			}
			var answer []byte
			if _, err = io.WriteString(conn, c.sends); err == nil {
				answer, err = io.ReadAll(conn)
			}
			if got := string(answer); !strings.Contains(got, c.want) && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("answer %q, %v", got, err)
			}
			_ = conn.Close()
			eventually(t, "the handshake has failed", func() bool { return failed.Load() == before+1 })
		})
	}
	if s.clients.Load() != 0 {
		t.Errorf("%d refused clients are kept", s.clients.Load())
	}
}

// TestHandshakesAreBounded: clients that open connections and say nothing keep no other out, and lose
// their connections.
func TestHandshakesAreBounded(t *testing.T) {
	const most, silent = 4, 40
	s, server, address, failed := startSecure(t, func(_ *tls.Config, o *HandshakeOptions) { o.Most, o.Timeout = most, time.Minute })
	conns := make([]net.Conn, silent)
	for i := range conns {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conns[i] = conn
		if i%2 == 0 {
			_, _ = conn.Write([]byte{22, 3, 1, 2, 0, 1}) // the beginning of a handshake
		}
	}
	eventually(t, "all but the newest have ended", func() bool { return failed.Load() == silent-most })
	server.options.TLS.mu.Lock()
	if n := server.options.TLS.open.Len(); n != most {
		t.Errorf("%d handshakes", n)
	}
	server.options.TLS.mu.Unlock()
	if s.clients.Load() != 0 {
		t.Errorf("%d clients exist before their handshakes", s.clients.Load())
	}
	open := 0 // the newest, but one that has waited for its turn to compute counts as new
	for i, conn := range conns {
		_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		switch _, err := conn.Read(make([]byte, 1)); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			open++
		case err == nil:
			t.Errorf("connection %d has an answer", i)
		}
	}
	if open > most {
		t.Errorf("%d connections are open", open)
	}
	if err := echo(t.Context(), dialGRPC(t, address, authority(t).client()), 10); err != nil {
		t.Error(err)
	}
	before := time.Now()
	server.Close() // ends those that are left
	if took := time.Since(before); took > 30*time.Second {
		t.Errorf("closing took %v", took)
	}
}

// TestHandshakesOfOneAddressEndNoOthers: a client that opens connections without end, and says nothing, ends its own handshakes only. That of a
// client of another address takes as long as it may.
func TestHandshakesOfOneAddressEndNoOthers(t *testing.T) {
	const most, silent = 4, 40
	_, server, address, failed := startSecure(t, func(_ *tls.Config, o *HandshakeOptions) { o.Most, o.Timeout = most, time.Minute })
	dial := func(from string) net.Conn {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		conn, err := dialer.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	slow := dial("127.0.0.2")
	eventually(t, "its handshake has begun", func() bool {
		server.options.TLS.mu.Lock()
		defer server.options.TLS.mu.Unlock()
		return server.options.TLS.open.Len() == 1
	})
	for range silent {
		dial("127.0.0.1")
	}
	eventually(t, "all but the newest have ended", func() bool { return failed.Load() == silent+1-most })
	client := tls.Client(slow, authority(t).client())
	_ = client.SetDeadline(time.Now().Add(20 * time.Second))
	if err := client.Handshake(); err != nil {
		t.Error(err)
	}
}

// countingKey is a private key whose signatures take until release is closed. It notes how many are made at once.
type countingKey struct {
	*ecdsa.PrivateKey
	signing, most, signed atomic.Int64
	release               chan struct{}
}

func (k *countingKey) Sign(r io.Reader, digest []byte, o crypto.SignerOpts) ([]byte, error) {
	if n := k.signing.Add(1); n > k.most.Load() {
		k.most.Store(n)
	}
	defer k.signing.Add(-1)
	<-k.release
	k.signed.Add(1)
	return k.PrivateKey.Sign(r, digest, o)
}

// TestHandshakesComputeInTurn: however many clients send their first bytes at once, few handshakes compute, so that requests need not wait for all.
// Those that are ended while they wait for their turn compute nothing.
func TestHandshakesComputeInTurn(t *testing.T) {
	const most, all = 16, 64
	key := &countingKey{release: make(chan struct{})}
	_, server, address, failed := startSecure(t, func(c *tls.Config, o *HandshakeOptions) {
		o.Most, o.Timeout = most, time.Minute
		key.PrivateKey = c.Certificates[0].PrivateKey.(*ecdsa.PrivateKey) //nolint:forcetypeassert // the tests' authority makes it
		c.Certificates[0].PrivateKey = key
	})
	turns := int64(server.options.TLS.turns.free)
	var clients sync.WaitGroup
	defer clients.Wait()
	var served atomic.Int64
	for range all {
		clients.Go(func() {
			if conn, err := tls.Dial("tcp", address, authority(t).client()); err == nil {
				served.Add(1)
				_ = conn.Close()
			}
		})
	}
	eventually(t, "those beyond the bound have ended without their turn", func() bool { return failed.Load() >= all-most-turns && key.signing.Load() == turns })
	close(key.release)
	clients.Wait()
	if key.most.Load() > turns {
		t.Errorf("%d handshakes computed at once, of %d", key.most.Load(), turns)
	}
	if signed := key.signed.Load(); signed > most+turns {
		t.Errorf("%d handshakes computed", signed)
	}
	if served.Load() == 0 {
		t.Error("no client was served")
	}
}

// slowKey is a private key whose signatures take their time.
type slowKey struct {
	*ecdsa.PrivateKey
	takes time.Duration
}

func (k slowKey) Sign(r io.Reader, digest []byte, o crypto.SignerOpts) ([]byte, error) {
	time.Sleep(k.takes)
	return k.PrivateKey.Sign(r, digest, o)
}

// TestHandshakesOfANetworkWaitForNoQueueOfAnother: beside a client that has many handshakes compute for long, one of another network is made after few
// turns.
func TestHandshakesOfANetworkWaitForNoQueueOfAnother(t *testing.T) {
	const greedy, takes = 60, 30 * time.Millisecond
	_, server, address, _ := startSecure(t, func(c *tls.Config, o *HandshakeOptions) {
		o.Most, o.Timeout = 256, time.Minute
		key := c.Certificates[0].PrivateKey.(*ecdsa.PrivateKey) //nolint:forcetypeassert // the tests' authority makes it
		c.Certificates[0].PrivateKey = slowKey{key, takes}
	})
	turns := server.options.TLS.turns.free
	shake := func(from string) error {
		dialer := tls.Dialer{NetDialer: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}, Config: authority(t).client()}
		conn, err := dialer.DialContext(t.Context(), "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	}
	var clients sync.WaitGroup
	defer clients.Wait()
	done := make(chan struct{})
	defer close(done)
	for range greedy * turns {
		clients.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					_ = shake("127.0.0.2")
				}
			}
		})
	}
	eventually(t, "many wait for their turns", func() bool {
		server.options.TLS.mu.Lock()
		defer server.options.TLS.mu.Unlock()
		return server.options.TLS.turns.waiting.Len() >= greedy*turns*3/4
	})
	before := time.Now()
	if err := shake("127.0.0.3"); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(before); took > greedy*takes/2 {
		t.Errorf("a handshake took %v", took)
	}
}

// TestNetworksOfClients: the addresses that a host may have are one network.
func TestNetworksOfClients(t *testing.T) {
	for address, want := range map[string]string{
		"10.0.0.7:1": "10.0.0.7/32", "[::ffff:10.0.0.7]:2": "10.0.0.7/32", "[2001:db8:1:2:3:4:5:6]:3": "2001:db8:1:2::/64", "[fe80::1%1]:4": "fe80::/64",
	} {
		tcp := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))
		if got := NetworkOf(tcp).String(); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
	if NetworkOf(&net.UnixAddr{}).IsValid() {
		t.Error("a socket of Unix has a network")
	}
}

// TestHandshakesHaveABoundInBytes: a client that sends more than a handshake needs loses its connection,
// long before its time is over.
func TestHandshakesHaveABoundInBytes(t *testing.T) {
	ended := make(chan error, 1)
	_, _, address, _ := startSecure(t, func(_ *tls.Config, o *HandshakeOptions) {
		o.Timeout, o.Ended = time.Minute, func(_ net.Addr, err error) { ended <- err }
	})
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const record = 8 << 10
	hello := append([]byte{1, 0, 0xff, 0xf0}, make([]byte, 6*record)...) // the first of 64 KiB
	for ; len(hello) >= record; hello = hello[record:] {
		_, _ = conn.Write(append([]byte{22, 3, 1, record >> 8, 0}, hello[:record]...)) // the server may have closed it
	}
	select {
	case err := <-ended:
		if !errors.Is(err, errHandshakeTooLong) {
			t.Errorf("the handshake ended with %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("the server waits for the rest")
	}
}

// TestHandshakesEndInTime: a handshake that does not proceed ends after its timeout.
func TestHandshakesEndInTime(t *testing.T) {
	_, server, address, failed := startSecure(t, func(_ *tls.Config, o *HandshakeOptions) { o.Timeout = 100 * time.Millisecond })
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection is open")
	}
	eventually(t, "it is told", func() bool { return failed.Load() == 1 })
	server.options.TLS.mu.Lock()
	defer server.options.TLS.mu.Unlock()
	if server.options.TLS.open.Len() != 0 || len(server.options.TLS.from) != 0 {
		t.Error("the handshake is kept")
	}
}

// TestTicketKeysAreNewEachDay: a ticket is encrypted with the key of its day, and that key is forgotten
// after a week. The prepared configuration keeps what crypto/tls does by itself.
func TestTicketKeysAreNewEachDay(t *testing.T) {
	const day = 24 * time.Hour
	now := time.Now()
	from := authority(t).server().Clone()
	from.ClientAuth, from.Time = tls.NoClientCert, func() time.Time { return now }
	h := NewHandshakes(HandshakeOptions{Config: func() *tls.Config { return from }, Protocols: []string{"h2"}})
	var state *tls.SessionState
	config := h.config()
	config.WrapSession = func(_ tls.ConnectionState, s *tls.SessionState) ([]byte, error) {
		state = s
		return config.EncryptTicket(tls.ConnectionState{}, s)
	}
	shakeOnce(t, config)
	ticket := func() []byte {
		t.Helper()
		text, err := h.config().EncryptTicket(tls.ConnectionState{}, state)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	opens := func(ticket []byte) bool {
		t.Helper()
		s, err := h.config().DecryptTicket(ticket, tls.ConnectionState{})
		if err != nil {
			t.Fatal(err)
		}
		return s != nil
	}
	first := ticket()
	now = now.Add(day + time.Hour)
	second := ticket()
	if !opens(first) || !opens(second) {
		t.Error("a ticket of the last two days cannot be used")
	}
	now = now.Add(6 * day)
	ticket() // the keys are looked at when one is made
	if opens(first) || !opens(second) {
		t.Errorf("after a week: the first %v, that of the next day %v", opens(first), opens(second))
	}
}

// shakeOnce makes one handshake with a server of the configuration.
func shakeOnce(t *testing.T, config *tls.Config) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	ended := make(chan error, 1)
	go func() { ended <- tls.Server(server, config).HandshakeContext(t.Context()) }()
	c := tls.Client(client, &tls.Config{
		RootCAs: authority(t).pool(), ServerName: "127.0.0.1", NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13,
		ClientSessionCache: tls.NewLRUClientSessionCache(1), // asks for tickets
	})
	if err := errors.Join(c.HandshakeContext(t.Context()), client.SetDeadline(time.Now().Add(20*time.Second))); err != nil {
		t.Error(err)
		_ = client.Close() // the other side ends, too
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}
