package peers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// process is a server's process, in a process group of its own.
type process struct {
	pid   int
	ended chan struct{} // closed when it has ended
	err   error         // why; readable once ended is closed
	log   string        // file that has what it printed
}

// endTimeout is how long a server may take to end by itself. Its data is thrown away, so that nothing is lost by a kill.
const endTimeout = 3 * time.Second

// start runs a command whose output goes to a file in dir.
func start(dir, binary string, arguments ...string) (*process, error) {
	p := &process{ended: make(chan struct{}), log: filepath.Join(dir, "output.log")}
	out, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	command := exec.Command(binary, arguments...)
	command.Dir, command.Stdout, command.Stderr = dir, out, out
	// A group of its own keeps an interrupt at the terminal away from it: it ends when the load generator ends it. The kernel kills
	// it if the load generator dies; it watches the thread that started the server, which must therefore stay.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := command.Start()
		started <- err
		if err == nil {
			p.err = command.Wait()
			close(p.ended)
		}
	}()
	if err := errors.Join(<-started, out.Close()); err != nil {
		return nil, err
	}
	p.pid = command.Process.Pid
	return p, nil
}

// pause stops the process where it stands; resume lets it go on.
func (p *process) pause() error  { return p.signal(syscall.SIGSTOP) }
func (p *process) resume() error { return p.signal(syscall.SIGCONT) }

// signal reaches the children of the server, too.
func (p *process) signal(s syscall.Signal) error {
	select {
	case <-p.ended:
		return p.died()
	default:
		return syscall.Kill(-p.pid, s)
	}
}

func (p *process) died() error {
	text, _ := os.ReadFile(p.log)
	return fmt.Errorf("the server ended (%w); it said: %s", p.err, text[max(len(text)-2000, 0):])
}

// end asks the server to end, and kills what is left of its group.
func (p *process) end() error {
	select {
	case <-p.ended:
		return p.died()
	default:
	}
	// The group is signalled only while the server has not been waited for, so that its number cannot belong to another process by now.
	_ = syscall.Kill(-p.pid, syscall.SIGTERM)
	_ = syscall.Kill(-p.pid, syscall.SIGCONT)
	select {
	case <-p.ended:
	case <-time.After(endTimeout):
		_ = syscall.Kill(-p.pid, syscall.SIGKILL)
		<-p.ended
	}
	return nil
}

// readyTimeout is how long a server may take to answer for the first time.
const readyTimeout = 20 * time.Second

// ready waits until the server listens.
func (p *process) ready(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("it does not listen at %s", address))
	defer cancel()
	var dialer net.Dialer
	for {
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-p.ended:
			return p.died()
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// freeAddress returns an address that is not in use. If another process takes it before the server does, the server fails to start.
func freeAddress() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}
