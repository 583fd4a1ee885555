package server

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/restore"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestStoppedSoonAfterStartIsNoFailure: a server that is told to stop before or while its listeners
// begin to serve ends without an error.
func TestStoppedSoonAfterStartIsNoFailure(t *testing.T) {
	c := testConfig()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		s, err := open(t.Context(), c, slog.New(slog.DiscardHandler), vfs.NewMem())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		if i%2 == 0 {
			cancel()
		} else {
			time.AfterFunc(time.Duration(rand.IntN(300))*time.Microsecond, cancel)
		}
		if err := s.Run(ctx); err != nil {
			t.Errorf("stop %d: %v", i, err)
		}
		cancel()
	}
}

func TestAnAddressInUseCreatesNoStore(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }() // nothing was sent
	for _, which := range []string{"--listen", "--http"} {
		c := testConfig()
		c.DataDir = filepath.Join(t.TempDir(), "data")
		if which == "--listen" {
			c.Listen = taken.Addr().String()
		} else {
			c.HTTP = taken.Addr().String()
		}
		_, err = Open(t.Context(), c, slog.New(slog.DiscardHandler))
		if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), which) {
			t.Errorf("%s: %v", which, err)
		}
		if _, err := os.Stat(c.DataDir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the server that could not start has left %s (%v)", which, c.DataDir, err)
		}
	}
}

// TestAServerDoesNotStartOnAnUnfinishedRestore, and changes nothing in it.
func TestAServerDoesNotStartOnAnUnfinishedRestore(t *testing.T) {
	c := testConfig()
	c.DataDir = t.TempDir()
	if err := os.WriteFile(filepath.Join(c.DataDir, "RESTORING"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), c, slog.New(slog.DiscardHandler))
	entries, _ := os.ReadDir(c.DataDir)
	if !errors.Is(err, restore.ErrUnfinished) || len(entries) != 1 {
		t.Errorf("%v; the directory has %d entries", err, len(entries))
	}
}

// TestSignalDuringReplayEndsTheStart: the first SIGTERM ends the context. The server does not
// replay to the end of the log then, reports no failure, and the next start has everything.
func TestSignalDuringReplayEndsTheStart(t *testing.T) {
	const commits = 200
	dir := mustKilled(t, commits)
	c := testConfig()
	c.DataDir = dir
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	log := new(logBuffer)
	if err := Run(ctx, Signals{}, c, slog.New(slog.NewTextHandler(log, nil))); err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "stopped before serving") || strings.Contains(log.String(), "msg=serving") {
		t.Errorf("the log says\n%s", log)
	}
	s, err := Open(t.Context(), c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if r := s.store.Recovery(); r.Records != commits {
		t.Errorf("the next start replays %d records, not %d", r.Records, commits)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
}

// mustKilled is the directory of a server that was killed after so many commits.
func mustKilled(t *testing.T, commits int) (dir string) {
	t.Helper()
	c, dir := testConfig(), t.TempDir()
	c.DataDir = filepath.Join(dir, "alive")
	store, err := mvcc.Open(storeOptions(&c, nil))
	if err != nil {
		t.Fatal(err)
	}
	x, err := store.Session()
	if err != nil {
		t.Fatal(err)
	}
	for i := range commits {
		var w mvcc.Write
		w.Set([]byte{byte(i)}, []byte("v"))
		e, err := x.Commit(t.Context(), &w)
		if err == nil {
			err = store.Wait(t.Context(), e, mvcc.DurabilitySync)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	killed := filepath.Join(dir, "killed")
	if err := os.CopyFS(killed, os.DirFS(c.DataDir)); err != nil {
		t.Fatal(err)
	}
	x.Close()
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	return killed
}
