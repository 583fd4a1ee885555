package client_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// selfSigned makes a certificate for 127.0.0.1 and the pool that trusts it.
func selfSigned(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

func TestTLSIsUsedAndChecked(t *testing.T) {
	certificate, pool := selfSigned(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(grpc.Creds(credentials.NewServerTLSFromCert(&certificate)))
	kvpb.RegisterAdminServiceServer(g, statusServer{})
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	for _, test := range []struct {
		name   string
		option client.Option
		works  bool
	}{
		{"trusted", client.WithTLS(&tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}), true},
		{"not trusted", client.WithTLS(&tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS13}), false},
		{"plain text", client.WithTimeout(time.Second), false},
	} {
		c, err := client.Dial(listener.Addr().String(), quick, test.option)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		if _, err := c.Status(ctx); (err == nil) != test.works {
			t.Errorf("%s: %v", test.name, err)
		}
		cancel()
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	g.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestAnswersAboveTheMessageLimitAreErrors(t *testing.T) {
	_, c := start(t, client.WithMaxMessage(1<<10))
	if _, err := c.Put(t.Context(), []byte("k"), make([]byte, 2<<10)); err == nil {
		t.Error("a message above the limit was sent")
	}
	if _, err := c.Put(t.Context(), []byte("k"), make([]byte, 512)); err != nil {
		t.Error(err)
	}
}
