package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestAnEmptyTokenFileIsAnError: a crash of the machine may have emptied the file. Without a token, the watch would begin now, and leave out
// what has changed since the last line that was printed.
func TestAnEmptyTokenFileIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if token, err := readToken(file); token != nil || err != nil {
		t.Fatalf("without a file: %v, %v", token, err)
	}
	for _, content := range []string{"", "\n"} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readToken(file); err == nil || !strings.Contains(err.Error(), "is empty") {
			t.Fatalf("%q: %v", content, err)
		}
	}
	if err := writeToken(file, []byte("a token")); err != nil {
		t.Fatal(err)
	}
	if token, err := readToken(file); string(token) != "a token" || err != nil {
		t.Fatalf("%q, %v", token, err)
	}
}
