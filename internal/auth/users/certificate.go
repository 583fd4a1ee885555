package users

import (
	"crypto/x509"
	"encoding/asn1"
	"fmt"

	"github.com/epochkv/epochkv/internal/auth"
)

// CertificateRule says which name of a client certificate is that of its user.
type CertificateRule string

// Rules.
const (
	CertificateNone CertificateRule = "none"    // certificates say that a client may connect, and nothing more
	CertificateURI  CertificateRule = "san-uri" // its only URI
	CertificateDNS  CertificateRule = "san-dns" // its only DNS name
	CertificateCN   CertificateRule = "cn"      // the common name of its subject
)

// name is the user's name in a certificate. A certificate with several names of the kind is refused: which one is meant would
// depend on their order.
func (r CertificateRule) name(c *x509.Certificate) (string, error) {
	var names []string
	switch r {
	case CertificateURI:
		for _, u := range c.URIs {
			names = append(names, u.String())
		}
	case CertificateDNS:
		names = c.DNSNames
	case CertificateCN:
		names = commonNames(c)
	default:
		return "", auth.ErrUnauthenticated
	}
	if len(names) != 1 || checkName(names[0]) != nil {
		return "", fmt.Errorf("%w: the client certificate has no %s that names a user, or several", auth.ErrUnauthenticated, string(r))
	}
	return names[0], nil
}

// commonNames are all common names of the subject: Subject.CommonName is the last of them.
func commonNames(c *x509.Certificate) (names []string) {
	for _, n := range c.Subject.Names {
		if n.Type.Equal(commonName) {
			text, _ := n.Value.(string)
			names = append(names, text)
		}
	}
	return names
}

var commonName = asn1.ObjectIdentifier{2, 5, 4, 3}

// Certificate authenticates a client by its certificate, which the listener has verified. It neither waits nor reads the store.
// The error is auth.ErrUnauthenticated.
func (m *Manager) Certificate(c *x509.Certificate) (auth.Identity, error) {
	name, err := m.options.Rule.name(c)
	if err != nil {
		return auth.Identity{}, err
	}
	id := auth.Identity{User: name, Method: auth.MethodCertificate}
	_, err = m.Table().Verify(&id, m.options.Now())
	if err != nil {
		return auth.Identity{}, err
	}
	return id, nil
}
