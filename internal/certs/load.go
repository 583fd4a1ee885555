package certs

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Files are what a Source reads.
type Files struct {
	Cert, Key  string // PEM: the certificate with its intermediates, and its key
	ClientCA   string // PEM: the authorities of client certificates, any number; empty if there is none
	ClientCRL  string // PEM: their revocation lists, any number; empty if there is none, or no ClientCA
	ClientAuth tls.ClientAuthType
	MinVersion uint16
}

// Info is about a state, for operators.
type Info struct {
	Subject  string
	Names    []string // DNS names and addresses that the certificate is for
	Serial   string
	NotAfter time.Time // the first time at which a certificate of the chain expires

	KeyExposed bool // accounts that have nothing to do with the file may read the key

	ClientAuthorities         int
	ClientAuthoritiesNotAfter time.Time // when the last of them expires; zero without any
	Revoked                   int       // certificates in the revocation lists
	RevocationNextUpdate      time.Time // when the first of the lists should have been replaced; zero if none says so
}

// state is the result of one load.
type state struct {
	config *tls.Config
	info   Info
	digest [sha256.Size]byte // of all files
}

// fileBytesMax bounds a file, which may be the wrong one: a device, or a file of data.
const fileBytesMax = 1 << 20

// errChanging means that the files were replaced while they were read.
var errChanging = errors.New("the files changed while they were read; they are read again when they are stable")

// stamp is what the file system says about a file.
type stamp struct {
	modified    time.Time
	size        int64
	inode       uint64
	unreachable string // why there is none
}

// filesMax is how many files a source has at most, and the indexes of files that it may have.
const (
	filesMax  = 4
	fileCA    = 2
	fileLists = 3
)

func (f *Files) names() []string {
	names := []string{f.Cert, f.Key}
	if f.ClientCA != "" {
		names = append(names, f.ClientCA)
		if f.ClientCRL != "" {
			names = append(names, f.ClientCRL)
		}
	}
	return names
}

func (f *Files) stamps() (stamps [filesMax]stamp) {
	for i, name := range f.names() {
		info, err := os.Stat(name)
		if err != nil {
			stamps[i].unreachable = err.Error()
			continue
		}
		stamps[i] = stamp{modified: info.ModTime(), size: info.Size(), inode: inode(info)}
	}
	return stamps
}

// load reads and checks all files.
func (f *Files) load(now func() time.Time) (*state, error) {
	before := f.stamps()
	var texts [filesMax][]byte
	var modes [filesMax]fs.FileMode
	digest := sha256.New()
	for i, name := range f.names() {
		var err error
		if texts[i], modes[i], err = readFile(name); err != nil {
			return nil, err
		}
		fmt.Fprintf(digest, "%d:", len(texts[i]))
		digest.Write(texts[i])
	}
	at := now()
	if f.stamps() != before {
		return nil, errChanging
	}
	s, err := f.parse(texts, at)
	if err != nil {
		return nil, err
	}
	s.digest = [sha256.Size]byte(digest.Sum(nil))
	s.info.KeyExposed = modes[1].Perm()&othersMay != 0
	return s, nil
}

// othersMay are the permissions that a key must not have. A group may have some: Kubernetes gives a
// secret to the group of the server's account.
const othersMay = 0o007

// readFile reads a regular file. It does not wait: opening a pipe would, until a program writes to it.
func readFile(name string) ([]byte, fs.FileMode, error) {
	file, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, explained(err, os.Geteuid())
	}
	defer func() { _ = file.Close() }() // only read
	info, err := file.Stat()
	if err != nil {
		return nil, 0, err
	}
	if !info.Mode().IsRegular() {
		return nil, 0, fmt.Errorf("%s is not a regular file; name a PEM file", name)
	}
	text, err := io.ReadAll(io.LimitReader(file, fileBytesMax+1))
	if err == nil && len(text) > fileBytesMax {
		err = fmt.Errorf("%s is longer than %d bytes; name a PEM file", name, fileBytesMax)
	}
	return text, info.Mode(), err
}

// explained names the account that may not read a file, and what to do: a key of root is what a server under systemd meets first.
func explained(err error, uid int) error {
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return fmt.Errorf("%w: the server runs as user %d, which must be able to read it and to enter its directories; make it the owner, or let a group of it read the file", err, uid)
}

