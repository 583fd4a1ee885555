package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// completed is what a shell is told about a command line whose last word is being typed.
func completed(t *testing.T, endpoint, contextsFile string, words ...string) string {
	t.Helper()
	var out, errs bytes.Buffer
	a := &app{in: strings.NewReader(""), out: &out, err: &errs, getenv: func(name string) string {
		return map[string]string{endpointEnv: endpoint, contextsEnv: contextsFile}[name]
	}}
	if code := a.run(t.Context(), append([]string{cobra.ShellCompNoDescRequestCmd}, words...)); code != 0 {
		t.Errorf("%q: exit code %d: %s", words, code, errs.String())
	}
	offered, directive, ok := strings.Cut(out.String(), ":4\n") // no files
	if !ok || directive != "" {
		t.Errorf("%q: %q", words, out.String())
	}
	return strings.Join(strings.Fields(offered), " ")
}

// completedInTime asks again if the server was too slow for the completion, which offers nothing then.
func completedInTime(t *testing.T, endpoint, contextsFile string, words ...string) string {
	t.Helper()
	for range 20 {
		began := time.Now()
		offered := completed(t, endpoint, contextsFile, words...)
		if time.Since(began) < completionWait {
			return offered
		}
	}
	t.Fatalf("%q: no answer within %v, 20 times", words, completionWait)
	return ""
}

func TestCompletionOffersKeysAndValues(t *testing.T) {
	endpoint := startReal(t)
	c, err := client.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	for _, key := range []string{"user/1", "user/2", "with space", "$(reboot)", "-dash", "\xff", "z"} {
		if _, err := c.Put(t.Context(), []byte(key), nil); err != nil {
			t.Fatal(err)
		}
	}
	contexts := t.TempDir() + "/contexts.json"
	if err := os.WriteFile(contexts, []byte(`{"contexts":{"prod":{"endpoint":"127.0.0.1:1"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ line, want string }{
		{"get user/", "user/1 user/2"},
		{"get user/1 u", "user/2"},
		{"put u", "user/1 user/2"},
		{"put user/1 u", ""},
		{"get $", ""},
		{"get w", ""},
		{"get nothing", ""},
		{"del --prefix user/2", "user/2"},
		{"scan --start=z", "z"},
		{"scan --end z", "z"},
		{"--hex get f", ""},
		{"--hex get ff", "ff"},
		{"--hex get 2d", "2d64617368"},
		{"get -o j", "table json jsonl raw"}, // the shell chooses
		{"put a b --durability ", "sync async"},
		{"import --format etcd", "auto jsonl csv etcd-snapshot"},
		{"import --bulk=n", "auto always never"},
		{"export --format ", "jsonl csv"},
		{"config get gc-", "gc-interval"},
		{"config get gc-interval gc-", ""},
		{"--endpoint 127.0.0.1:1 get ", ""},
		{"--context p", "prod"},
		{"context use ", "prod"},
		{"--context prod get z", ""}, // the server of the context, which does not exist
	} {
		if got := completedInTime(t, endpoint, contexts, strings.Split(test.line, " ")...); got != test.want {
			t.Errorf("kvctl %s<Tab> offers %q, want %q", test.line, got, test.want)
		}
	}
}

// TestCompletionOfManyKeysInsertsNothingWrong: a shell inserts what the keys that it is offered have in common.
func TestCompletionOfManyKeysInsertsNothingWrong(t *testing.T) {
	endpoint := startReal(t)
	c, err := client.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	var b client.Batch
	for i := range 3 * completionsMax {
		b.Put(fmt.Appendf(nil, "k/%03d", i), nil)
	}
	if _, err := c.Write(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("k/%03d", 3*completionsMax-1)
	offered := strings.Fields(completedInTime(t, endpoint, "", "get", "k"))
	if len(offered) != completionsMax+1 || offered[0] != "k/000" || offered[len(offered)-1] != want {
		t.Errorf("kvctl get k<Tab> offers %q", offered)
	}
	s := &statements{app: new(app), ctx: t.Context(), client: c}
	if _, offered, _ := s.complete("get k", 5); len(offered) != completionsMax+1 || offered[len(offered)-1] != want {
		t.Errorf("the shell offers %q", offered)
	}
}

// TestCompletionDoesNotWaitForAServerThatIsSilent: a connection that nothing answers.
func TestCompletionDoesNotWaitForAServerThatIsSilent(t *testing.T) {
	silent, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	begin := time.Now()
	if got := completed(t, silent.Addr().String(), "", "get", "k"); got != "" {
		t.Errorf("offered %q", got)
	}
	if took := time.Since(begin); took > timeoutDefault/2 {
		t.Errorf("took %v", took)
	}
}
