package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"time"
)

// Authority signs certificates.
type Authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         PEM
}

// PEM is a certificate and its key as files have them.
type PEM struct{ Cert, Key []byte }

// Subject is what a certificate is for.
type Subject struct {
	Name                string
	Hosts               []string // DNS names and addresses; a certificate with any is a server's, else a client's
	NotBefore, NotAfter time.Time
}

// serialBits is the length of random serial numbers, which no two certificates share.
const serialBits = 127

// NewAuthority makes an authority with a new key.
func NewAuthority(subject Subject) (*Authority, error) {
	template, key, err := prepare(subject)
	if err != nil {
		return nil, err
	}
	template.IsCA, template.MaxPathLenZero = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	a := &Authority{certificate: template, key: key}
	if a.pem, err = a.sign(template, key); err != nil {
		return nil, err
	}
	block, _ := pem.Decode(a.pem.Cert)
	a.certificate, err = x509.ParseCertificate(block.Bytes)
	return a, err
}

// PEM is the authority's own certificate and key.
func (a *Authority) PEM() PEM { return a.pem }

// Issue makes a certificate with a new key.
func (a *Authority) Issue(subject Subject) (PEM, error) {
	template, key, err := prepare(subject)
	if err != nil {
		return PEM{}, err
	}
	template.KeyUsage, template.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if len(subject.Hosts) > 0 {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	for _, host := range subject.Hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return a.sign(template, key)
}

func prepare(subject Subject) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), serialBits))
	if err != nil {
		return nil, nil, err
	}
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{Organization: []string{"EpochKV"}, CommonName: subject.Name},
		NotBefore: subject.NotBefore, NotAfter: subject.NotAfter, BasicConstraintsValid: true,
	}, key, nil
}

func (a *Authority) sign(template *x509.Certificate, key *ecdsa.PrivateKey) (PEM, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return PEM{}, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return PEM{}, err
	}
	return PEM{
		Cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	}, nil
}
