// Command kvserver runs EpochKV: flags, then configuration, then server.Run, and nothing else.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/server"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// Exit codes. A supervisor may restart after exitFailure; exitUsage repeats until the configuration
// changes.
const (
	exitFailure = 1
	exitUsage   = 2
)

func main() { os.Exit(run()) }

// signals returns a context and a channel. The first SIGINT or SIGTERM ends the context, so that
// the server drains. The second closes the channel, so that draining stops. A third ends the
// process.
func signals() (first context.Context, second <-chan struct{}) {
	first, stop := context.WithCancel(context.Background())
	shutdown, received := make(chan struct{}), make(chan os.Signal, 2)
	signal.Notify(received, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-received
		stop()
		<-received
		close(shutdown)
		signal.Stop(received)
	}()
	return first, shutdown
}

func run() int {
	ctx, second := signals() // before everything else: a signal during the start then ends it cleanly
	in, err := config.Load(os.Args[1:], os.Environ())
	switch {
	case err != nil:
		fmt.Fprintf(os.Stderr, "kvserver: %v\n", err)
		return exitUsage
	case in.Help != "":
		fmt.Print(in.Help)
		return 0
	case in.Version:
		fmt.Println(telemetry.Build())
		return 0
	}
	// A closed terminal must not end the server, nor must the end of what reads its log through a pipe:
	// by default, writing to a broken pipe as standard error ends a Go program. There is nothing to
	// reload: options are read at start.
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	log := telemetry.NewLogger(os.Stderr, in.Config.LogLevel, in.Config.LogFormat)
	if len(in.Ignored) > 0 {
		log.Info("ignoring environment variables that Kubernetes injects for a Service", "variables", in.Ignored)
	}
	if err := server.Run(ctx, second, in.Config, log); err != nil {
		log.Error("stopped with an error", "error", err)
		if errors.Is(err, server.ErrConfiguration) {
			return exitUsage
		}
		return exitFailure
	}
	return 0
}
