package main

import (
	"os"
	"path/filepath"
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
	do(exitOK, "put", "key", "value")
	do(exitOK, "backup", "create", "--to", target)
	do(exitOK, "backup", "create", "--to", target)
	for _, command := range [][]string{{"list"}, {"verify"}, {"prune", "--keep-full", "1", "--keep-days", "0", "--dry-run"}} {
		args := append([]string{"backup", command[0], "--from", target, "-o", "json"}, command[1:]...)
		if own, server := do(exitOK, args...), do(exitOK, append(args, "--server")...); own != server || own == "" {
			t.Errorf("%v:\n%s\nby the server:\n%s", command, own, server)
		}
	}
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
