package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client/clienttest"
)

// TestSignalEndsAReadOfStandardInput: a terminal, or a pipe whose other end is silent, keeps a read for ever.
func TestSignalEndsAReadOfStandardInput(t *testing.T) {
	server := clienttest.Start(t)
	for _, args := range [][]string{{"put", "k", "-"}, {"import", "-"}, {"txn", "-"}, {"shell"}} {
		silent, writer := io.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan int, 1)
		var errs bytes.Buffer
		a := &app{in: silent, out: io.Discard, err: &errs, getenv: func(name string) string { return map[string]string{endpointEnv: server.Endpoint}[name] }}
		go func() { ended <- a.run(ctx, args) }()
		time.AfterFunc(20*time.Millisecond, cancel)
		select {
		case code := <-ended:
			if code != exitInterrupted || strings.Contains(errs.String(), "kvctl:") {
				t.Errorf("%v: exit %d, %s", args, code, errs.String())
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%v does not end", args)
		}
		cancel()
		_ = writer.Close()
	}
}

// TestSignalEndsAPrompt and leaves the terminal as it was.
func TestSignalEndsAPrompt(t *testing.T) {
	t.Setenv(historyEnv, "")
	in, typed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = typed.Close() }()
	stdin := os.Stdin
	os.Stdin = in
	defer func() { os.Stdin = stdin }()
	ctx, cancel := context.WithCancel(t.Context())
	a := &app{out: io.Discard, err: io.Discard}
	terminal, err := newTerminal(a, &statements{app: a, ctx: ctx})
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(20*time.Millisecond, cancel)
	ended := make(chan error, 1)
	go func() {
		_, err := terminal.next("> ")
		ended <- err
	}()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the prompt does not end")
	}
	if err := terminal.close(); err != nil {
		t.Error(err)
	}
}

// TestShellStartsWithAnyHistory: a long line of the last run, which the library wrote, and cannot read.
func TestShellStartsWithAnyHistory(t *testing.T) {
	name := filepath.Join(t.TempDir(), "history")
	t.Setenv(historyEnv, name)
	if err := os.WriteFile(name, []byte("get a\nput k "+strings.Repeat("v", 5000)+"\n\xff\nget b\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	a := &app{out: io.Discard, err: io.Discard}
	terminal, err := newTerminal(a, &statements{app: a, ctx: t.Context()})
	if err != nil {
		t.Fatal(err)
	}
	if err := terminal.close(); err != nil {
		t.Fatal(err)
	}
	if kept, err := os.ReadFile(name); err != nil || string(kept) != "get a\nget b\n" {
		t.Errorf("the history is %q, %v", kept, err)
	}
	if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others can read the history: %v, %v", info.Mode(), err)
	}
}

// endless is a file that never ends.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	e.read += len(p)
	if e.read > 64<<20 {
		return 0, io.ErrUnexpectedEOF // the test has failed
	}
	return len(p), nil
}

// TestOneRecordOfCSVHasABound: after a quote that is not closed, the rest of a file is one field.
func TestOneRecordOfCSVHasABound(t *testing.T) {
	const recordMax = 1 << 20
	row := "k,\"" + strings.Repeat("v", recordMax/2) + "\"\n"
	rest := new(endless)
	source := newCSVSource(io.MultiReader(strings.NewReader("key,value\n"+row+row+row+"k,\"v"), rest), recordMax)
	for range 3 {
		if _, _, err := source.next(); err != nil {
			t.Fatal(err)
		}
	}
	_, line, err := source.next()
	if !errors.Is(err, errRecordTooLong) || line != 5 {
		t.Errorf("line %d: %v", line, err)
	}
	if rest.read > 2*recordMax {
		t.Errorf("%d bytes were read", rest.read)
	}
}
