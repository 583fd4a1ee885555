package tracing

import (
	"crypto/tls"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/certs"
	"github.com/epochkv/epochkv/internal/tracing/tracetest"
)

// secureReceiver is the address of a receiver with a certificate for a host, of a new authority, and the authority in PEM form.
func secureReceiver(t *testing.T, host string) (address string, authority []byte) {
	t.Helper()
	subject := func(hosts ...string) certs.Subject {
		return certs.Subject{Name: "of a test", Hosts: hosts, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	}
	a, err := certs.NewAuthority(subject())
	if err != nil {
		t.Fatal(err)
	}
	text, err := a.Issue(subject(host))
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(text.Cert, text.Key)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(tracetest.NewSecureReceiver(t, &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}).HTTP)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host, a.PEM().Cert
}

// TestAuthoritiesOfAReceiverAreReplacedWithoutARestart: each connection is checked with the file as it is then, or as it was when it
// could be used.
func TestAuthoritiesOfAReceiverAreReplacedWithoutARestart(t *testing.T) {
	_, old := secureReceiver(t, "127.0.0.1")
	address, authority := secureReceiver(t, "127.0.0.1")
	other, of := secureReceiver(t, "other.example")
	file := filepath.Join(t.TempDir(), "ca.pem")
	replace := func(text []byte) {
		t.Helper()
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	replace(old)
	config, err := TLSFiles{CA: file}.config("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	connects := func(to string) bool {
		c, err := tls.Dial("tcp", to, config)
		if err != nil {
			return false
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		return true
	}
	if connects(address) {
		t.Error("connected to a receiver of an unknown authority")
	}
	replace(authority)
	if !connects(address) {
		t.Error("the new authority is not used")
	}
	replace([]byte("half"))
	if !connects(address) {
		t.Error("a file that cannot be used has taken the place of one that could")
	}
	replace(of)
	if connects(address) {
		t.Error("the old authority is still used")
	}
	if connects(other) {
		t.Error("connected to a receiver with a certificate for another name")
	}
}
