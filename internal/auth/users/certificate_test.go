package users

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net/url"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/vfs"
)

// certificateOf is a certificate as a client shows it, with the names of a template.
func certificateOf(t testing.TB, template *x509.Certificate) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(1)
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func uriOf(t testing.TB, s string) *url.URL {
	t.Helper()
	u, err := url.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// namedAnn names ann in each way.
func namedAnn(t testing.TB) *x509.Certificate {
	t.Helper()
	return certificateOf(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: "ann"}, DNSNames: []string{"ann.example"}, URIs: []*url.URL{uriOf(t, "spiffe://example/ann")},
	})
}

// namedTwice has two names of each kind.
func namedTwice(t testing.TB) *x509.Certificate {
	t.Helper()
	return certificateOf(t, &x509.Certificate{
		Subject:  pkix.Name{ExtraNames: []pkix.AttributeTypeAndValue{{Type: commonName, Value: "eve"}, {Type: commonName, Value: "ann"}}},
		DNSNames: []string{"a", "b"}, URIs: []*url.URL{uriOf(t, "a:b"), uriOf(t, "a:c")},
	})
}

var rules = []CertificateRule{CertificateCN, CertificateDNS, CertificateURI}

// TestCertificatesNameUsers by the rule, and only if they name one.
func TestCertificatesNameUsers(t *testing.T) {
	ann := namedAnn(t)
	for rule, want := range map[CertificateRule]string{
		CertificateNone: "", "": "", CertificateCN: "ann", CertificateDNS: "ann.example", CertificateURI: "spiffe://example/ann",
	} {
		if got, err := rule.name(ann); got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", rule, got, err)
		}
	}
	invisible := certificateOf(t, &x509.Certificate{Subject: pkix.Name{CommonName: "a b"}})
	for _, rule := range rules {
		for what, c := range map[string]*x509.Certificate{"several": namedTwice(t), "none": certificateOf(t, &x509.Certificate{}), "invisible": invisible} {
			if got, err := rule.name(c); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("%s, %s: %q, %v", rule, what, got, err)
			}
		}
	}
	h := bootstrapped(t, vfs.NewMem())
	if id, err := h.Certificate(ann); err != nil || id.User != "ann" || id.Method != auth.MethodCertificate {
		t.Errorf("%+v, %v", id, err)
	}
	eve := certificateOf(t, &x509.Certificate{Subject: pkix.Name{CommonName: "eve"}})
	if _, err := h.Certificate(eve); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("a user that does not exist: %v", err)
	}
}

// Whatever a certificate has as names: it names at most one user, whose name a user could have, and which is the only one of its kind.
func FuzzCertificateNames(f *testing.F) {
	for _, c := range []*x509.Certificate{namedAnn(f), namedTwice(f), certificateOf(f, &x509.Certificate{})} {
		f.Add(c.Raw)
	}
	f.Fuzz(func(t *testing.T, der []byte) {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return
		}
		for _, rule := range rules {
			name, err := rule.name(c)
			if err != nil {
				if name != "" || !errors.Is(err, auth.ErrUnauthenticated) {
					t.Errorf("%s: %q, %v", rule, name, err)
				}
				continue
			}
			if checkName(name) != nil {
				t.Errorf("%s: no user can have the name %q", rule, name)
			}
			if n := map[CertificateRule]int{CertificateCN: len(commonNames(c)), CertificateDNS: len(c.DNSNames), CertificateURI: len(c.URIs)}[rule]; n != 1 {
				t.Errorf("%s: %q is one of %d names", rule, name, n)
			}
		}
	})
}

// A header names the user of a token only if it has exactly this token.
func FuzzBearer(f *testing.F) {
	h := bootstrapped(f, vfs.NewMem())
	_, secret := h.login("ann", "ann's secret")
	for _, header := range []string{
		"", "Bearer", "Bearer ", "Bearer " + secret, "bEARER " + secret, "Basic " + secret, secret, "Bearer " + secret + " ", "Bearer  " + secret,
		"Bearer " + strings.ToUpper(secret), "Bearer " + secret[:len(secret)-1], "Bearer " + h.BootstrapToken(), "Bearer epochkv_", "Bearer \x00" + secret,
	} {
		f.Add([]byte(header))
	}
	f.Fuzz(func(t *testing.T, header []byte) {
		id, err := h.Bearer(string(header))
		scheme, rest, _ := bytes.Cut(header, []byte(" "))
		if right := bytes.EqualFold(scheme, []byte("bearer")) && string(rest) == secret; right != (err == nil) || right != (id.User == "ann") {
			t.Errorf("%q: %+v, %v", header, id, err)
		}
		if err != nil && !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("%q: %v", header, err)
		}
	})
}
