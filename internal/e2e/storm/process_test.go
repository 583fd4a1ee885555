package storm

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// process is a kvserver binary at work. It keeps the end of the server's log and the largest resident memory.
type process struct {
	cmd     *exec.Cmd
	address string
	exited  chan struct{} // closed when the process has ended; err is set before
	err     error
	planned atomic.Bool // the test ended it
	peak    atomic.Int64

	mu   sync.Mutex
	tail []string // the last lines of the log
}

const tailLines = 60

// start runs the binary on dir and returns when it serves.
func start(t *testing.T, binary, dir string, args ...string) *process {
	t.Helper()
	args = append([]string{"--data-dir", dir, "--listen", "127.0.0.1:0", "--http", "", "--log-format", "json", "--transport", *transport}, args...)
	p := &process{cmd: exec.Command(binary, args...), exited: make(chan struct{})}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill() }) // mostly it is gone already
	serving := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(stderr)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			p.keep(lines.Text())
			var line struct{ Msg, Listen string }
			if json.Unmarshal(lines.Bytes(), &line) == nil && line.Msg == "serving" {
				serving <- line.Listen
			}
		}
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	select {
	case p.address = <-serving:
	case <-p.exited:
		t.Fatalf("the server ended at its start with %v after\n%s", p.err, p.log())
	case <-time.After(startMax):
		t.Fatalf("the server does not serve %v after its start:\n%s", startMax, p.log())
	}
	go p.watchMemory()
	return p
}

func (p *process) keep(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tail = append(p.tail, line)
	if len(p.tail) > tailLines {
		p.tail = p.tail[len(p.tail)-tailLines:]
	}
}

func (p *process) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.tail, "\n")
}

// watchMemory samples the resident memory until the process ends.
func (p *process) watchMemory() {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-p.exited:
			return
		case <-tick.C:
			if rss, err := residentBytes(p.cmd.Process.Pid); err == nil && rss > p.peak.Load() {
				p.peak.Store(rss)
			}
		}
	}
}

func residentBytes(pid int) (int64, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "statm"))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0, fmt.Errorf("statm: %q", text)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}

// kill is kill -9: no handler runs, nothing is flushed.
func (p *process) kill() error {
	p.planned.Store(true)
	err := p.cmd.Process.Kill()
	<-p.exited
	return err
}

// stop is SIGTERM. It returns an error unless the process ends in time with exit code 0.
func (p *process) stop() error {
	p.planned.Store(true)
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.exited:
		return p.err
	case <-time.After(stopMax):
		_ = p.cmd.Process.Signal(syscall.SIGQUIT) // the log then has every goroutine's stack
		<-p.exited
		return errors.Join(fmt.Errorf("no end %v after SIGTERM", stopMax), p.err)
	}
}
