package main

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/config"
)

// startWithHTTP is startReal with an HTTP port.
func startWithHTTP(t *testing.T) (endpoint, url string) {
	t.Helper()
	s := startServer(t, func(c *config.Config) {
		c.HTTP = "127.0.0.1:0"
		c.SlowRequests.Threshold, c.SlowRequests.KeyBytes = time.Microsecond, 16 // below what the option allows: every put is slow
	})
	return s.Address(), "http://" + s.HTTPAddress()
}

// bundleOf makes a bundle and returns its parts, and what was said about it.
func bundleOf(t *testing.T, wantCode int, args ...string) (parts map[string]string, said string) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "bundle.zip")
	var out, errs bytes.Buffer
	a := &app{out: &out, err: &errs, getenv: func(string) string { return "" }}
	if code := a.run(t.Context(), append([]string{"debug", "bundle", "--file", name}, args...)); code != wantCode {
		t.Fatalf("exit %d, want %d: %s", code, wantCode, errs.String())
	}
	z, err := zip.OpenReader(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = z.Close() }()
	parts = map[string]string{}
	for _, f := range z.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		parts[f.Name] = string(content)
		if strings.HasSuffix(f.Name, ".json") && !json.Valid(content) {
			t.Errorf("%s is no JSON: %s", f.Name, content)
		}
	}
	if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others can read the bundle: %v, %v", info.Mode(), err)
	}
	return parts, errs.String()
}

// TestABundleHasNoKeysAndNoValues of a server with slow requests, a transaction and a watch on the keys.
func TestABundleHasNoKeysAndNoValues(t *testing.T) {
	endpoint, url := startWithHTTP(t)
	c, err := client.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for range 20 {
		if _, err := c.Put(t.Context(), []byte("canary-key"), bytes.Repeat([]byte("canary-value"), 100)); err != nil {
			t.Fatal(err)
		}
	}
	tx, err := c.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if err := tx.Put([]byte("canary-txn"), []byte("canary-txn")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Flush(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watched := make(chan struct{})
	begin, ended := sync.OnceFunc(func() { close(watched) }), make(chan struct{})
	go func() {
		defer close(ended)
		for _, err := range c.Watch(ctx, []client.Range{client.Prefix([]byte("canary"))}, client.WatchOptions{Snapshot: true}) {
			if err != nil {
				return
			}
			begin()
		}
	}()
	select {
	case <-watched:
	case <-time.After(10 * time.Second):
		t.Fatal("the watch does not begin")
	}

	forms := []string{"canary", "Y2FuYXJ5", hex.EncodeToString([]byte("canary"))}
	parts, _ := bundleOf(t, exitOK, "--endpoint", endpoint, "--http", url, "--cpu-profile", "1s")
	for name, content := range parts {
		for _, form := range forms {
			if strings.Contains(content, form) {
				t.Errorf("%s has %q:\n%s", name, form, content)
			}
		}
	}
	for _, name := range []string{
		"README.txt", "status.json", "conditions.json", "log-holders.json", "config.json", "slow.json", "transactions.json", "snapshots.json", "watches.json",
		"holds.json", "backup.json", "archive.json", "metrics.txt", "goroutines.txt", "heap.pprof", "cpu.pprof",
	} {
		if parts[name] == "" || !strings.Contains(parts["README.txt"], name) && name != "README.txt" {
			t.Errorf("%s is missing or not described:\n%s", name, parts["README.txt"])
		}
	}
	for part, text := range map[string]string{
		"metrics.txt": "kvserver_requests_total", "slow.json": `"method": "Put"`, "transactions.json": `"peer"`, "watches.json": `"STATE_`, "config.json": `"data-dir"`,
	} {
		if !strings.Contains(parts[part], text) {
			t.Errorf("%s lacks %s:\n%s", part, text, parts[part])
		}
	}

	parts, _ = bundleOf(t, exitOK, "--endpoint", endpoint, "--http", "none", "--with-keys")
	if !strings.Contains(parts["slow.json"], "canary") || !strings.Contains(parts["watches.json"], "canary") || parts["metrics.txt"] != "" {
		t.Errorf("with keys: %s %s", parts["slow.json"], parts["watches.json"])
	}
	cancel()
	<-ended
}

func TestABundleIsMadeWithoutTheServer(t *testing.T) {
	parts, said := bundleOf(t, exitUnavailable, "--endpoint", "127.0.0.1:1", "--timeout", "300ms")
	if len(parts) != 1 || strings.Count(parts["README.txt"], "MISSING: ") != 14 || !strings.Contains(said, "kvctl: heap.pprof is missing: ") {
		t.Errorf("%v: %s", parts, said)
	}
}

// TestABundleLeavesOutWhatMayNameKeys: errors about damage have keys in them.
func TestABundleLeavesOutWhatMayNameKeys(t *testing.T) {
	h := &kvpb.Health{Cause: `first "canary"`, Conditions: []*kvpb.Condition{
		{Name: "entries-quarantined", Cause: `1 version, first "canary"`},
		{Name: "data-damaged", Cause: "keys canary to"},
		{Name: "of-a-later-version", Cause: "canary"},
		{Name: "disk-low", Cause: "12 bytes free"},
	}}
	redactHealth(h)
	text, err := objectJSON(h, nil)
	if err != nil || bytes.Contains(text, []byte("canary")) || !bytes.Contains(text, []byte("12 bytes free")) {
		t.Errorf("%s, %v", text, err)
	}
}

func TestTheHTTPPortIsDerivedFromTheOptions(t *testing.T) {
	for _, c := range []struct{ endpoint, http, cert, want string }{
		{"db1:7400", "0.0.0.0:7401", "", "http://db1:7401"},
		{"db1:7400", ":7401", "/tls.crt", "https://db1:7401"},
		{"db1:7400", "[::]:7401", "", "http://db1:7401"},
		{"db1:7400", "10.0.0.7:7401", "", "http://10.0.0.7:7401"},
		{"127.0.0.1:7400", "127.0.0.1:7401", "", "http://127.0.0.1:7401"},
		{"db1:7400", "127.0.0.1:7401", "", ""},
		{"db1:7400", "0.0.0.0:0", "", ""},
		{"db1:7400", "", "", ""},
		{"unix:///run/kv.sock", "0.0.0.0:7401", "", ""},
	} {
		got, err := deriveHTTP(c.endpoint, []*kvpb.ConfigOption{{Name: "http", Value: c.http}, {Name: "tls-cert", Value: c.cert}})
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
}

// TestABundleSendsNoTokenInPlainText to another machine.
func TestABundleSendsNoTokenInPlainText(t *testing.T) {
	a := &app{tls: tlsSettings{Token: "secret"}}
	for base, refused := range map[string]bool{"http://db1:7401": true, "https://db1:7401": false, "http://127.0.0.1:7401": false} {
		if _, err := a.bundleHTTP(t.Context(), nil, base); (err != nil) != refused {
			t.Errorf("%s: %v", base, err)
		}
	}
}
