package tracing

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"sync/atomic"
)

// config loads the files for connections to a host. Each handshake reads them again, so that certificates and authorities are
// rotated without a restart.
func (f TLSFiles) config(host string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.CA != "" {
		a := &authorities{file: f.CA, host: host}
		if _, err := a.load(); err != nil { // now, rather than at each connection
			return nil, err
		}
		config.InsecureSkipVerify = true //nolint:gosec // verify does the same, with the authorities of now
		config.VerifyConnection = a.verify
	}
	if f.Cert == "" {
		return config, nil
	}
	load := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		return &pair, err
	}
	if _, err := load(nil); err != nil {
		return nil, err
	}
	config.GetClientCertificate = load
	return config, nil
}

// authorities verify the certificate of a receiver.
type authorities struct {
	file string
	host string                        // that the certificate must be for
	last atomic.Pointer[x509.CertPool] // that could be loaded; never nil after the first load
}

// load reads the file. If it cannot be used, because it is being replaced for instance, what was loaded before stays in force.
func (a *authorities) load() (*x509.CertPool, error) {
	text, err := os.ReadFile(a.file)
	pool := x509.NewCertPool()
	if err == nil && !pool.AppendCertsFromPEM(text) {
		err = errors.New(a.file + " has no certificate in PEM form")
	}
	if err == nil {
		a.last.Store(pool)
		return pool, nil
	}
	if last := a.last.Load(); last != nil {
		return last, nil
	}
	return nil, err
}

// verify checks a receiver as crypto/tls does with RootCAs: its chain, its times and its name.
func (a *authorities) verify(s tls.ConnectionState) error {
	pool, err := a.load()
	if err != nil {
		return err
	}
	options := x509.VerifyOptions{Roots: pool, Intermediates: x509.NewCertPool(), DNSName: a.host}
	for _, c := range s.PeerCertificates[1:] {
		options.Intermediates.AddCert(c)
	}
	if _, err := s.PeerCertificates[0].Verify(options); err != nil {
		return &tls.CertificateVerificationError{UnverifiedCertificates: s.PeerCertificates, Err: err}
	}
	return nil
}
