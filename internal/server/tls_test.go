package server

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"flag"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/certs"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/telemetry"
)

func subjectFor(name string, lifetime time.Duration, hosts ...string) certs.Subject {
	return certs.Subject{Name: name, Hosts: hosts, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lifetime)}
}

// testCA is an authority of a test.
type testCA struct {
	*certs.Authority
	t testing.TB
}

func newTestCA(t testing.TB) testCA {
	t.Helper()
	a, err := certs.NewAuthority(subjectFor("ca", time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return testCA{a, t}
}

func (a testCA) issue(s certs.Subject) certs.PEM {
	a.t.Helper()
	p, err := a.Issue(s)
	if err != nil {
		a.t.Fatal(err)
	}
	return p
}

func (a testCA) server() certs.PEM { return a.issue(subjectFor("server", time.Hour, "127.0.0.1")) }

// client is a client of this authority that trusts servers of all given authorities.
func (a testCA) client(trusts ...testCA) *tls.Config {
	a.t.Helper()
	p := a.issue(subjectFor("client", time.Hour))
	pair, err := tls.X509KeyPair(p.Cert, p.Key)
	if err != nil {
		a.t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool(trusts...), MinVersion: tls.VersionTLS13}
}

func pool(of ...testCA) *x509.CertPool {
	p := x509.NewCertPool()
	for _, a := range of {
		p.AppendCertsFromPEM(a.PEM().Cert)
	}
	return p
}

// certFiles are the files that a server of a test reads.
type certFiles struct {
	t testing.TB
	c config.TLS
}

func newCertFiles(t testing.TB) *certFiles {
	dir := t.TempDir()
	return &certFiles{t: t, c: config.TLS{
		Cert: filepath.Join(dir, "server.crt"), Key: filepath.Join(dir, "server.key"), ClientCA: filepath.Join(dir, "ca.crt"),
		ClientAuth: config.ClientAuthRequire, Min: config.TLS13,
	}}
}

func (f *certFiles) write(server certs.PEM, clients ...testCA) {
	f.t.Helper()
	var authorities []byte
	for _, a := range clients {
		authorities = append(authorities, a.PEM().Cert...)
	}
	for name, text := range map[string][]byte{f.c.Cert: server.Cert, f.c.Key: server.Key, f.c.ClientCA: authorities} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *certFiles) use(c *config.Config) { c.TLS = f.c }

// secured is a connection over TLS.
func (h *harness) secured(t testing.TB, c *tls.Config) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+h.Address(), grpc.WithTransportCredentials(credentials.NewTLS(c)), h.token())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func putOver(t testing.TB, conn *grpc.ClientConn) error {
	_, err := pb.NewKVServiceClient(conn).Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Durability: pb.Durability_DURABILITY_ASYNC})
	return err
}

func (h *harness) getHTTPS(t testing.TB, address string, c *tls.Config) (int, string, error) {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: c}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "https://"+address+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := (&http.Client{Transport: transport}).Do(h.authorize(request))
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text), err
}

// TestTLSListenersServeOnlyClientsWithCertificates: both listeners speak TLS, accept clients of the
// authority alone, count how handshakes end, and tell a client without TLS what is wrong.
func TestTLSListenersServeOnlyClientsWithCertificates(t *testing.T) {
	ca, stranger, files := newTestCA(t), newTestCA(t), newCertFiles(t)
	files.write(ca.server(), ca)
	h := mustStart(t, files.use)
	if err := putOver(t, h.secured(t, ca.client(ca))); err != nil {
		t.Fatal(err)
	}
	without := ca.client(ca)
	without.Certificates = nil
	for name, c := range map[string]*tls.Config{
		"no certificate": without, "a certificate of another authority": stranger.client(ca), "another server is expected": ca.client(stranger),
	} {
		if err := putOver(t, h.secured(t, c)); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := h.getHTTPS(t, h.HTTPAddress(), c); err == nil {
			t.Errorf("%s: metrics were served", name)
		}
	}
	for _, address := range []string{h.Address(), h.HTTPAddress()} {
		answer, err := http.Get("http://" + address + "/healthz") //nolint:noctx // answers at once
		if err != nil || answer.StatusCode != http.StatusBadRequest {
			t.Errorf("%s without TLS: %v, %v", address, answer, err)
			continue
		}
		text, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if !strings.Contains(string(text), "TLS only") {
			t.Errorf("%s without TLS: %q", address, text)
		}
	}
	code, metrics, err := h.getHTTPS(t, h.HTTPAddress(), ca.client(ca))
	if err != nil || code != http.StatusOK {
		t.Fatalf("%d, %v", code, err)
	}
	for _, want := range []string{
		`kvserver_tls_handshakes_total{result="ok"}`, `kvserver_tls_certificate_expiry_timestamp_seconds{listener="grpc"}`,
		`kvserver_tls_certificate_expiry_timestamp_seconds{listener="http"}`, `kvserver_tls_reloads_total{result="ok"} 0`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s in\n%s", want, metrics)
		}
	}
	eventually(t, "all handshakes are counted", func() bool {
		n := h.stats().TLS.Handshakes
		return n[telemetry.HandshakeOK] == 2 && n[telemetry.HandshakePlain] == 2 && n[telemetry.HandshakeClientCertificate] >= 4 && n[telemetry.HandshakeRefused] >= 2
	})
}

