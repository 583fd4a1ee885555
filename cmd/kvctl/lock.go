package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// lockFlags are what lock and elect have in common.
type lockFlags struct {
	ttl       time.Duration
	wait      time.Duration
	killAfter time.Duration
	value     string
}

func (f *lockFlags) add(cmd *cobra.Command) {
	cmd.Flags().DurationVar(&f.ttl, "ttl", 15*time.Second, "time to live of the lease, a `DURATION`: how long others wait if this process dies")
	cmd.Flags().DurationVar(&f.wait, "wait", 0, "give up after this `DURATION`, with exit code 4; 0 waits as long as it takes")
}

// errLockHeld ends a command that has waited in vain.
var errLockHeld = errors.New("another lease holds the lock")

// commandError is the exit code of a command that was run.
type commandError struct{ code int }

func (e commandError) Error() string { return fmt.Sprintf("the command ended with %d", e.code) }

func (a *app) lockCommand() *cobra.Command {
	var f lockFlags
	cmd := &cobra.Command{
		Use:   "lock NAME -- COMMAND [ARG...]",
		Short: "Run a command while holding a lock",
		Long: `Acquire the lock NAME, run COMMAND, and release the lock when it has ended. The exit code is that of COMMAND, or 128 and the number of the signal
that ended it. Signals are passed on to COMMAND.

If the lock is lost while COMMAND runs, because the server cannot be reached for the time to live, COMMAND gets SIGTERM, and SIGKILL if it has not
ended after --kill-after; the exit code is 4. COMMAND may run for that long without the lock: for writes that must not happen then, it has the
fencing token in KVCTL_LOCK_TOKEN, and the name in KVCTL_LOCK_NAME (put --fence NAME=TOKEN).`,
		Example: `  kvctl lock nightly -- ./backup.sh
  kvctl lock --wait 10s deploy -- make deploy`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() != 1 {
				return usageError{errors.New("expected lock NAME -- COMMAND: -- comes after the name")}
			}
			return a.withLock(cmd.Context(), args[0], &f, func(l *client.Lease, lock *client.Lock) error {
				return a.runHolding(cmd.Context(), l, lock, args[0], args[1:], f.killAfter)
			})
		},
	}
	f.add(cmd)
	cmd.Flags().DurationVar(&f.killAfter, "kill-after", 5*time.Second, "`DURATION` between SIGTERM and SIGKILL if the lock is lost")
	cmd.Flags().StringVar(&f.value, "value", "", "`TEXT` that others see of the holder; default: host name and process id")
	return cmd
}

// withLock acquires a lock with a lease of its own, and ends the lease after do.
func (a *app) withLock(ctx context.Context, name string, f *lockFlags, do func(*client.Lease, *client.Lock) error) error {
	key, err := a.bytesArg(name)
	if err != nil {
		return err
	}
	if f.value == "" {
		host, _ := os.Hostname()
		f.value = fmt.Sprintf("%s %d", host, os.Getpid())
	}
	return a.withClient(func(c *client.Client) error {
		lease, err := c.GrantLease(ctx, f.ttl, "kvctl lock "+f.value)
		if err != nil {
			return err
		}
		err = a.acquireAndDo(ctx, c, lease, key, f, do)
		ended := lease.Close(context.Background())
		if _, ran := errors.AsType[commandError](err); ran && ended != nil {
			_, _ = fmt.Fprintf(a.err, "kvctl: the lock is held until its time to live has passed, because it could not be released: %v\n", ended)
		}
		if err == nil {
			err = ended
		}
		return err
	})
}

func (a *app) acquireAndDo(
	ctx context.Context, c *client.Client, lease *client.Lease, name []byte, f *lockFlags, do func(*client.Lease, *client.Lock) error,
) error {
	waiting, stop := ctx, context.CancelFunc(func() {})
	if f.wait > 0 {
		waiting, stop = context.WithTimeoutCause(ctx, f.wait, errLockHeld)
	}
	defer stop()
	lock, err := c.Lock(waiting, name, lease, []byte(f.value))
	if err != nil {
		return err
	}
	return do(lease, lock)
}

// runHolding runs a command until it ends, or until the lock is lost. Nothing that standard error does keeps it from ending the command:
// a reader that has ended, or takes nothing.
func (a *app) runHolding(
	ctx context.Context, lease *client.Lease, lock *client.Lock, name string, command []string, killAfter time.Duration,
) error {
	child := exec.Command(command[0], command[1:]...) // its end is not that of kvctl's context
	child.Stdin, child.Stdout, child.Stderr = a.stdin(), a.out, a.err
	child.Env = append(os.Environ(),
		"KVCTL_LOCK_NAME="+name, fmt.Sprintf("KVCTL_LOCK_TOKEN=%d", lock.Token()), fmt.Sprintf("KVCTL_LEASE=%d", lease.ID()))
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(signals)
	closed := make(chan os.Signal, 1) // nothing reads it: a write to a closed standard error then fails, and does not end kvctl
	signal.Notify(closed, syscall.SIGPIPE)
	defer signal.Stop(closed)
	if ctx.Err() != nil { // a signal came before those of above were passed on
		return context.Cause(ctx)
	}
	if err := child.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- child.Wait() }()
	lost, kill, said := lease.Lost(), (<-chan time.Time)(nil), make(chan struct{})
	for {
		select {
		case err := <-done:
			if lost != nil {
				return commandOutcome(err)
			}
			<-said
			return client.ErrLeaseLost
		case s := <-signals:
			if s != syscall.SIGINT || !a.inTerminal { // a terminal sends it to the command as well
				_ = child.Process.Signal(s) // it may have ended
			}
		case <-lost:
			lost, kill = nil, time.After(killAfter)
			_ = child.Process.Signal(syscall.SIGTERM)
			go func() {
				_, _ = fmt.Fprintln(a.err, "kvctl: the lock is lost; ending the command")
				close(said)
			}()
		case <-kill:
			_ = child.Process.Kill()
		}
	}
}

// stdin is standard input for a command, which reads it by itself.
func (a *app) stdin() io.Reader {
	if in, ok := a.in.(*interruptible); ok {
		return in.in
	}
	return a.in
}

// commandOutcome is how a command ended.
func commandOutcome(err error) error {
	if err == nil {
		return commandError{exitOK}
	}
	ended, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return err
	}
	if status, ok := ended.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return commandError{128 + int(status.Signal())}
	}
	return commandError{ended.ExitCode()}
}
