package peers

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startForTest is the environment variable that makes the test binary a load generator with one server, to be killed.
const startForTest = "PEERS_START_FOR_TEST"

// programs is the directory in which the tests build servers.
var programs string

func TestMain(m *testing.M) {
	if os.Getenv(startForTest) == "" {
		os.Exit(runTests(m))
	}
	p, err := start(os.Getenv(startForTest), "sleep", "60")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(p.pid)
	select {}
}

func runTests(m *testing.M) int {
	var err error
	if programs, err = os.MkdirTemp("", "peers-"); err != nil {
		fmt.Println(err)
		return 1
	}
	defer func() { _ = os.RemoveAll(programs) }()
	return m.Run()
}

// gone waits until a process has ended.
func gone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		// A process that is dead but not waited for counts as gone, too.
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(text), ") Z ") {
			return
		}
	}
	t.Errorf("process %d is still there", pid)
	_ = syscall.Kill(pid, syscall.SIGKILL)
}

func TestServersEndInEveryState(t *testing.T) {
	for name, c := range map[string]struct {
		command []string
		pause   bool
	}{
		"running":  {[]string{"sh", "-c", "echo ready; exec sleep 60"}, false},
		"stopped":  {[]string{"sh", "-c", "echo ready; exec sleep 60"}, true},
		"stubborn": {[]string{"sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := start(t.TempDir(), c.command[0], c.command[1:]...)
			if err != nil {
				t.Fatal(err)
			}
			for text, err := os.ReadFile(p.log); err != nil || len(text) == 0; text, err = os.ReadFile(p.log) {
				time.Sleep(time.Millisecond)
			}
			if c.pause {
				if err := p.pause(); err != nil {
					t.Fatal(err)
				}
			}
			if err := p.end(); err != nil {
				t.Error(err)
			}
			gone(t, p.pid)
			if err := p.pause(); err == nil {
				t.Error("a process that has ended was stopped")
			}
		})
	}
}

func TestServersEndWithTheLoadGenerator(t *testing.T) {
	generator := exec.Command(os.Args[0])
	generator.Env = append(os.Environ(), startForTest+"="+t.TempDir())
	out, err := generator.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := generator.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	pid, notNumber := strconv.Atoi(strings.TrimSpace(line))
	if err := errors.Join(err, notNumber, generator.Process.Kill()); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	_ = generator.Wait() // it was killed
	gone(t, pid)
}

func TestAServerThatDiesSaysWhy(t *testing.T) {
	p, err := start(t.TempDir(), "sh", "-c", "echo the disk is full; exit 3")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.ready(t.Context(), "127.0.0.1:1"); err == nil || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("got %v, want what the server printed", err)
	}
}
