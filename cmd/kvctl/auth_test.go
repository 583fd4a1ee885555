package main

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/server"
	"github.com/epochkv/epochkv/internal/testseed"
)

// person is a user of kvctl: a file of contexts, and what standard input has.
type person struct {
	t        *testing.T
	contexts string
	env      map[string]string
}

func newPerson(t *testing.T) *person {
	p := &person{t: t, contexts: filepath.Join(t.TempDir(), "contexts.json")}
	p.env = map[string]string{contextsEnv: p.contexts}
	return p
}

// does runs a command with lines on standard input, and wants an exit code.
func (p *person) does(want int, stdin string, args ...string) (out string) {
	p.t.Helper()
	args = append(slices.Clip(args), "--timeout", "2m") // a hash of a password takes long on a busy machine
	var stdout, stderr bytes.Buffer
	a := &app{in: strings.NewReader(stdin), out: &stdout, err: &stderr, outTerminal: true, getenv: func(name string) string { return p.env[name] }}
	if got := a.run(context.Background(), args); got != want {
		p.t.Fatalf("kvctl %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), got, want, &stdout, &stderr)
	}
	return stdout.String() + stderr.String()
}

// realServer is a server on a directory. Its log has the bootstrap token.
func realServer(t *testing.T, dir string) (endpoint string, token string, stop func()) {
	t.Helper()
	c := config.Default()
	c.DataDir, c.Listen, c.HTTP, c.Memory = dir, "127.0.0.1:0", "", 64*config.MiB
	ctx, cancel := context.WithCancel(t.Context())
	log := &logText{}
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx, server.Signals{}, c, slog.New(slog.NewTextHandler(log, nil))) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	for ; endpoint == ""; time.Sleep(time.Millisecond) {
		select {
		case err := <-ended:
			t.Fatalf("%v\n%s", err, log)
		default:
		}
		if m := servingLine.FindStringSubmatch(log.String()); m != nil {
			endpoint = m[1]
		}
	}
	if m := bootstrapLine.FindStringSubmatch(log.String()); m != nil {
		token = m[1]
	}
	return endpoint, token, stop
}

var (
	servingLine   = regexp.MustCompile(`msg=serving listen=(\S+) `)
	bootstrapLine = regexp.MustCompile(`bootstrap_token=(\S+)`)
)