// TestTLS12IsServedIfAllowed: a client of 1.2 is served with --tls-min 1.2, by a cipher that HTTP/2 permits.
func TestTLS12IsServedIfAllowed(t *testing.T) {
	ca, files := newTestCA(t), newCertFiles(t)
	files.write(ca.server(), ca)
	files.c.Min = config.TLS12
	h := mustStart(t, files.use)
	c := ca.client(ca)
	c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if err := putOver(t, h.secured(t, c)); err != nil {
		t.Fatal(err)
	}
	c.CipherSuites, c.NextProtos = []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA}, []string{"h2"}
	if conn, err := tls.Dial("tcp", h.Address(), c); err == nil {
		_ = conn.Close()
		t.Error("a cipher that HTTP/2 forbids was accepted")
	}
}

// TestCertificatesAreReplacedUnderLoad: while certificates and authorities are replaced, no request of
// open connections fails, and none of new ones.
func TestCertificatesAreReplacedUnderLoad(t *testing.T) {
	cas := []testCA{newTestCA(t), newTestCA(t)}
	files := newCertFiles(t)
	sets := []certs.PEM{cas[0].server(), cas[1].server()}
	files.write(sets[0], cas...)
	h := mustStart(t, files.use)
	ctx, stop := context.WithCancel(testContext(t))
	var load sync.WaitGroup
	var requests, connections atomic.Int64
	for i := range 4 {
		client := cas[i%2].client(cas...)
		kept := i < 2
		load.Go(func() {
			var conn *grpc.ClientConn
			for ctx.Err() == nil {
				if conn == nil {
					conn = h.secured(t, client)
					connections.Add(1)
				}
				if err := putOver(t, conn); err != nil {
					t.Errorf("kept %v: %v", kept, err)
					return
				}
				requests.Add(1)
				if !kept {
					_ = conn.Close()
					conn = nil
				}
			}
		})
	}
	admin := pb.NewAdminServiceClient(h.secured(t, cas[0].client(cas...)))
	for i := range 4 {
		files.write(sets[(i+1)%2], cas...)
		done, err := admin.ReloadTLS(testContext(t), &pb.ReloadTLSRequest{})
		if err != nil || !done.GetChanged() || done.GetClientAuthorities() != 2 {
			t.Fatalf("%v, %v", done, err)
		}
		before := connections.Load() + 2
		eventually(t, "new connections are served with it", func() bool { return connections.Load() >= before || t.Failed() })
	}
	stop()
	load.Wait()
	t.Logf("%d requests, %d connections", requests.Load(), connections.Load())
}

// TestCertificateAuthorityRotatesByReloadsAlone: the new authority is added, certificates are replaced,
// the old one is removed. Clients of both work in between; afterwards the old one's are refused, and its
// open connections stay.
func TestCertificateAuthorityRotatesByReloadsAlone(t *testing.T) {
	before, after, files := newTestCA(t), newTestCA(t), newCertFiles(t)
	oldServer, newServer := before.server(), after.server()
	files.write(oldServer, before)
	h := mustStart(t, files.use)
	oldClient, newClient := before.client(before, after), after.client(before, after)
	open := h.secured(t, oldClient)
	step := func(name string, server certs.PEM, oldWorks, newWorks bool, authorities ...testCA) {
		t.Helper()
		files.write(server, authorities...)
		if _, err := h.endpoints.tls.source.Reload(); err != nil {
			t.Fatal(err)
		}
		for who, c := range map[string]struct {
			config *tls.Config
			works  bool
		}{"old": {oldClient, oldWorks}, "new": {newClient, newWorks}} {
			if err := putOver(t, h.secured(t, c.config)); (err == nil) != c.works {
				t.Errorf("%s: the %s client: %v", name, who, err)
			}
		}
		if err := putOver(t, open); err != nil {
			t.Errorf("%s: the open connection: %v", name, err)
		}
	}
	step("at first", oldServer, true, false, before)
	step("both authorities", oldServer, true, true, before, after)
	step("new certificate", newServer, true, true, before, after)
	step("old authority removed", newServer, false, true, after)
}