func (f *Files) parse(texts [filesMax][]byte, now time.Time) (*state, error) {
	chain, err := parseCertificates(f.Cert, texts[0])
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(texts[0], texts[1])
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", f.Cert, f.Key, err)
	}
	if err := checkChain(chain, now); err != nil {
		return nil, fmt.Errorf("%s: %w", f.Cert, err)
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{pair}, ClientAuth: f.ClientAuth, MinVersion: f.MinVersion,
		// Tickets would let a client resume after its certificate, or its authority, was taken away. Their
		// keys are those of crypto/tls, which makes a new one each day.
		SessionTicketsDisabled: f.ClientAuth != tls.NoClientCert,
	}
	s := &state{config: config, info: infoOf(chain)}
	if f.ClientCA == "" {
		return s, nil
	}
	authorities, err := parseCertificates(f.ClientCA, texts[fileCA])
	if err == nil {
		err = checkAuthorities(authorities, now)
	}
	if err != nil {
		return nil, fmt.Errorf("client authorities: %w", err)
	}
	config.ClientCAs = x509.NewCertPool()
	for _, a := range authorities {
		config.ClientCAs.AddCert(a)
		if a.NotAfter.After(s.info.ClientAuthoritiesNotAfter) {
			s.info.ClientAuthoritiesNotAfter = a.NotAfter
		}
	}
	s.info.ClientAuthorities = len(authorities)
	if f.ClientCRL == "" {
		return s, nil
	}
	lists, err := parseRevocations(f.ClientCRL, texts[fileLists], authorities)
	if err != nil {
		return nil, err
	}
	config.VerifyConnection = lists.verify // tickets are off, so that no connection is without
	s.info.Revoked, s.info.RevocationNextUpdate = len(lists.revoked), lists.next
	return s, nil
}

func infoOf(chain []*x509.Certificate) Info {
	leaf := chain[0]
	info := Info{Subject: leaf.Subject.String(), Names: slices.Clone(leaf.DNSNames), Serial: leaf.SerialNumber.Text(16), NotAfter: leaf.NotAfter}
	for _, ip := range leaf.IPAddresses {
		info.Names = append(info.Names, ip.String())
	}
	for _, c := range chain {
		if c.NotAfter.Before(info.NotAfter) {
			info.NotAfter = c.NotAfter
		}
	}
	return info
}

// parseCertificates reads every certificate of a file.
func parseCertificates(name string, text []byte) (all []*x509.Certificate, err error) {
	err = eachBlock(name, text, func(number int, block *pem.Block) error {
		if block.Type != "CERTIFICATE" {
			if strings.HasSuffix(block.Type, "CERTIFICATE") {
				return fmt.Errorf("%s: PEM block %d is a %s; expected CERTIFICATE (openssl x509 converts it)", name, number, block.Type)
			}
			return nil // a key beside its certificate
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return fmt.Errorf("%s: certificate %d: %w", name, len(all)+1, err)
		}
		all = append(all, c)
		return nil
	})
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("%s has no certificate in PEM form", name)
	}
	return all, err
}

// eachBlock calls do for each PEM block of a file. A block that cannot be read is an error: pem.Decode passes over it, so that a
// file that is damaged or half written would have fewer authorities, or revocations.
func eachBlock(name string, text []byte, do func(number int, block *pem.Block) error) error {
	for number := 1; ; number++ {
		block, after := pem.Decode(text)
		if block == nil {
			if bytes.Contains(text, []byte("-----")) {
				return fmt.Errorf("%s: PEM block %d is not complete", name, number)
			}
			return nil
		}
		read := text[:len(text)-len(after)]
		if bytes.Count(read, []byte("-----BEGIN")) != 1 || bytes.Count(read, []byte("-----END")) != 1 {
			return fmt.Errorf("%s: PEM block %d cannot be read: it is damaged, or does not begin at the beginning of a line", name, number)
		}
		if err := do(number, block); err != nil {
			return err
		}
		text = after
	}
}

// checkChain refuses a chain that no client could verify: the first certificate is the server's, and
// each is signed by the next one.
func checkChain(chain []*x509.Certificate, now time.Time) error {
	for i, c := range chain {
		if err := checkTimes(c, now); err != nil {
			return err
		}
		if i+1 < len(chain) {
			if err := c.CheckSignatureFrom(chain[i+1]); err != nil {
				return fmt.Errorf("certificate %d (%s) is not signed by the next one (%s): %w; the server's certificate comes first, then its intermediates in order",
					i+1, c.Subject, chain[i+1].Subject, err)
			}
		}
	}
	usages := chain[0].ExtKeyUsage
	if len(usages) > 0 && !slices.Contains(usages, x509.ExtKeyUsageServerAuth) && !slices.Contains(usages, x509.ExtKeyUsageAny) {
		return fmt.Errorf("the certificate of %s is not for servers: its extended key usage has no serverAuth", chain[0].Subject)
	}
	return nil
}

func checkTimes(c *x509.Certificate, now time.Time) error {
	switch {
	case now.After(c.NotAfter):
		return fmt.Errorf("the certificate of %s expired at %s", c.Subject, c.NotAfter.Format(time.RFC3339))
	case now.Before(c.NotBefore):
		return fmt.Errorf("the certificate of %s is valid from %s on only; is the clock of this machine right?", c.Subject, c.NotBefore.Format(time.RFC3339))
	}
	return nil
}

// checkAuthorities refuses certificates that can sign none. During a rotation the file has several,
// of which some may have expired, but not all.
func checkAuthorities(all []*x509.Certificate, now time.Time) error {
	for i, c := range all {
		if !c.IsCA || !c.BasicConstraintsValid {
			return fmt.Errorf("certificate %d (%s) is not one of an authority: it cannot sign others", i+1, c.Subject)
		}
	}
	if !slices.ContainsFunc(all, func(c *x509.Certificate) bool { return checkTimes(c, now) == nil }) {
		return checkTimes(all[0], now)
	}
	return nil
}