type logText struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// TestUsersFromTheCommandLine: from the token that the server prints to checked users, a lock-out, and back.
func TestUsersFromTheCommandLine(t *testing.T) {
	testseed.SkipUnderRace(t)
	dir := t.TempDir()
	endpoint, token, stop := realServer(t, dir)
	ann, bob := newPerson(t), newPerson(t)
	for _, p := range []*person{ann, bob} {
		p.does(0, "", "context", "add", "db", "--endpoint", endpoint)
	}
	ann.does(exitDenied, "epochkv_once_wrong\nann's secret\n", "user", "bootstrap", "ann")
	ann.does(0, token+"\nann's secret\n", "user", "bootstrap", "ann")
	ann.does(exitDenied, "", "auth", "enable")
	ann.does(exitDenied, "wrong secret\n", "login", "ann")
	has(t, ann.does(0, "ann's secret\n", "login", "ann"), "context db is logged in as ann until")
	ann.does(0, "", "role", "create", "tenant1", "--grant", "rwl:tenant/1/", "--range", "r:a..b")
	ann.does(0, "bob's secret\n", "user", "create", "bob", "--role", "tenant1", "--max-requests", "1000")
	ann.does(0, "", "auth", "enable")

	bob.does(exitDenied, "", "get", "tenant/1/a") // not logged in
	out := bob.does(0, "bob's secret\n", "login", "bob", "--print")
	bob.env["KVCTL_TOKEN"] = strings.TrimSpace(out)
	bob.does(exitDenied, "", "get", "tenant/1/a") // the context says all about a connection
	bob.env[endpointEnv] = endpoint
	bob.does(0, "", "put", "tenant/1/a", "1")
	has(t, bob.does(exitDenied, "", "put", "tenant/2/a", "1"), "PERMISSION_DENIED", "write", "tenant/2/a")
	bob.does(exitDenied, "", "user", "list")
	has(t, bob.does(0, "", "auth", "status"), "checked", "bob", "token", "rwl from tenant/1/ to tenant/10", "r from a to b")
	has(t, bob.does(0, "", "auth", "explain", "--grant", "rw:tenant/1/x"), "permitted")
	has(t, bob.does(exitDenied, "", "auth", "explain", "--grant", "rw:tenant/", "--action", "backup"), "lacks the read right")
	bob.does(exitUsage, "", "auth", "explain", "--grant", "x:tenant/")
	bob.does(exitUsage, "", "auth", "explain", "--range", "r:a-b")

	// A token in a file; it is revoked by its id.
	file := filepath.Join(t.TempDir(), "token")
	secret := ann.does(0, "", "token", "create", "--user", "bob", "--label", "nightly")
	if err := os.WriteFile(file, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	script := newPerson(t)
	script.env[endpointEnv] = endpoint
	script.does(0, "", "--token-file", file, "get", "tenant/1/a")
	list := ann.does(0, "", "token", "list", "--user", "bob", "-o", "jsonl")
	id := regexp.MustCompile(`"id":"([0-9a-f]{16})","user":"bob","label":"nightly"`).FindStringSubmatch(list)
	if id == nil || strings.Contains(list, strings.TrimSpace(secret)) {
		t.Fatalf("the list of tokens: %s", list)
	}
	ann.does(0, "", "token", "revoke", id[1])
	script.does(exitDenied, "", "--token-file", file, "get", "tenant/1/a")

	ann.does(0, "", "user", "update", "bob", "--max-watches", "3")
	has(t, ann.does(0, "", "user", "show", "bob"), "requests 1000", "watches 3")
	ann.does(0, "", "user", "update", "bob", "--disable")
	bob.does(exitDenied, "", "get", "tenant/1/a")
	has(t, ann.does(0, "", "user", "list"), "bob", "disabled")
	has(t, ann.does(0, "", "role", "list"), "root", "rwl all keys", "tenant1")
	ann.does(exitConflict, "", "user", "delete", "ann")
	ann.does(exitNotFound, "", "user", "show", "eve")

	// The contexts file is for its owner, and what is shown of it has no token.
	for _, format := range []string{"table", "jsonl"} {
		if out := ann.does(0, "", "context", "list", "-o", format); strings.Contains(out, "epochkv_") {
			t.Errorf("the contexts are shown with their tokens: %s", out)
		}
	}
	if info, err := os.Stat(ann.contexts); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(file, []byte(ann.does(0, "", "token", "create")), 0o600); err != nil {
		t.Fatal(err)
	}
	ann.does(0, "", "--token-file", file, "logout")
	ann.does(exitDenied, "", "--token-file", file, "user", "list")
	ann.does(0, "", "user", "list") // the token of the context was not sent, and stays
	ann.does(0, "", "logout")
	ann.does(exitDenied, "", "user", "list")

	// All are locked out.
	ann.does(exitError, "new secret\n", "offline", "user", "reset", "bob", "--data-dir", dir) // the server runs
	stop()
	ann.does(0, "new secret\n", "offline", "user", "reset", "bob", "--data-dir", dir)
	endpoint, token, _ = realServer(t, dir)
	if token != "" {
		t.Error("the server prints a token although there is an administrator")
	}
	delete(bob.env, "KVCTL_TOKEN")
	bob.env[endpointEnv] = endpoint
	bob.env["KVCTL_TOKEN"] = strings.TrimSpace(bob.does(0, "new secret\n", "login", "bob", "--print"))
	bob.does(0, "", "user", "delete", "ann")
	bob.does(0, "", "auth", "disable")
	has(t, script.with(endpointEnv, endpoint).does(0, "", "auth", "status"), "not checked")
	script.does(0, "", "get", "tenant/1/a")
}

func (p *person) with(name, value string) *person {
	p.env[name] = value
	return p
}

func has(t *testing.T, out string, all ...string) {
	t.Helper()
	for _, want := range all {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in:\n%s", want, out)
		}
	}
}

// TestATokenInAFileOfOthersIsReported: a shell makes the file with the rights that its umask leaves.
func TestATokenInAFileOfOthersIsReported(t *testing.T) {
	for mode, want := range map[os.FileMode]bool{0o600: false, 0o644: true, 0o640: true} {
		file, err := os.OpenFile(filepath.Join(t.TempDir(), "token"), os.O_WRONLY|os.O_CREATE, 0o600)
		if err == nil {
			err = file.Chmod(mode)
		}
		if err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		err = (&app{out: file, err: &errs}).printToken("epochkv_token")
		if reported := strings.Contains(errs.String(), "chmod 600"); err != nil || reported != want || strings.Contains(errs.String(), "epochkv_") {
			t.Errorf("%v: %v, %s", mode, err, &errs)
		}
		if err := file.Close(); err != nil {
			t.Error(err)
		}
	}
}
