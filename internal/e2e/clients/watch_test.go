package clients

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// watchProcess is a running kvctl watch.
type watchProcess struct {
	t      *testing.T
	cmd    *exec.Cmd
	errs   bytes.Buffer
	mu     sync.Mutex
	output bytes.Buffer
}

// Write implements io.Writer for the command's output.
func (w *watchProcess) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.output.Write(p)
}

func (s *server) startWatch(args ...string) *watchProcess {
	s.t.Helper()
	w := &watchProcess{t: s.t, cmd: exec.Command(filepath.Join(bin, "kvctl"), append([]string{"watch"}, args...)...)}
	w.cmd.Env = append(append(os.Environ(), "KVCTL_ENDPOINT="+s.endpoint), s.env...)
	w.cmd.Stdout, w.cmd.Stderr = w, &w.errs
	if err := w.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = w.cmd.Process.Kill() })
	return w
}

// changes waits for so many lines, and returns them as "change key=value".
func (w *watchProcess) changes(n int) (list []string) {
	w.t.Helper()
	for deadline := time.Now().Add(startMax); ; time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		text := w.output.String()
		w.mu.Unlock()
		if lines := strings.SplitAfter(text, "\n"); len(lines) > n {
			for _, line := range lines[:len(lines)-1] {
				list = append(list, w.change(line))
			}
			return list
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("got %q, want %d lines\n%s", text, n, w.errs.String())
		}
	}
}

func (w *watchProcess) change(line string) string {
	w.t.Helper()
	var c struct {
		Epoch              uint64
		Change, Key, Value string
		Previous           *string
		End                bool
	}
	if err := json.Unmarshal([]byte(line), &c); err != nil {
		w.t.Fatalf("%q: %v", line, err)
	}
	if c.Epoch == 0 || c.End == (c.Change == "snapshot") { // each commit of this test has one key
		w.t.Errorf("%q", line)
	}
	text := c.Change + " " + c.Key + "=" + c.Value
	if c.Previous != nil {
		text += " was " + *c.Previous
	}
	return text
}

// interrupt ends the watch, and returns its exit code.
func (w *watchProcess) interrupt() int {
	_ = w.cmd.Process.Signal(syscall.SIGINT)
	return w.wait()
}

func (w *watchProcess) wait() int {
	_ = w.cmd.Wait() // the exit code tells
	return w.cmd.ProcessState.ExitCode()
}

func (s *server) mustKvctl(args ...string) string {
	s.t.Helper()
	out, errs, code := s.kvctl("", args...)
	if code != 0 {
		s.t.Fatalf("kvctl %v: exit %d: %s", args, code, errs)
	}
	return out
}

func mustBe(t *testing.T, got []string, want ...string) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("got  %q\nwant %q", got, want)
	}
}

// awaitToken waits until the file has another token than before, and returns it: the command prints first, and writes the token
// then.
func awaitToken(t *testing.T, file, before string) string {
	t.Helper()
	for deadline := time.Now().Add(startMax); ; time.Sleep(5 * time.Millisecond) {
		if text, err := os.ReadFile(file); err == nil && string(text) != before {
			return string(text)
		}
		if time.Now().After(deadline) {
			t.Fatal("no new token in the file")
		}
	}
}

// TestKvctlWatchContinues over kill -9 of the server, and with its token file after its own end. "kvctl feed" lists and ends it.
func TestKvctlWatchContinues(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--retention", "1h")
	s.mustKvctl("put", "a/1", "one")
	s.mustKvctl("put", "b/1", "not watched")
	file := filepath.Join(s.dir, "token")
	args := []string{"a/", "--snapshot", "--previous", "--from-token", file, "-o", "jsonl"}
	w := s.startWatch(args...)
	mustBe(t, w.changes(1), "snapshot a/1=one")
	s.mustKvctl("put", "a/1", "two")
	w.changes(2)
	s.signal(syscall.SIGKILL)
	s.start()
	s.mustKvctl("del", "a/1")
	mustBe(t, w.changes(3), "snapshot a/1=one", "set a/1=two was one", "delete a/1= was two")
	token := awaitToken(t, file, "")
	s.mustKvctl("put", "a/2", "three")
	w.changes(4)
	token = awaitToken(t, file, token)
	if code := w.interrupt(); code != 130 {
		t.Fatalf("an interrupted watch: exit %d: %s", code, w.errs.String())
	}
	s.mustKvctl("put", "a/3", "four")
	again := s.startWatch(args...)
	mustBe(t, again.changes(1), "set a/3=four")
	awaitToken(t, file, token)

	row := strings.Fields(strings.Split(s.mustKvctl("feed", "list", "-o", "table"), "\n")[1])
	if len(row) < 9 || row[1] != "live" && row[1] != "lagging" || !strings.Contains(strings.Join(row, " "), `"a/" to "a0"`) {
		t.Fatalf("feed list: %q", row)
	}
	s.mustKvctl("feed", "end", row[0])
	if code := again.wait(); code != 4 || !strings.Contains(again.errs.String(), "operator") {
		t.Fatalf("a watch that was ended: exit %d: %s", code, again.errs.String())
	}
	if _, errs, code := s.kvctl("", "feed", "end", row[0]); code != 3 {
		t.Fatalf("ended twice: exit %d: %s", code, errs)
	}
	s.mustKvctl("put", "a/4", "five")
	last := s.startWatch(args...)
	mustBe(t, last.changes(1), "set a/4=five")
	if code := last.interrupt(); code != 130 {
		t.Fatalf("exit %d", code)
	}
	if leftovers, _ := filepath.Glob(file + ".*"); len(leftovers) != 0 {
		t.Errorf("temporary files are left: %q", leftovers)
	}
}

// TestKvctlWatchRefusesWhatItDoesNotUnderstand, and says so with its exit code.
func TestKvctlWatchRefusesWhatItDoesNotUnderstand(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.mustKvctl("put", "a/1", "one")
	damaged, other := filepath.Join(s.dir, "damaged"), filepath.Join(s.dir, "other")
	if err := os.WriteFile(damaged, []byte("%%%"), 0o600); err != nil {
		t.Fatal(err)
	}
	w := s.startWatch("a/", "--after", "0", "--from-token", other, "-o", "jsonl")
	w.changes(1)
	awaitToken(t, other, "")
	w.interrupt()
	for _, test := range []struct {
		args string
		code int
		says string
	}{
		{"watch a b", 2, "at most 1"},
		{"watch a/ --prefix b/", 2, "not both"},
		{"watch a/ --snapshot --after 0", 2, "not both"},
		{"watch a/ --after x", 2, "after"},
		{"watch a/ --after 1000000000", 6, "kvctl:"},
		{"watch a/ --from-token " + damaged, 1, "remove the file"},
		{"watch b/ --from-token " + other, 2, "other ranges"},
		{"feed list --endpoint 127.0.0.1:1 --timeout 100ms", 6, "kvctl:"},
		{"feed end", 2, "arg"},
		{"feed end x", 2, "x"},
		{"feed list x", 2, "x"},
		{"feed end 99", 3, "no watch"},
	} {
		out, errs, code := s.kvctl("", strings.Fields(test.args)...)
		if code != test.code || !strings.Contains(errs, test.says) {
			t.Errorf("kvctl %s: exit %d, want %d and %q\n%s%s", test.args, code, test.code, test.says, out, errs)
		}
	}
}
