package certs

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func mustParse(t *testing.T, p PEM) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(p.Cert)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// mustRevoke is a list of an authority.
func mustRevoke(t *testing.T, a *Authority, next time.Time, revoked ...PEM) []byte {
	t.Helper()
	list := x509.RevocationList{Number: big.NewInt(1), ThisUpdate: testNow.Add(-time.Hour), NextUpdate: next}
	for _, p := range revoked {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{
			SerialNumber: mustParse(t, p).SerialNumber, RevocationTime: testNow.Add(-time.Minute),
		})
	}
	der, err := x509.CreateRevocationList(rand.Reader, &list, a.certificate, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
}

// handshake is the error of the server.
func handshake(t *testing.T, s *Source, client PEM) error {
	t.Helper()
	pair, err := tls.X509KeyPair(client.Cert, client.Key)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := net.Pipe()
	defer func() { _ = errors.Join(ours.Close(), theirs.Close()) }()
	go func() {
		c := tls.Client(theirs, &tls.Config{Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true}) //nolint:gosec // the server is what is tested
		if c.Handshake() == nil {
			_, _ = c.Read(make([]byte, 1)) // the server's alert
		}
	}()
	return tls.Server(ours, s.Config()).Handshake()
}

// TestRevokedClientsAreRefused: a certificate in a list of the authority that has signed it is refused from the next load on, and
// no other one is.
func TestRevokedClientsAreRefused(t *testing.T) {
	first, second := mustAuthority(t, "ca"), mustAuthority(t, "ca") // the same name, after its key was replaced
	f := testFiles(t)
	f.ClientCRL = filepath.Join(filepath.Dir(f.Cert), "ca.crl")
	f.mustWrite(t, mustIssue(t, first, testSubject("server", "localhost")), first, second)
	good, bad, other := mustIssue(t, first, testSubject("good")), mustIssue(t, first, testSubject("bad")), mustIssue(t, second, testSubject("bad"))
	next := testNow.Add(time.Hour)
	mustWrite(t, f.ClientCRL, mustRevoke(t, first, next), mustRevoke(t, second, next.Add(time.Hour), bad))
	s, err := Open(f)
	if err != nil {
		t.Fatal(err)
	}
	check := func(step string, client PEM, refused bool) {
		t.Helper()
		err := handshake(t, s, client)
		var failed *tls.CertificateVerificationError
		if refused != errors.Is(err, errRevoked) || refused != errors.As(err, &failed) || !refused && err != nil {
			t.Errorf("%s: %v", step, err)
		}
	}
	check("the serial number is in the list of another authority", bad, false)
	if i := s.Info(); i.Revoked != 1 || !i.RevocationNextUpdate.Equal(next.Truncate(time.Second).UTC()) {
		t.Errorf("%d revoked, next update %v, want %v", i.Revoked, i.RevocationNextUpdate, next)
	}
	mustWrite(t, f.ClientCRL, mustRevoke(t, first, testNow.Add(-time.Minute), bad), mustRevoke(t, second, next))
	if changed, err := s.Reload(); !changed || err != nil {
		t.Fatalf("changed %v, %v", changed, err)
	}
	check("revoked, by a list that should have been replaced", bad, true)
	check("another certificate", good, false)
	check("another authority of the same name", other, false)
}

// TestRevocationListsThatCannotBeUsedChangeNothing: a list that says nothing about the clients is not passed over.
func TestRevocationListsThatCannotBeUsedChangeNothing(t *testing.T) {
	ca, stranger := mustAuthority(t, "ca"), mustAuthority(t, "stranger")
	next := testNow.Add(time.Hour)
	list := mustRevoke(t, ca, next)
	for name, c := range map[string]struct {
		text []byte
		want string
	}{
		"none":              {nil, "has no list"},
		"of a stranger":     {mustRevoke(t, stranger, next), "signed by none of the client authorities"},
		"half":              {list[:len(list)/2], "PEM block 1 is not complete"},
		"half of a second":  {append(append([]byte{}, list...), list[:len(list)/2]...), "PEM block 2 is not complete"},
		"a certificate":     {ca.PEM().Cert, "is a CERTIFICATE; expected X509 CRL"},
		"of another format": {pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: []byte("no list")}), "list 1"},
	} {
		f := testFiles(t)
		f.ClientCRL = filepath.Join(filepath.Dir(f.Cert), "ca.crl")
		f.mustWrite(t, mustIssue(t, ca, testSubject("server", "localhost")), ca)
		mustWrite(t, f.ClientCRL, list)
		s, err := Open(f)
		if err != nil {
			t.Fatal(err)
		}
		before := s.Config()
		mustWrite(t, f.ClientCRL, c.text)
		if _, err := s.Reload(); err == nil || !strings.Contains(err.Error(), c.want) || s.Config() != before {
			t.Errorf("%s: the reload ended with %v, want %q", name, err, c.want)
		}
		if _, err := Open(f); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: the first load ended with %v, want %q", name, err, c.want)
		}
		if err := os.Remove(f.ClientCRL); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Reload(); err == nil || s.Config() != before {
			t.Errorf("%s: a list that was removed: %v", name, err)
		}
	}
}