// TestCertificateReloadThatFailsIsReported: a wrong file changes nothing, and answer, metric, condition and
// log say so until a reload succeeds.
func TestCertificateReloadThatFailsIsReported(t *testing.T) {
	ca, files := newTestCA(t), newCertFiles(t)
	server := ca.server()
	files.write(server, ca)
	h := mustStart(t, files.use)
	conn := h.secured(t, ca.client(ca))
	admin := pb.NewAdminServiceClient(conn)
	wrong := server
	wrong.Key = ca.server().Key
	files.write(wrong, ca)
	_, err := admin.ReloadTLS(testContext(t), &pb.ReloadTLSRequest{})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TLS_RELOAD_FAILED)
	if !strings.Contains(err.Error(), files.c.Key) {
		t.Errorf("%v does not name the file", err)
	}
	if err := putOver(t, h.secured(t, ca.client(ca))); err != nil {
		t.Errorf("the configuration before does not serve: %v", err)
	}
	active := func() bool {
		h.compareCounters()
		for _, c := range h.observe() {
			if c.Name == "tls-reload-failed" && c.Severity == health.Warning && strings.Contains(c.Cause, files.c.Key) {
				return true
			}
		}
		return false
	}
	if !active() {
		t.Error("no condition")
	}
	if st := h.stats().TLS; st.Failures != 1 || st.Reloads != 0 {
		t.Errorf("%+v", st)
	}
	if !strings.Contains(h.log.String(), "could not be loaded") {
		t.Error("no line in the log")
	}
	files.write(server, ca)
	if done, err := admin.ReloadTLS(testContext(t), &pb.ReloadTLSRequest{}); err != nil || done.GetChanged() {
		t.Errorf("%v, %v", done, err)
	}
	if active() {
		t.Error("the condition is active after a reload that succeeded")
	}
}

// TestRevokedClientIsRefusedByBothListeners: after a reload of the list, as after a start with it.
func TestRevokedClientIsRefusedByBothListeners(t *testing.T) {
	ca, files := newTestCA(t), newCertFiles(t)
	files.write(ca.server(), ca)
	files.c.ClientCRL = filepath.Join(t.TempDir(), "ca.crl")
	client, other := ca.client(ca), ca.client(ca)
	ca.revoke(files.c.ClientCRL, time.Now().Add(-time.Minute))
	h := mustStart(t, files.use, func(c *config.Config) { c.HTTP = "127.0.0.1:0" })
	check := func(who *tls.Config, refused bool) {
		t.Helper()
		if err := putOver(t, h.secured(t, who)); refused != (err != nil) {
			t.Errorf("gRPC: %v", err)
		}
		if _, _, err := h.getHTTPS(t, h.HTTPAddress(), who); refused != (err != nil) {
			t.Errorf("HTTP: %v", err)
		}
	}
	check(client, false)
	h.compareCounters()
	if !slices.ContainsFunc(h.observe(), func(c health.Condition) bool { return c.Name == "tls-revocation-list-old" }) {
		t.Error("no condition says that the list is old")
	}
	ca.revoke(files.c.ClientCRL, time.Now().Add(time.Hour), client)
	if done, err := pb.NewAdminServiceClient(h.secured(t, other)).ReloadTLS(testContext(t), &pb.ReloadTLSRequest{}); err != nil || !done.GetChanged() {
		t.Fatalf("%v, %v", done, err)
	}
	check(client, true)
	check(other, false)
	eventually(t, "the handshakes are counted as refused for their certificates", func() bool { // a client may know before
		return h.stats().TLS.Handshakes[telemetry.HandshakeClientCertificate] >= 2
	})
}

