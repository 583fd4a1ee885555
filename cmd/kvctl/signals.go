package main

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// interrupts ends the program's context at the first SIGINT, SIGTERM or SIGHUP, which a closed terminal sends; a second one ends the process. A
// statement of the shell that goes on until Ctrl-C takes SIGINT for itself meanwhile.
type interrupts struct {
	mu  sync.Mutex
	end context.CancelFunc // of the statement that takes SIGINT; nil: none does
}

// signalError is why the program's context has ended. It is context.Canceled for all that compare it.
type signalError struct{ signal os.Signal }

func (e signalError) Error() string { return e.signal.String() }

func (signalError) Is(target error) bool { return target == context.Canceled }

// watch returns the program's context.
func (i *interrupts) watch() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	received := make(chan os.Signal, 2)
	signal.Notify(received, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // by nohup
		signal.Notify(received, syscall.SIGHUP)
	}
	go func() {
		for s := range received {
			if s != os.Interrupt || !i.endStatement() {
				cancel(signalError{s})
				signal.Stop(received)
				return
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

func (i *interrupts) endStatement() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.end == nil {
		return false
	}
	i.end()
	i.end = nil // the next Ctrl-C ends the program, should the statement not end
	return true
}

// until returns a context that Ctrl-C ends, instead of the program, until the returned function is called.
func (i *interrupts) until(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	i.mu.Lock()
	defer i.mu.Unlock()
	i.end = cancel
	return ctx, func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.end = nil
		cancel()
	}
}
