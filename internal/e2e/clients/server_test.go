// Package clients drives the built binaries as a user does: kvserver, kvctl, the Go client over a
// network that breaks, and the tour of the README.
package clients

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

const startMax = 20 * time.Second

// bin has the binaries under test.
var bin string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "epochkv-e2e-")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	build := exec.Command("go", "build", "-o", dir+string(filepath.Separator))
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-tags" { // the test's own
				build.Args = append(build.Args, s.Key, s.Value)
			}
		}
	}
	build.Args = append(build.Args, "github.com/epochkv/epochkv/cmd/kvserver", "github.com/epochkv/epochkv/cmd/kvctl")
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "building the binaries:", err)
		return 1
	}
	bin = dir
	return m.Run()
}

// server is a running kvserver.
type server struct {
	t        *testing.T
	dir      string
	endpoint string
	args     []string // in addition to those that every server gets
	env      []string // of the server and of kvctl, in addition to that of the test
	dialed   []client.Option
	process  *exec.Cmd
	log      lockedBuffer
}

// startServer runs a server on an empty directory until the test ends.
func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	s := &server{t: t, dir: t.TempDir(), endpoint: freeAddress(t), args: args}
	s.run()
	if *withUsers {
		s.checkUsers()
	}
	return s
}

var withUsers = flag.Bool("users", false, "check users in the tests of this package that start a server on an empty directory, whose clients then have a token")

// checkUsers makes the first administrator, and has users checked. Clients of the test have its token from now on.
func (s *server) checkUsers() {
	s.t.Helper()
	once := bootstrapToken.FindStringSubmatch(s.log.text())
	if once == nil {
		s.t.Fatalf("the server has logged no token:\n%s", s.log.text())
	}
	for _, command := range []struct{ stdin, line string }{
		{once[1] + "\ntests' password\n", "user bootstrap tests"}, {"tests' password\n", "login tests --print"}, {"", "auth enable"},
	} {
		out, errs, code := s.kvctl(command.stdin, strings.Fields(command.line)...)
		if code != 0 {
			s.t.Fatalf("kvctl %s: %s", command.line, errs)
		}
		if token := strings.TrimSpace(out); strings.HasPrefix(command.line, "login") {
			s.env = append(s.env, "KVCTL_TOKEN="+token)
			s.dialed = append(s.dialed, client.WithToken(token))
		}
	}
}

var bootstrapToken = regexp.MustCompile("bootstrap_token=([^ \n]*)")

// lockedBuffer is what a process writes, which the test may read meanwhile.
type lockedBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *lockedBuffer) text() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

// run starts a server that ends with the test.
func (s *server) run() {
	s.t.Helper()
	s.start()
	s.t.Cleanup(func() {
		s.signal(syscall.SIGKILL)
		if s.t.Failed() {
			s.t.Logf("the server's log:\n%s", s.log.text())
		}
	})
}

// freeAddress finds an unused port. Another process may take it before the server does; the test
// then fails and says so.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

func (s *server) start() {
	s.t.Helper()
	s.process = exec.Command(filepath.Join(bin, "kvserver"), "--data-dir", filepath.Join(s.dir, "data"),
		"--listen", s.endpoint, "--http", "", "--memory", "256MiB")
	s.process.Args = append(s.process.Args, s.args...)
	s.process.Env = append(os.Environ(), s.env...)
	s.process.Stdout, s.process.Stderr = &s.log, &s.log
	if err := s.process.Start(); err != nil {
		s.t.Fatal(err)
	}
	c := s.dial(s.endpoint)
	for deadline := time.Now().Add(startMax); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
		serving, err := c.Healthy(ctx)
		cancel()
		if err == nil && serving {
			return
		}
	}
	s.signal(syscall.SIGKILL)
	s.t.Fatalf("the server did not start:\n%s", s.log.text())
}

// signal sends a signal and waits for the end of the process. It returns the exit code, -1 if a
// signal ended it.
func (s *server) signal(signal syscall.Signal) int {
	if s.process.ProcessState == nil {
		_ = s.process.Process.Signal(signal) // it may be gone already, which Wait finds out
		_ = s.process.Wait()                 // the exit code tells
	}
	return s.process.ProcessState.ExitCode()
}

func (s *server) dial(endpoint string, options ...client.Option) *client.Client {
	s.t.Helper()
	c, err := client.Dial(endpoint, append(slices.Clip(s.dialed), options...)...)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// kvctl runs a command against the server.
func (s *server) kvctl(stdin string, args ...string) (stdout, stderr string, code int) {
	s.t.Helper()
	cmd := exec.Command(filepath.Join(bin, "kvctl"), args...)
	cmd.Env = append(append(os.Environ(), "KVCTL_ENDPOINT="+s.endpoint), s.env...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewBufferString(stdin), &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		s.t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