// revoke writes a list of the authority with certificates of clients.
func (a testCA) revoke(file string, next time.Time, clients ...*tls.Config) {
	a.t.Helper()
	pair, err := tls.X509KeyPair(a.PEM().Cert, a.PEM().Key)
	if err != nil {
		a.t.Fatal(err)
	}
	list := x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: next}
	for _, c := range clients {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{
			SerialNumber: c.Certificates[0].Leaf.SerialNumber, RevocationTime: time.Now(),
		})
	}
	der, err := x509.CreateRevocationList(rand.Reader, &list, pair.Leaf, pair.PrivateKey.(crypto.Signer))
	if err == nil {
		err = os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der}), 0o600)
	}
	if err != nil {
		a.t.Fatal(err)
	}
}

func TestReloadWithoutTLSIsRefused(t *testing.T) {
	h := mustStart(t)
	_, err := h.admin.ReloadTLS(testContext(t), &pb.ReloadTLSRequest{})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TLS_NOT_CONFIGURED)
}

// TestTicketsEndWithTheirCertificates: without client certificates a session is resumed, until the
// certificates are replaced. With them it never is: a ticket would outlive the right to connect.
func TestTicketsEndWithTheirCertificates(t *testing.T) {
	ca, files := newTestCA(t), newCertFiles(t)
	files.write(ca.server(), ca)
	resumes := func(h *harness, c *tls.Config) bool {
		t.Helper()
		conn, err := tls.Dial("tcp", h.Address(), c)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Read(make([]byte, 1)); err != nil { // the ticket comes before the server's settings
			t.Fatal(err)
		}
		return conn.ConnectionState().DidResume
	}
	for auth, want := range map[config.ClientAuth]bool{config.ClientAuthNone: true, config.ClientAuthRequest: false, config.ClientAuthRequire: false} {
		c := ca.client(ca)
		c.ClientSessionCache, c.NextProtos = tls.NewLRUClientSessionCache(1), []string{"h2"}
		h := mustStart(t, files.use, func(c *config.Config) {
			if c.TLS.ClientAuth = auth; auth == config.ClientAuthNone {
				c.TLS.ClientCA = ""
			}
		})
		if resumes(h, c) {
			t.Errorf("%s: the first connection was resumed", auth)
		}
		if got := resumes(h, c); got != want {
			t.Errorf("%s: the second connection was resumed: %v", auth, got)
		}
		files.write(ca.server(), ca)
		if changed, err := h.endpoints.tls.source.Reload(); !changed || err != nil {
			t.Fatal(changed, err)
		}
		if resumes(h, c) {
			t.Errorf("%s: a connection was resumed after the certificates had been replaced", auth)
		}
	}
}

// TestSignalReloadsCertificates: what SIGHUP asks for is done.
func TestSignalReloadsCertificates(t *testing.T) {
	ca, files := newTestCA(t), newCertFiles(t)
	files.write(ca.server(), ca)
	asked := make(chan struct{}, 1)
	c := testConfig()
	files.use(&c)
	s := &Server{configuration: configuration{config: c}}
	s.log.init(slog.New(slog.DiscardHandler), func() time.Duration { return 0 })
	if err := s.openTLS(); err != nil {
		t.Fatal(err)
	}
	s.drain.reload = asked
	ctx, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { s.watchTLS(ctx) })
	defer watching.Wait()
	defer stop()
	before := s.endpoints.tls.source.Config()
	files.write(ca.server(), ca)
	asked <- struct{}{}
	eventually(t, "the certificates are replaced", func() bool { return s.endpoints.tls.source.Config() != before })
}

// TestWrongCertificatesAreRefusedAtStart: the error names the file, and says that a restart does not help.
func TestWrongCertificatesAreRefusedAtStart(t *testing.T) {
	ca, files := newTestCA(t), newCertFiles(t)
	files.write(ca.issue(subjectFor("server", -time.Minute, "127.0.0.1")), ca)
	c := testConfig()
	files.use(&c)
	_, err := Open(t.Context(), c, slog.New(slog.DiscardHandler))
	if !errors.Is(err, ErrConfiguration) || !strings.Contains(err.Error(), "expired") {
		t.Errorf("%v", err)
	}
}

var silentHandshakes = flag.Int("handshakes.silent", 600, "how many clients TestHandshakesThatNeverEndKeepNoTLSClientOut has that say nothing")

