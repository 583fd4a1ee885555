// Command echoserver answers EpochKV's requests from constants, on the address that it is given: the ceiling of the protocol.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/epochkv/epochkv/bench/wire"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "echoserver:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) != 2 {
		return fmt.Errorf("usage: echoserver host:port")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	listener, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		return err
	}
	return wire.ServeEcho(ctx, listener)
}
