package certs

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testNow = time.Now()

// testSubject is valid for an hour before and after the tests.
func testSubject(name string, hosts ...string) Subject {
	return Subject{Name: name, Hosts: hosts, NotBefore: testNow.Add(-time.Hour), NotAfter: testNow.Add(time.Hour)}
}

func mustAuthority(t *testing.T, name string) *Authority {
	t.Helper()
	a, err := NewAuthority(testSubject(name))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func mustIssue(t *testing.T, a *Authority, s Subject) PEM {
	t.Helper()
	p, err := a.Issue(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// testFiles are three files in a directory of the test.
func testFiles(t *testing.T) Files {
	dir := t.TempDir()
	return Files{
		Cert: filepath.Join(dir, "server.crt"), Key: filepath.Join(dir, "server.key"), ClientCA: filepath.Join(dir, "ca.crt"),
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13,
	}
}

func mustWrite(t *testing.T, name string, parts ...[]byte) {
	t.Helper()
	if err := os.WriteFile(name, bytes.Join(parts, nil), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (f Files) mustWrite(t *testing.T, p PEM, authorities ...*Authority) {
	t.Helper()
	mustWrite(t, f.Cert, p.Cert)
	mustWrite(t, f.Key, p.Key)
	var cas [][]byte
	for _, a := range authorities {
		cas = append(cas, a.PEM().Cert)
	}
	mustWrite(t, f.ClientCA, cas...)
}

// TestFilesThatCannotBeUsedChangeNothing: whatever is wrong with one of the files, the first load fails with
// an error that names the file, and a reload leaves the configuration as it is.
func TestFilesThatCannotBeUsedChangeNothing(t *testing.T) {
	ca, other := mustAuthority(t, "ca"), mustAuthority(t, "other")
	good, stranger := mustIssue(t, ca, testSubject("server", "localhost")), mustIssue(t, other, testSubject("server", "localhost"))
	expired, early, client := testSubject("server", "localhost"), testSubject("server", "localhost"), testSubject("client")
	expired.NotAfter, early.NotBefore = testNow.Add(-time.Minute), testNow.Add(time.Minute)
	oldAuthority, err := NewAuthority(expired)
	if err != nil {
		t.Fatal(err)
	}
	half := func(b []byte) []byte { return b[:len(b)/2] }
	for name, c := range map[string]struct {
		spoil func(Files)
		want  string
	}{
		"no certificate":                 {func(f Files) { _ = os.Remove(f.Cert) }, "server.crt"},
		"no key":                         {func(f Files) { _ = os.Remove(f.Key) }, "server.key"},
		"no authorities":                 {func(f Files) { _ = os.Remove(f.ClientCA) }, "ca.crt"},
		"empty certificate":              {func(f Files) { mustWrite(t, f.Cert) }, "has no certificate"},
		"empty key":                      {func(f Files) { mustWrite(t, f.Key) }, "server.key"},
		"empty authorities":              {func(f Files) { mustWrite(t, f.ClientCA) }, "has no certificate"},
		"half of the certificate":        {func(f Files) { mustWrite(t, f.Cert, half(good.Cert)) }, "PEM block 1 is not complete"},
		"half of an intermediate":        {func(f Files) { mustWrite(t, f.Cert, good.Cert, half(ca.PEM().Cert)) }, "PEM block 2 is not complete"},
		"half of the key":                {func(f Files) { mustWrite(t, f.Key, half(good.Key)) }, "server.key"},
		"half of the second authority":   {func(f Files) { mustWrite(t, f.ClientCA, ca.PEM().Cert, half(other.PEM().Cert)) }, "PEM block 2 is not complete"},
		"the beginning of an authority":  {func(f Files) { mustWrite(t, f.ClientCA, ca.PEM().Cert, []byte("-----BEG")) }, "PEM block 2 is not complete"},
		"the key of another certificate": {func(f Files) { mustWrite(t, f.Key, stranger.Key) }, "does not match"},
		"expired":                        {func(f Files) { f.mustWrite(t, mustIssue(t, ca, expired), ca) }, "expired at"},
		"not yet valid":                  {func(f Files) { f.mustWrite(t, mustIssue(t, ca, early), ca) }, "valid from"},
		"a client's certificate":         {func(f Files) { f.mustWrite(t, mustIssue(t, ca, client), ca) }, "not for servers"},
		"intermediate of another chain":  {func(f Files) { mustWrite(t, f.Cert, good.Cert, other.PEM().Cert) }, "not signed by the next one"},
		"expired intermediate":           {func(f Files) { mustWrite(t, f.Cert, good.Cert, oldAuthority.PEM().Cert) }, "server.crt"},
		"an authority that is none":      {func(f Files) { mustWrite(t, f.ClientCA, ca.PEM().Cert, good.Cert) }, "not one of an authority"},
		"only an expired authority":      {func(f Files) { mustWrite(t, f.ClientCA, oldAuthority.PEM().Cert) }, "expired at"},
		"a damaged first authority": {func(f Files) {
			mustWrite(t, f.ClientCA, bytes.Replace(other.PEM().Cert, []byte("MII"), []byte("M!I"), 1), ca.PEM().Cert)
		}, "PEM block 1 cannot be read"},
		"a byte order mark": {func(f Files) { mustWrite(t, f.ClientCA, []byte("\xef\xbb\xbf"), other.PEM().Cert, ca.PEM().Cert) }, "PEM block 1 cannot be read"},
		"a damaged block between others": {func(f Files) {
			mustWrite(t, f.ClientCA, ca.PEM().Cert, other.PEM().Cert[30:], other.PEM().Cert)
		}, "PEM block 2 cannot be read"},
		"a trusted certificate": {func(f Files) {
			mustWrite(t, f.ClientCA, bytes.ReplaceAll(other.PEM().Cert, []byte("CERTIFICATE"), []byte("TRUSTED CERTIFICATE")), ca.PEM().Cert)
		}, "PEM block 1 is a TRUSTED CERTIFICATE"},
		"a directory":    {func(f Files) { _ = errors.Join(os.Remove(f.Cert), os.Mkdir(f.Cert, 0o700)) }, "not a regular file"},
		"a file of data": {func(f Files) { mustWrite(t, f.Cert, make([]byte, fileBytesMax+1)) }, "name a PEM file"},
	} {
		t.Run(name, func(t *testing.T) {
			f := testFiles(t)
			f.mustWrite(t, good, ca)
			s, err := Open(f)
			if err != nil {
				t.Fatal(err)
			}
			before := s.Config()
			c.spoil(f)
			if _, err := Open(f); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the first load ended with %v, want %q", err, c.want)
			}
			changed, err := s.Reload()
			if changed || err == nil || !strings.Contains(err.Error(), c.want) || !errors.Is(s.Err(), err) {
				t.Errorf("the reload: changed %v, %v, reported as %v", changed, err, s.Err())
			}
			if s.Config() != before {
				t.Error("the configuration was replaced")
			}
			_ = os.Remove(f.Cert)
			f.mustWrite(t, good, ca)
			if changed, err := s.Reload(); changed || err != nil || s.Err() != nil {
				t.Errorf("the same files again: changed %v, %v", changed, err)
			}
			if succeeded, failed := s.Reloads(); succeeded != 1 || failed != 1 {
				t.Errorf("%d reloads and %d failures", succeeded, failed)
			}
		})
	}
}

// TestAuthoritiesOfARotationMayHaveExpired: one of several authorities has expired, and the others serve.
func TestAuthoritiesOfARotationMayHaveExpired(t *testing.T) {
	ca, gone := mustAuthority(t, "ca"), testSubject("old")
	gone.NotAfter = testNow.Add(-time.Minute)
	old, err := NewAuthority(gone)
	if err != nil {
		t.Fatal(err)
	}
	f := testFiles(t)
	f.mustWrite(t, mustIssue(t, ca, testSubject("server", "localhost", "127.0.0.1")), old, ca)
	s, err := Open(f)
	if err != nil {
		t.Fatal(err)
	}
	info := s.Info()
	if info.ClientAuthorities != 2 || !info.ClientAuthoritiesNotAfter.Equal(testNow.Add(time.Hour).Truncate(time.Second)) || len(info.Names) != 2 {
		t.Errorf("%+v", info)
	}
}

// TestCertificateAndAuthoritiesAreOfOneLoad: while the files change from one authority's to another's and
// back, no configuration has the certificate of one and the pool of the other.
func TestCertificateAndAuthoritiesAreOfOneLoad(t *testing.T) {
	type set struct {
		ca   *Authority
		cert PEM
	}
	var sets [2]set
	for i := range sets {
		ca := mustAuthority(t, "ca")
		sets[i] = set{ca, mustIssue(t, ca, testSubject("server", "localhost"))}
	}
	f := testFiles(t)
	f.mustWrite(t, sets[0].cert, sets[0].ca)
	s, err := Open(f)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				c := s.Config()
				leaf, err := x509.ParseCertificate(c.Certificates[0].Certificate[0])
				if err == nil {
					_, err = leaf.Verify(x509.VerifyOptions{Roots: c.ClientCAs, CurrentTime: testNow})
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Go(func() { // a reload at any moment of the writes
		for {
			select {
			case <-done:
				return
			default:
				_, _ = s.Reload() // fails while the files do not fit
			}
		}
	})
	for i := range 20 {
		next := sets[(i+1)%2]
		// The authorities first: with the order of f.mustWrite, certificate and key fit before the
		// authorities do, which no check of one load can tell.
		mustWrite(t, f.Key)
		mustWrite(t, f.ClientCA, next.ca.PEM().Cert)
		mustWrite(t, f.Cert, next.cert.Cert)
		mustWrite(t, f.Key, next.cert.Key)
	}
	close(done)
	all.Wait()
	if _, err := s.Reload(); err != nil {
		t.Error(err)
	}
}

// TestChangedFilesAreLoadedOnceStable: changed files are read when they have kept still, and an unchanged
// set is not read again.
func TestChangedFilesAreLoadedOnceStable(t *testing.T) {
	ca := mustAuthority(t, "ca")
	f := testFiles(t)
	f.mustWrite(t, mustIssue(t, ca, testSubject("server", "localhost")), ca)
	s, err := Open(f)
	if err != nil {
		t.Fatal(err)
	}
	s.every, s.settles = time.Millisecond, 20*time.Millisecond
	told := make(chan struct{}, 100)
	var watching sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	watching.Go(func() { s.Watch(ctx, func(bool, error) { told <- struct{}{} }) })
	defer watching.Wait()
	defer stop()
	next := mustIssue(t, ca, testSubject("next", "localhost"))
	f.mustWrite(t, next, ca)
	// If the writes above took longer than the files must keep still, a load may fail, or come before the last one, and another one follows.
	loaded := func() bool {
		s.reading.Lock()
		defer s.reading.Unlock()
		_, changed := s.changed()
		return !changed && s.Err() == nil && s.Info().Subject == "CN=next,O=EpochKV"
	}
	for !loaded() {
		select {
		case <-told:
		case <-time.After(20 * time.Second):
			t.Fatal("the change was not seen")
		}
	}
	succeeded, failed := s.Reloads()
	time.Sleep(50 * time.Millisecond)
	if s2, f2 := s.Reloads(); s2 != succeeded || f2 != failed {
		t.Errorf("files that do not change were loaded %d more times", s2+f2-succeeded-failed)
	}
	mustWrite(t, f.Key, []byte("half"))
	for s.Err() == nil {
		select {
		case <-told:
		case <-time.After(20 * time.Second):
			t.Fatal("the wrong key was not seen")
		}
	}
	mustWrite(t, f.Key, next.Key)
	for s.Err() != nil {
		select {
		case <-told:
		case <-time.After(20 * time.Second):
			t.Fatal("the right key was not seen")
		}
	}
}

// TestPipesDoNotBlockTheServer: a file that is a pipe is refused. Reading it would wait for a program that
// writes to it, and with it the health page and the end of the server.
func TestPipesDoNotBlockTheServer(t *testing.T) {
	ca := mustAuthority(t, "ca")
	good := mustIssue(t, ca, testSubject("server", "localhost"))
	for i := range 3 {
		f := testFiles(t)
		f.mustWrite(t, good, ca)
		s, err := Open(f)
		if err != nil {
			t.Fatal(err)
		}
		name := f.names()[i]
		if err := errors.Join(os.Remove(name), syscall.Mkfifo(name, 0o600)); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() {
			_, err := s.Reload()
			ended <- err
		}()
		select {
		case err := <-ended:
			if err == nil || !strings.Contains(err.Error(), "not a regular file") {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: the reload waits", name)
			writer, err := os.OpenFile(name, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			_ = writer.Close()
			if err := <-ended; err == nil {
				t.Errorf("%s: a pipe was loaded", name)
			}
		}
	}
}

// TestFailedLoadsAreTriedAgain: what was wrong with the files may end without a change of them, such as
// permissions, or a clock that differed from that of the authority. The same error is told once.
func TestFailedLoadsAreTriedAgain(t *testing.T) {
	ca := mustAuthority(t, "ca")
	f := testFiles(t)
	f.mustWrite(t, mustIssue(t, ca, testSubject("first", "localhost")), ca)
	var ahead atomic.Int64
	s, err := open(f, func() time.Time { return testNow.Add(time.Duration(ahead.Load())) })
	if err != nil {
		t.Fatal(err)
	}
	s.every, s.settles = time.Millisecond, time.Millisecond
	told := make(chan error, 100)
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { s.Watch(ctx, func(_ bool, err error) { told <- err }) })
	defer watching.Wait()
	defer cancel()

	early := testSubject("early", "localhost")
	early.NotBefore = testNow.Add(time.Minute)
	f.mustWrite(t, mustIssue(t, ca, early), ca)
	for err := <-told; err == nil || !strings.Contains(err.Error(), "valid from"); err = <-told {
		t.Log(err) // the files were read while they were written
	}
	time.Sleep(50 * time.Millisecond) // tens of attempts
	const changes = 3                 // of the files, if they were still being written
	if n := len(told); n > changes {
		t.Errorf("%d further reports of the same error", n)
	}
	ahead.Store(int64(2 * time.Minute))
	for err = errors.New("none yet"); err != nil; {
		select {
		case err = <-told:
		case <-time.After(10 * time.Second):
			t.Fatal("nothing was loaded")
		}
	}
	if subject := s.Info().Subject; s.Err() != nil || !strings.Contains(subject, "early") {
		t.Errorf("%v, and %s is in force", s.Err(), subject)
	}
}

// TestFilesReplacedDuringTheStartAreReadAgain: a start in the middle of a rotation succeeds. Its supervisor
// would not start the server again after an error of the configuration.
func TestFilesReplacedDuringTheStartAreReadAgain(t *testing.T) {
	ca := mustAuthority(t, "ca")
	f := testFiles(t)
	f.mustWrite(t, mustIssue(t, ca, testSubject("server", "localhost")), ca)
	replacing := 2
	_, err := open(f, func() time.Time { // when the files have been read
		if replacing--; replacing >= 0 {
			mustReplace(t, f.Key)
		}
		return testNow
	})
	if err != nil || replacing >= 0 {
		t.Errorf("%v, and the files were replaced %d times less", err, replacing+1)
	}
}

// mustReplace renames a copy over a file.
func mustReplace(t *testing.T, name string) {
	t.Helper()
	text, err := os.ReadFile(name)
	if err == nil {
		mustWrite(t, name+"~", text)
		err = os.Rename(name+"~", name)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestKeysThatOthersMayReadAreReported: the operator is told of a key that every account of the machine
// may read, but not of one for a group.
func TestKeysThatOthersMayReadAreReported(t *testing.T) {
	ca := mustAuthority(t, "ca")
	f := testFiles(t)
	f.mustWrite(t, mustIssue(t, ca, testSubject("server", "localhost")), ca)
	for mode, want := range map[os.FileMode]bool{0o400: false, 0o600: false, 0o440: false, 0o644: true, 0o604: true} {
		if err := os.Chmod(f.Key, mode); err != nil {
			t.Fatal(err)
		}
		if s, err := Open(f); err != nil || s.Info().KeyExposed != want {
			t.Errorf("%v: %v", mode, err)
		}
	}
}

func TestUnreadableFilesNameTheAccountOfTheServer(t *testing.T) {
	denied := &fs.PathError{Op: "open", Path: "server.key", Err: syscall.EACCES}
	if got := explained(denied, 61234).Error(); !strings.HasPrefix(got, "open server.key: permission denied: the server runs as user 61234") {
		t.Error(got)
	}
	if missing := (&fs.PathError{Op: "open", Path: "server.key", Err: syscall.ENOENT}); explained(missing, 0) != error(missing) {
		t.Error("a missing file is explained as one that may not be read")
	}
}
