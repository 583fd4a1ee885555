package wire

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/epochkv/epochkv/bench/harness"
	bench "github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/certs"
	"github.com/epochkv/epochkv/internal/config"
)

// overTLS measures what TLS 1.3 with client certificates costs a unary durable put on kept connections.
func overTLS(axis harness.Axis) harness.Scenario {
	const secured, plain = "TLS 1.3", "plain text"
	return harness.Scenario{
		Name: "wire-tls-put", About: "Unary durable puts over TLS 1.3 with client certificates, and in plain text, on kept connections.",
		Unit: "puts", Axis: axis, Size: 100_000, Weight: float64(1 + len(axis.Points)),
		Arms: []harness.Arm{
			{Name: secured, Run: arm{start: startSecureKV, work: unaryPut}.run},
			{Name: plain, Run: arm{start: startKV, work: unaryPut}.run},
		},
		Figures: []harness.Figure{{Arm: secured, Against: plain, AtLeast: 0.85, Points: []int{64}, Source: "at least 0.85 of a put in plain text"}},
	}
}

// startSecureKV runs a whole kvserver that requires client certificates.
func startSecureKV(dir string) (*target, error) {
	now := time.Now()
	subject := certs.Subject{Name: "bench", NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour)}
	authority, err := certs.NewAuthority(subject)
	if err != nil {
		return nil, err
	}
	user, err := authority.Issue(subject)
	if err != nil {
		return nil, err
	}
	subject.Hosts = []string{"127.0.0.1"}
	server, err := authority.Issue(subject)
	if err != nil {
		return nil, err
	}
	c := config.Default()
	c.DataDir, c.Listen, c.HTTP, c.Memory = filepath.Join(dir, "data"), "127.0.0.1:0", "", 8*config.GiB
	in := func(name string) string { return filepath.Join(dir, name) }
	c.TLS = config.TLS{Cert: in("server.crt"), Key: in("server.key"), ClientCA: in("ca.crt"), ClientAuth: config.ClientAuthRequire, Min: config.TLS13}
	for name, text := range map[string][]byte{c.TLS.Cert: server.Cert, c.TLS.Key: server.Key, c.TLS.ClientCA: authority.PEM().Cert} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			return nil, err
		}
	}
	pair, err := tls.X509KeyPair(user.Cert, user.Key)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(authority.PEM().Cert) {
		return nil, errors.New("wire: the authority has no certificate")
	}
	address, stop, err := bench.StartServer(c)
	if err != nil {
		return nil, err
	}
	return &target{
		address: address, stop: stop,
		credentials: credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool, MinVersion: tls.VersionTLS13}),
	}, nil
}
