// Command kvserver runs EpochKV: flags, then configuration, then server.Run, and nothing else.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// signals returns a context and the channels of a server. The first SIGINT or SIGTERM ends the context, so that
// the server drains. The second closes Shutdown, so that draining stops. A third ends the process.
// SIGHUP, which a closed terminal sends, too, asks for a reload of certificates and configuration.
func signals() (first context.Context, others server.Signals) {
	first, stop := context.WithCancel(context.Background())
	shutdown, received := make(chan struct{}), make(chan os.Signal, 2)
	signal.Notify(received, os.Interrupt, syscall.SIGTERM)
	hangups, reload := make(chan os.Signal, 1), make(chan struct{}, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	go func() {
		for range hangups {
			select {
			case reload <- struct{}{}:
			default: // one is asked for already
			}
		}
	}()
	go func() {
		<-received
		stop()
		<-received
		close(shutdown)
		signal.Stop(received)
	}()
	return first, server.Signals{Shutdown: shutdown, Reload: reload}
}

func run() int {
	ctx, others := signals() // before everything else: a signal during the start then ends it cleanly
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
	// The end of what reads the server's log through a pipe must not end the server: by default, writing
	// to a broken pipe as standard error ends a Go program.
	signal.Ignore(syscall.SIGPIPE)
	others.Level = new(slog.LevelVar)
	others.Level.Set(in.Config.LogLevel)
	log, endLog := telemetry.StartLog(os.Stderr, others.Level, in.Config.LogFormat)
	defer endLog()
	if len(in.Ignored) > 0 {
		log.Info("ignoring environment variables that Kubernetes injects for a Service", "variables", in.Ignored)
	}
	if err := server.Run(ctx, others, in.Config, log); err != nil {
		log.Error("stopped with an error", "error", err)
		if errors.Is(err, server.ErrConfiguration) {
			return exitUsage
		}
		return exitFailure
	}
	return 0
}
