package client

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/certs"
)

func TestEndpointsOfThisMachineArePlainTextByDefault(t *testing.T) {
	for endpoint, local := range map[string]bool{
		"127.0.0.1:7400": true, "127.9.9.9:1": true, "[::1]:7400": true, "localhost:7400": true, "localhost": true, "::1": true,
		"unix:///run/kv": true, "unix:kv": true, "unix-abstract:kv": true, "dns:///127.0.0.1:7400": true, "passthrough:///[::1]:7400": true,
		"dns://8.8.8.8/localhost:7400": true,
		"db1:7400":                     false, "10.0.0.7:7400": false, "dns:///db1.example:7400": false, "0.0.0.0:7400": false, "localhost.example:7400": false,
		"127.0.0.1.example:7400": false, "dns://127.0.0.1/db1:7400": false, "": false,
	} {
		if isLocal(endpoint) != local {
			t.Errorf("%q: local %v", endpoint, !local)
		}
		c, err := new(dialOptions).credentials(endpoint)
		if err != nil {
			t.Fatal(err)
		}
		if protocol := c.Info().SecurityProtocol; (protocol == "insecure") != local {
			t.Errorf("%q: %s", endpoint, protocol)
		}
	}
	plain := dialOptions{plain: true}
	if c, err := plain.credentials("db1:7400"); err != nil || c.Info().SecurityProtocol != "insecure" {
		t.Errorf("plain text: %v", err)
	}
	plain.files = &TLSFiles{}
	if _, err := plain.credentials("db1:7400"); err == nil {
		t.Error("plain text and TLS at once")
	}
}

// TestFilesAreReadAgainForNewConnections: a handshake has the files as they are then, and those before
// while they are half written.
func TestFilesAreReadAgainForNewConnections(t *testing.T) {
	now := time.Now()
	subject := certs.Subject{Name: "x", NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour)}
	authority, err := certs.NewAuthority(subject)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := TLSFiles{CA: filepath.Join(dir, "ca"), Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key")}
	write := func(name string, text []byte, age time.Duration) {
		t.Helper()
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(name, now.Add(age), now.Add(age)); err != nil { // the clock of the file system is coarse
			t.Fatal(err)
		}
	}
	issue := func(age time.Duration) {
		t.Helper()
		p, err := authority.Issue(subject)
		if err != nil {
			t.Fatal(err)
		}
		write(files.Cert, p.Cert, age)
		write(files.Key, p.Key, age)
	}
	if _, err := newFileCredentials(files); err == nil {
		t.Error("files that do not exist were accepted")
	}
	write(files.CA, authority.PEM().Cert, 0)
	issue(0)
	f, err := newFileCredentials(files)
	if err != nil {
		t.Fatal(err)
	}
	current := func() any {
		t.Helper()
		c, err := f.current()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := current()
	if current() != first {
		t.Error("files that have not changed were loaded again")
	}
	write(files.Key, []byte("half"), time.Second)
	if current() != first {
		t.Error("files that do not fit were used")
	}
	issue(2 * time.Second)
	if current() == first {
		t.Error("new files were not used")
	}
}
