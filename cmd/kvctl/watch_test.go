package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
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

// TestAWatchKeepsATokenBeforeTheFirstChange: if it is killed then, the next one begins where it did, and not when it starts.
func TestAWatchKeepsATokenBeforeTheFirstChange(t *testing.T) {
	endpoint, file := startReal(t), filepath.Join(t.TempDir(), "token")
	ctx, cancel := context.WithCancel(t.Context())
	a := &app{in: strings.NewReader(""), out: io.Discard, err: io.Discard, getenv: func(string) string { return "" }}
	ended := make(chan int, 1)
	go func() { ended <- a.run(ctx, []string{"watch", "--from-token", file, "--endpoint", endpoint}) }()
	defer func() {
		cancel()
		<-ended
	}()
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) { // progress comes after 10 s
		if token, err := readToken(file); err == nil && token != nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("there is no token")
		}
	}
}

// TestAWatchSaysThatItsSnapshotBeginsAgain: a consumer would keep keys of the first one that were deleted since, also if the watch has gone on
// with that one by the token of an earlier run.
func TestAWatchSaysThatItsSnapshotBeginsAgain(t *testing.T) {
	part := func(begin bool, key string) *client.Update {
		return &client.Update{Begin: begin, Snapshot: []client.Entry{{Key: []byte(key), Value: []byte("v"), Epoch: 3}}, Partial: true, Epoch: 7}
	}
	for format, want := range map[string]string{
		formatJSONL: `{"epoch":3,"change":"snapshot","key":"a","value":"v"}
{"epoch":3,"change":"snapshot","key":"b","value":"v"}
{"epoch":7,"change":"begin"}
{"epoch":3,"change":"snapshot","key":"b","value":"v"}
`,
		formatRaw: "snapshot\ta\tv\nsnapshot\tb\tv\nbegin\t\t\nsnapshot\tb\tv\n",
	} {
		for _, first := range []bool{true, false} {
			var out bytes.Buffer
			p := &changePrinter{app: &app{out: &out}, w: bufio.NewWriter(&out), format: format, o: &client.WatchOptions{Snapshot: true}}
			for _, u := range []*client.Update{part(first, "a"), part(false, "b"), part(true, "b")} {
				if err := p.print(u); err != nil {
					t.Fatal(err)
				}
			}
			if out.String() != want {
				t.Errorf("%s:\n%swant:\n%s", format, &out, want)
			}
		}
	}
}
