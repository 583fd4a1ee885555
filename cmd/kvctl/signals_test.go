package main

import (
	"context"
	"io"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client/clienttest"
)

func interrupt(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
}

func mustEnd(t *testing.T, ctx context.Context, what string) {
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(30 * time.Second):
		t.Fatalf("%s goes on", what)
	}
}

// TestInterruptsEndTheStatementThatTakesThem, and the program when none does.
func TestInterruptsEndTheStatementThatTakesThem(t *testing.T) {
	i := new(interrupts)
	program, stop := i.watch()
	defer stop()
	for range 2 {
		statement, end := i.until(program)
		interrupt(t)
		mustEnd(t, statement, "the statement")
		end()
	}
	if program.Err() != nil {
		t.Error("the program has ended with a statement")
	}

	stuck, end := i.until(program)
	defer end()
	interrupt(t)
	mustEnd(t, stuck, "the statement")
	interrupt(t) // it has not said that it has ended
	mustEnd(t, program, "the program")
}

func TestAnInterruptWithoutAStatementEndsTheProgram(t *testing.T) {
	i := new(interrupts)
	program, stop := i.watch()
	defer stop()
	_, end := i.until(program)
	end()
	interrupt(t)
	mustEnd(t, program, "the program")
}

// TestASignalIsTheExitCode as shells have it: 128 and its number.
func TestASignalIsTheExitCode(t *testing.T) {
	server := clienttest.Start(t)
	codes := map[syscall.Signal]int{syscall.SIGHUP: exitHangup, syscall.SIGINT: exitInterrupted, syscall.SIGTERM: exitTerminated}
	if signal.Ignored(syscall.SIGHUP) { // the tests run below nohup
		delete(codes, syscall.SIGHUP)
	}
	for signal, want := range codes {
		ctx, stop := new(interrupts).watch()
		silent, writer := io.Pipe()
		a := &app{in: silent, out: io.Discard, err: io.Discard, getenv: func(string) string { return "" }}
		time.AfterFunc(20*time.Millisecond, func() {
			if err := syscall.Kill(syscall.Getpid(), signal); err != nil {
				t.Error(err)
			}
		})
		if code := a.run(ctx, []string{"put", "k", "-", "--endpoint", server.Endpoint}); code != want {
			t.Errorf("%v: exit code %d, want %d", signal, code, want)
		}
		stop()
		_ = writer.Close()
	}
}
