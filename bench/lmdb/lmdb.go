// Package lmdb drives LMDB through its C interface, in a process of its own that is compiled when it is first asked for: the
// project is held against the C library and not against a binding. It needs a C compiler and the library's header
// (Debian: liblmdb-dev); without them the arm is absent.
package lmdb

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/epochkv/epochkv/bench/harness"
)

//go:embed program/peer.c
var source []byte

// Kinds of work; program/peer.c says more.
const (
	Get  = "get"  // point reads, each at the newest state
	Scan = "scan" // of 100 entries from random keys
	All  = "all"  // whole scans, counted by entry

	Put   = "put"   // overwrites of random keys, each a transaction that is not synced
	Batch = "batch" // the same, 100 a transaction, counted by entry

	Parts  = "parts"  // the key range has count parts from now on: Put and Batch overwrite keys of the first
	Insert = "insert" // new keys, each a transaction
	Hold   = "hold"   // overwrites of every key, each a transaction after which the state is held
	Newest = "newest" // reads of random keys at the newest state
	Oldest = "oldest" // and at the first that is held
	Number = "number" // overwrites of them, each a transaction
	Check  = "check"  // counts the held states in which a key has the value that it had
)

// Process is a process with an environment.
type Process struct {
	process *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
}

// Arm is LMDB doing kind: each of r.Point threads its share of r.Size operations. Keys of 16 random bytes, values of 100.
func Arm(kind string) harness.Arm {
	return harness.Arm{Name: "lmdb in C", Run: func(r *harness.Run) error { return work(r, kind, r.Load, r.Point) }}
}

// GrowthArm is LMDB doing kind in one thread, over r.Point times as many keys.
func GrowthArm(kind string) harness.Arm {
	return harness.Arm{Name: "lmdb in C, " + kind, Run: func(r *harness.Run) error { return work(r, kind, r.Load*r.Point, 1) }}
}

func work(r *harness.Run, kind string, keys, threads int) error {
	l, err := harness.Shared(r, fmt.Sprintf("lmdb with %d keys", keys), func(dir string) (*Process, error) { return Start(dir, keys, valueBytes) })
	if err != nil {
		return err
	}
	share := max(r.Size/threads, 1)
	if kind == All {
		share = r.Size
	}
	var done int
	if done, err = l.Time(r, kind, threads, share); err != nil {
		return err
	}
	return r.Verified(done, threads*share) // the process compares each value that it gets by key
}

// Time is Do, as what r is about.
func (l *Process) Time(r *harness.Run, kind string, threads, count int) (done int, err error) {
	err = r.TimeServer(l.process.Process.Pid, func() (int, error) {
		done, err = l.Do(kind, threads, count)
		return done, err
	})
	return done, err
}

// valueBytes is the size of values in environments that Arm and GrowthArm load.
const valueBytes = 100

// Start compiles the program and has it load keys into dir, with values of so many bytes.
func Start(dir string, keys, valueBytes int) (*Process, error) {
	program := filepath.Join(dir, "peer")
	file := program + ".c"
	if err := os.WriteFile(file, source, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command("cc", "-O2", "-o", program, file, "-llmdb", "-lpthread").CombinedOutput(); err != nil { //nolint:gosec // our own source
		first, _, _ := strings.Cut(string(out), "\n")
		return nil, fmt.Errorf("%w: cc with liblmdb-dev: %w %s", harness.ErrAbsent, err, first)
	}
	process := exec.CommandContext(context.Background(), program, dir, strconv.Itoa(keys), strconv.Itoa(valueBytes)) //nolint:gosec // our own program
	process.Stderr = os.Stderr
	in, err := process.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := process.Start(); err != nil {
		return nil, err
	}
	l := &Process{process: process, in: in, out: bufio.NewReader(out)}
	if line, err := l.out.ReadString('\n'); err != nil || line != "ready\n" {
		return nil, errors.Join(fmt.Errorf("lmdb: %q instead of ready: %w", line, err), l.Close())
	}
	return l, nil
}

// Do has the process do count operations in each thread and returns how many it did.
func (l *Process) Do(kind string, threads, count int) (int, error) {
	if _, err := fmt.Fprintln(l.in, kind, threads, count); err != nil {
		return 0, err
	}
	line, err := l.out.ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("lmdb: %w", err)
	}
	return strconv.Atoi(strings.TrimSpace(line))
}

// Close ends the process.
func (l *Process) Close() error {
	return errors.Join(l.in.Close(), l.process.Wait())
}
