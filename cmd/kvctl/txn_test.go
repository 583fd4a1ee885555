package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/server"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestTransactionScripts runs the scripts in testdata/real as TestScripts does, against the real server: the small one knows no
// transactions.
func TestTransactionScripts(t *testing.T) {
	testseed.SkipUnderRace(t)
	scripts, err := filepath.Glob("testdata/real/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, path := range scripts {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			runScript(t, path, &clienttest.Server{Endpoint: startReal(t)})
		})
	}
}

// startReal runs a server until the test ends.
func startReal(t *testing.T, adjust ...func(*config.Config)) (endpoint string) {
	t.Helper()
	return startServer(t, adjust...).Address()
}

func startServer(t *testing.T, adjust ...func(*config.Config)) *server.Server {
	t.Helper()
	c := config.Default()
	c.DataDir, c.Listen, c.HTTP, c.Memory = t.TempDir(), "127.0.0.1:0", "", 64*config.MiB
	for _, f := range adjust {
		f(&c)
	}
	s, err := server.Open(t.Context(), c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestStatementsSplitIntoWords(t *testing.T) {
	cases := map[string][]string{
		``:                       nil,
		`  # only a comment`:     nil,
		`get a  b`:               {"get", "a", "b"},
		`put 'a b' "c\x00d\"e"`:  {"put", "a b", "c\x00d\"e"},
		`put k '' # the value`:   {"put", "k", ""},
		`put k a#b`:              {"put", "k", "a#b"},
		`put k don't`:            {"put", "k", "don't"},
		"\tscan\tuser/ limit 10": {"scan", "user/", "limit", "10"},
	}
	for line, want := range cases {
		if got, err := splitStatement(line); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: got %q, %v", line, got, err)
		}
	}
	for _, line := range []string{`put k "v`, `put k 'v`, `put k "\z"`, `put "a"b c`, `put 'a'b c`, `put 'a'"b" c`} {
		if words, err := splitStatement(line); err == nil {
			t.Errorf("%s is taken as %q", line, words)
		}
	}
}

func TestTabCompletesVerbsAndKeys(t *testing.T) {
	c, err := client.Dial(startReal(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for _, key := range []string{"user/1", "user/2", "user/two words", "visits"} {
		if _, err := c.Put(t.Context(), []byte(key), nil); err != nil {
			t.Fatal(err)
		}
	}
	s := &statements{app: &app{}, ctx: t.Context(), client: c}
	cases := []struct{ line, want string }{
		{"", "get put del scan delrange incr append cas begin savepoint rollback commit at status conditions watch help exit"},
		{"s", "scan savepoint status"},
		{"get user/", `user/1|user/2|"user/two words"`},
		{"get user/1 vi", "visits"},
		{"put v", "visits"},
		{"put visits v", ""},
		{"begin v", ""},
		{"get 'vi", ""},
	}
	for _, k := range cases {
		head, got, _ := s.complete(k.line, len(k.line))
		for i := range got {
			got[i] = strings.TrimSpace(got[i])
		}
		separator := " "
		if strings.Contains(k.line, " ") {
			separator = "|"
		}
		if strings.Join(got, separator) != k.want || !strings.HasPrefix(k.line, head) {
			t.Errorf("%q completes to %q behind %q, want %s", k.line, got, head, k.want)
		}
	}
}

// TestOutputOfAScriptHasABound: what a script prints is kept only while it may run again, and then within a bound.
func TestOutputOfAScriptHasABound(t *testing.T) {
	defer func(most int) { attemptBytesMax = most }(attemptBytesMax)
	attemptBytesMax = 1 << 20
	script := "put k " + strings.Repeat("v", 64<<10) + "\n" + strings.Repeat("get k\n", 16)
	endpoint := startReal(t)
	for retries, want := range []int{0, 1} {
		var out, failed bytes.Buffer
		a := &app{in: strings.NewReader(script), out: &out, err: &failed, getenv: func(string) string { return "" }}
		code := a.run(t.Context(), []string{"txn", "-", "-o", "raw", "--endpoint", endpoint, "--retries", fmt.Sprint(retries)})
		if code != want || (code == 0) != (out.Len() >= attemptBytesMax) || (code != 0) != strings.Contains(failed.String(), "1.0 MiB") {
			t.Errorf("%d retries: exit code %d, %d bytes, %s", retries, code, out.Len(), &failed)
		}
	}
}

// TestATransactionEndsWithTheTimeout: a server that takes requests and answers none holds a script no longer up than other commands.
func TestATransactionEndsWithTheTimeout(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	silent := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		<-stream.Context().Done()
		return stream.Context().Err()
	}))
	go func() { _ = silent.Serve(listener) }() // ends with Stop
	defer silent.Stop()
	ended := make(chan string, 1)
	go func() {
		var failed bytes.Buffer
		a := &app{in: strings.NewReader("put k v\n"), out: &failed, err: &failed, getenv: func(string) string { return "" }}
		code := a.run(t.Context(), []string{"txn", "-", "--timeout", "30ms", "--endpoint", listener.Addr().String()})
		ended <- fmt.Sprintf("exit code %d, %s", code, &failed)
	}()
	select {
	case got := <-ended:
		if !strings.HasPrefix(got, fmt.Sprintf("exit code %d,", exitUnavailable)) {
			t.Error(got)
		}
	case <-time.After(10 * time.Second):
		t.Error("the script does not end")
	}
}
