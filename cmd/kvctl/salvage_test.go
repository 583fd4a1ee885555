package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
)

// TestAnInterruptedSalvageLeavesNoFileUnderItsName: import would take it for the whole.
func TestAnInterruptedSalvageLeavesNoFileUnderItsName(t *testing.T) {
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "rescued.jsonl")
	s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: dir, MemoryBytes: 64 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	x, err := s.Session()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		var w mvcc.Write
		for j := range 400 {
			w.Set(fmt.Appendf(nil, "key%06d", 400*i+j), bytes.Repeat([]byte("v"), 500))
		}
		if _, err := x.Commit(t.Context(), &w); err != nil {
			t.Fatal(err)
		}
	}
	x.Close()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	salvage := func(ctx context.Context) (code int, errs string) {
		var stderr bytes.Buffer
		a := &app{in: strings.NewReader(""), out: &bytes.Buffer{}, err: &stderr, getenv: func(string) string { return "" }}
		code = a.run(ctx, []string{"salvage", "--data-dir", dir, "--out", out})
		return code, stderr.String()
	}
	ctx, interrupt := context.WithCancel(t.Context())
	go func() {
		defer interrupt()
		for ctx.Err() == nil {
			if info, err := os.Stat(out + ".partial"); err == nil && info.Size() > 0 {
				return
			}
			time.Sleep(100 * time.Microsecond)
		}
	}()
	if code, errs := salvage(ctx); code == exitOK || !strings.Contains(errs, out+".partial has what was salvaged until then") {
		t.Errorf("exit %d, %s", code, errs)
	}
	if _, err := os.Stat(out); !os.IsNotExist(err) {
		t.Errorf("the name is there: %v", err)
	}
	if err := os.Remove(out + ".partial"); err != nil {
		t.Fatal(err)
	}
	if code, errs := salvage(t.Context()); code != exitOK {
		t.Errorf("exit %d, %s", code, errs)
	}
	whole, err := os.ReadFile(out)
	if err != nil || bytes.Count(whole, []byte("\n")) != 40_000 {
		t.Errorf("%d lines, %v", bytes.Count(whole, []byte("\n")), err)
	}
	if code, errs := salvage(t.Context()); code == exitOK || !strings.Contains(errs, "file already exists") {
		t.Errorf("over a file: exit %d, %s", code, errs)
	}
}