// TestHandshakesThatNeverEndKeepNoTLSClientOut: many clients connect and say nothing, or half
// of something, on both listeners. Healthy clients connect meanwhile and are served, and the server
// holds no more than its bounds.
func TestHandshakesThatNeverEndKeepNoTLSClientOut(t *testing.T) {
	silent := *silentHandshakes
	ca, files := newTestCA(t), newCertFiles(t)
	files.write(ca.server(), ca)
	h := mustStart(t, files.use)
	client := ca.client(ca)
	if err := putOver(t, h.secured(t, client)); err != nil {
		t.Fatal(err)
	}
	conns := make(chan net.Conn, silent)
	defer func() {
		close(conns)
		for conn := range conns {
			_ = conn.Close()
		}
	}()
	var attack sync.WaitGroup
	for worker := range 4 {
		attack.Go(func() {
			for i := range silent / 4 {
				address := h.Address()
				if (worker+i)%10 == 0 {
					address = h.HTTPAddress()
				}
				conn, err := net.Dial("tcp", address)
				if err != nil {
					t.Errorf("connection %d: %v", i, err)
					return
				}
				conns <- conn
				if i%2 == 0 {
					_, _ = conn.Write([]byte{22, 3, 1, 2, 0, 1, 0, 1, 0xfc}) // the beginning of a hello
				}
			}
		})
	}
	// A handshake that the attack makes the oldest is repeated, as clients do.
	for i := range 5 {
		request := &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Durability: pb.Durability_DURABILITY_ASYNC}
		if _, err := pb.NewKVServiceClient(h.secured(t, client)).Put(testContext(t), request, grpc.WaitForReady(true)); err != nil {
			t.Fatalf("client %d beside them: %v", i, err)
		}
		eventually(t, "metrics are served beside them", func() bool {
			_, _, err := h.getHTTPS(t, h.HTTPAddress(), client)
			return err == nil
		})
	}
	attack.Wait()
	if err := putOver(t, h.secured(t, client)); err != nil {
		t.Errorf("after them: %v", err)
	}
	if n := h.stats().Connections; n > 30 {
		t.Errorf("%d connections are counted", n)
	}
	var crowded uint64
	eventually(t, "the oldest have ended", func() bool {
		crowded = h.stats().TLS.Handshakes[telemetry.HandshakeTooMany]
		return int(crowded) >= silent-config.HandshakesMax-config.HandshakesHTTPMax
	})
}

// TestTLSHandshakeMemoryStaysInItsBound: handshakes whose clients have sent as much as they may take no
// more memory than the bound of resident memory counts for them.
func TestTLSHandshakeMemoryStaysInItsBound(t *testing.T) {
	ca, files := newTestCA(t), newCertFiles(t)
	files.write(ca.server(), ca)
	h := mustStart(t, files.use)
	measure := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse + m.StackInuse)
	}
	before := measure()
	hello := append([]byte{1, 0, 0xff, 0xf0}, make([]byte, 32<<10)...) // claims 64 KiB
	for range config.HandshakesMax {
		conn, err := net.Dial("tcp", h.Address())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		sent := 0
		for rest := hello; len(rest) > 0 && sent < 31<<10; {
			n := min(len(rest), 16<<10, 31<<10-sent)
			_, _ = conn.Write(append([]byte{22, 3, 1, byte(n >> 8), byte(n)}, rest[:n]...))
			rest, sent = rest[n:], sent+n
		}
	}
	time.Sleep(200 * time.Millisecond) // they are read
	perHandshake := (measure() - before) / config.HandshakesMax
	t.Logf("%d bytes a handshake", perHandshake)
	if perHandshake > 128<<10 {
		t.Errorf("a handshake takes %d bytes, and the bound counts 128 KiB", perHandshake)
	}
}

// TestCertificateExpiryIsACondition: a warning from 14 days, degraded from 3 days on.
func TestCertificateExpiryIsACondition(t *testing.T) {
	const day = 24 * time.Hour
	for left, want := range map[time.Duration]string{
		15 * day: "", 13 * day: "warning", 2 * day: "degraded", 10 * time.Minute: "degraded",
	} {
		ca, files := newTestCA(t), newCertFiles(t)
		files.write(ca.issue(subjectFor("server", left, "127.0.0.1")))
		files.c.ClientAuth, files.c.ClientCA = config.ClientAuthNone, ""
		s := &Server{configuration: configuration{config: config.Config{TLS: files.c}}}
		if err := s.openTLS(); err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, c := range s.endpoints.tls.conditions(time.Now()) {
			got += c.Severity.String()
		}
		if got != want {
			t.Errorf("%v left: %q, want %q", left, got, want)
		}
	}
}
