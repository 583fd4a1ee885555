package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestServerLooksAfterBackups: what a command says is the same, whichever process reads the target.
func TestServerLooksAfterBackups(t *testing.T) {
	endpoint, target := startReal(t), t.TempDir()
	do := func(want int, args ...string) string {
		t.Helper()
		out, stderr, code := runWith(t, nil, append(args, "--endpoint", endpoint)...)
		if code != want {
			t.Fatalf("%v: exit code %d, want %d: %s%s", args, code, want, out, stderr)
		}
		return out
	}
	for range 2 { // what was acknowledged before is in the backup
		var put, backup struct{ Epoch uint64 }
		if err := json.Unmarshal([]byte(do(exitOK, "put", "key", "value")), &put); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(do(exitOK, "backup", "create", "--to", target)), &backup); err != nil || backup.Epoch < put.Epoch {
			t.Errorf("the backup has epoch %d, after a put at epoch %d: %v", backup.Epoch, put.Epoch, err)
		}
	}
	for _, command := range [][]string{{"list"}, {"verify"}, {"prune", "--keep-full", "1", "--keep-days", "0", "--dry-run"}} {
		args := append([]string{"backup", command[0], "--from", target, "-o", "json"}, command[1:]...)
		if own, server := do(exitOK, args...), do(exitOK, append(args, "--server")...); own != server || own == "" {
			t.Errorf("%v:\n%s\nby the server:\n%s", command, own, server)
		}
	}
	for _, server := range []string{"--server=false", "--server"} { // a number that stands for always
		if out := do(exitOK, "backup", "prune", "--from", target, "--keep-full", "1", "--keep-days", "1000000", "--dry-run", "-o", "table", server); !strings.Contains(out, "2 backups kept, 0 removed") {
			t.Errorf("%s: backups of a million days: %s", server, out)
		}
	}
	mend := damageNewestManifest(t, target)
	for _, command := range [][]string{{"backup", "verify"}, {"backup", "verify", "--server"}, {"backup", "drill", "--scratch", t.TempDir()}, {"restore", "--latest", "--plan"}} {
		do(exitCorruption, append(command, "--from", target)...)
	}
	mend()
	do(exitOK, "backup", "prune", "--from", target, "--keep-full", "1", "--keep-days", "0", "--server")
	parts, err := filepath.Glob(filepath.Join(target, "*", "base", "parts", "*"))
	if err != nil || len(parts) == 0 {
		t.Fatal(parts, err)
	}
	for _, part := range parts {
		if err := os.WriteFile(part, []byte("damage"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	do(exitCorruption, "backup", "verify", "--from", target)
	do(exitCorruption, "backup", "verify", "--from", target, "--server")
}

// damageNewestManifest changes a byte of the manifest with the latest epoch, until mend is called.
func damageNewestManifest(t *testing.T, target string) (mend func()) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(target, "*", "base", "manifests", "*"))
	if err != nil || len(names) != 2 {
		t.Fatal(names, err)
	}
	newest, content, latest := "", []byte(nil), uint64(0)
	for _, name := range names {
		p, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var m struct{ State struct{ Epoch uint64 } }
		if err := json.Unmarshal(p, &m); err != nil {
			t.Fatal(err)
		}
		if m.State.Epoch > latest {
			newest, content, latest = name, p, m.State.Epoch
		}
	}
	write := func(p []byte) {
		if err := os.WriteFile(newest, p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(bytes.Replace(content, []byte(`"program"`), []byte(`"prOgram"`), 1))
	return func() { write(content) }
}
