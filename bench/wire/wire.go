// Package wire measures the server over gRPC against an echo server: the same messages, settings and codec without
// a store, which is the protocol's ceiling. For durable writes the ceiling is echo + sync: the echo server whose writes wait
// for a shared sync of as many bytes as the store logs. Client and server share the process and its cores.
//
// An arm is a target (kvserver or echo) under one kind of load. Loads are closed loops: unary callers that each wait for their
// answer, or streams that each keep a window of requests in flight.
package wire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	bench "github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/config"
)

const (
	keyBytes   = 24 // room for a key of either shape: 16 random bytes, or a table key
	valueBytes = 100
	// connections carry all callers or streams of a run.
	connections = 2
	// messageBytes is enough for a batch that loads keys.
	messageBytes = 64 << 20
)

// target is a server that a run talks to.
type target struct {
	address string
	stop    func() error

	credentials credentials.TransportCredentials // nil: plain text
}

type startTarget func(dir string) (*target, error)

// startKV runs a whole kvserver on dir.
func startKV(dir string) (*target, error) { return startKVOver(dir, config.Default().Transport) }

// startKVOverGRPC runs a whole kvserver with the transport of the gRPC library.
func startKVOverGRPC(dir string) (*target, error) { return startKVOver(dir, config.TransportGRPC) }

func startKVOver(dir string, transport config.Transport) (*target, error) {
	c := config.Default()
	c.Transport = transport
	c.DataDir, c.Listen, c.HTTP, c.Memory = dir, "127.0.0.1:0", "", 8*config.GiB
	address, stop, err := bench.StartServer(c)
	if err != nil {
		return nil, err
	}
	return &target{address: address, stop: stop}, nil
}

// startEcho runs a server that answers from constants.
func startEcho(string) (*target, error) { return startServing(ServeEcho) }

// startSyncedEcho runs a server that answers writes from constants after a shared sync of their bytes.
func startSyncedEcho(dir string) (*target, error) {
	return startServing(func(ctx context.Context, listener net.Listener) error { return serveSyncedEcho(ctx, listener, dir) })
}

// startDirectEcho is startEcho with the server's own transport.
func startDirectEcho(string) (*target, error) {
	return startServing(func(ctx context.Context, listener net.Listener) error { return serveDirectEcho(ctx, listener, "") })
}

// startSyncedDirectEcho is startSyncedEcho with the server's own transport.
func startSyncedDirectEcho(dir string) (*target, error) {
	return startServing(func(ctx context.Context, listener net.Listener) error { return serveDirectEcho(ctx, listener, dir) })
}

func startServing(serve func(context.Context, net.Listener) error) (*target, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, listener) }()
	return &target{address: listener.Addr().String(), stop: func() error {
		cancel()
		return <-ended
	}}, nil
}

// dial opens the connections of a run.
func (t *target) dial() ([]*grpc.ClientConn, error) {
	conns := make([]*grpc.ClientConn, 0, connections)
	security := t.credentials
	if security == nil {
		security = insecure.NewCredentials()
	}
	for range connections {
		conn, err := grpc.NewClient("passthrough:///"+t.address,
			grpc.WithTransportCredentials(security),
			grpc.WithDefaultCallOptions(grpc.ForceCodecV2(pb.NewCodec()), grpc.MaxCallRecvMsgSize(messageBytes)),
			grpc.WithStaticStreamWindowSize(1<<20), grpc.WithStaticConnWindowSize(4<<20),
			grpc.WithReadBufferSize(64<<10), grpc.WithWriteBufferSize(64<<10))
		if err != nil {
			return nil, errors.Join(err, hangUp(conns))
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

func hangUp(conns []*grpc.ClientConn) (err error) {
	for _, c := range conns {
		err = errors.Join(err, c.Close())
	}
	return err
}

// within bounds a run that hangs.
func within(parent context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(parent, 2*time.Minute, fmt.Errorf("wire: no end in two minutes"))
}
