package certs

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"
)

// revocations are the certificates that authorities have revoked.
type revocations struct {
	revoked map[revocation]bool
	next    time.Time // when the first list should have been replaced; zero without lists that say so
}

// revocation is a certificate: the key of the authority that has signed it, and its serial number.
type revocation struct{ authority, serial string }

func revocationOf(authority *x509.Certificate, serial []byte) revocation {
	return revocation{string(authority.RawSubjectPublicKeyInfo), string(serial)}
}

var errRevoked = errors.New("the certificate has been revoked")

// parseRevocations reads every list of a file. Each must be signed by one of the authorities.
func parseRevocations(name string, text []byte, authorities []*x509.Certificate) (r revocations, err error) {
	r.revoked = map[revocation]bool{}
	lists := 0
	err = eachBlock(name, text, func(number int, block *pem.Block) error {
		if block.Type != "X509 CRL" {
			return fmt.Errorf("%s: PEM block %d is a %s; expected X509 CRL (openssl crl converts it)", name, number, block.Type)
		}
		lists++
		list, err := x509.ParseRevocationList(block.Bytes)
		if err != nil {
			return fmt.Errorf("%s: list %d: %w", name, lists, err)
		}
		signer := slices.IndexFunc(authorities, func(a *x509.Certificate) bool { return list.CheckSignatureFrom(a) == nil })
		if signer < 0 {
			return fmt.Errorf("%s: list %d, of %s, is signed by none of the client authorities", name, lists, list.Issuer)
		}
		r.add(list, authorities[signer])
		return nil
	})
	if err == nil && lists == 0 {
		err = fmt.Errorf("%s has no list in PEM form", name)
	}
	return r, err
}

func (r *revocations) add(list *x509.RevocationList, signer *x509.Certificate) {
	for _, entry := range list.RevokedCertificateEntries {
		r.revoked[revocationOf(signer, entry.SerialNumber.Bytes())] = true
	}
	if next := list.NextUpdate; !next.IsZero() && (r.next.IsZero() || next.Before(r.next)) {
		r.next = next
	}
}

// verify refuses a client if each chain from its certificate to an authority has a certificate that was revoked.
func (r *revocations) verify(s tls.ConnectionState) error {
	valid := func(chain []*x509.Certificate) bool { return !r.revokes(chain) }
	if len(s.PeerCertificates) == 0 || slices.ContainsFunc(s.VerifiedChains, valid) {
		return nil
	}
	return &tls.CertificateVerificationError{UnverifiedCertificates: s.PeerCertificates, Err: errRevoked}
}

// revokes reports whether a certificate of the chain was revoked by the authority that has signed it.
func (r *revocations) revokes(chain []*x509.Certificate) bool {
	for i := range len(chain) - 1 {
		if r.revoked[revocationOf(chain[i+1], chain[i].SerialNumber.Bytes())] {
			return true
		}
	}
	return false
}
