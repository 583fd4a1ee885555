package archive

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestOwnerWhoseLockIsTakenIsNotAsked: it has ended without a word, and the process that has its lock goes on at once. Any other one asks.
func TestOwnerWhoseLockIsTakenIsNotAsked(t *testing.T) {
	const lock, never = "boot:1:2", time.Hour
	store := newStore(t)
	start := func(lock string, patience time.Duration) (*process, error) {
		p := newProcess(t, store, never)
		p.self.Lock = lock
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return p, p.acquire(ctx, func(context.Context) error { return nil }, func(ownerRecord) {})
	}
	for n := uint64(1); n <= 2; n++ {
		if p, err := start(lock, 30*time.Second); err != nil || p.number != n {
			t.Fatalf("number %d: %v", p.number, err)
		}
	}
	for _, other := range []string{"", "boot:1:3", "another boot:1:2"} {
		if _, err := start(other, 300*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%q: %v", other, err)
		}
	}
}

// TestProcessesWithoutALockAreAsked: two that know no lock are not the same.
func TestProcessesWithoutALockAreAsked(t *testing.T) {
	store := newStore(t)
	if err := newProcess(t, store, time.Hour).start(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := newProcess(t, store, time.Hour).start(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestLockIDIsThatOfOneFile(t *testing.T) {
	dir := t.TempDir()
	file, other := filepath.Join(dir, "LOCK"), filepath.Join(dir, "other")
	if id := LockID(file); id != "" {
		t.Errorf("without a file: %q", id)
	}
	for _, name := range []string{file, other} {
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	id := LockID(file)
	if id == "" || id != LockID(file) || id == LockID(other) {
		t.Errorf("%q, %q of another file", id, LockID(other))
	}
	if err := os.Rename(other, file); err != nil { // replaced
		t.Fatal(err)
	}
	if LockID(file) == id {
		t.Error("another file with the name has the same id")
	}
}
