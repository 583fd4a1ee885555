package client_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// refusing is an endpoint at which no server is.
func refusing(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	return listener.Addr().String()
}

// A server that was down when the first call came is used within the default retries once it is up.
func TestARestartedServerIsFoundQuickly(t *testing.T) {
	endpoint := refusing(t)
	c, err := client.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()

	g := grpc.NewServer()
	kvpb.RegisterAdminServiceServer(g, statusServer{})
	served := make(chan error, 1)
	time.AfterFunc(100*time.Millisecond, func() {
		listener, err := net.Listen("tcp", endpoint)
		if err != nil {
			served <- err
			return
		}
		served <- g.Serve(listener)
	})
	began := time.Now()
	_, err = c.Status(t.Context())
	if took := time.Since(began); err != nil || took > 2*time.Second {
		t.Errorf("%v after %v", err, took)
	}
	g.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestAttemptsSpanARestart: the pauses between the attempts of a call are random, and none of them is so short that all attempts are made
// before a server can have started again.
func TestAttemptsSpanARestart(t *testing.T) {
	t.Parallel() // it waits
	endpoint := refusing(t)
	var calls sync.WaitGroup
	for range 8 {
		calls.Go(func() {
			c, err := client.Dial(endpoint)
			if err != nil {
				t.Error(err)
				return
			}
			began := time.Now()
			_, err = c.Status(t.Context())
			if took := time.Since(began); err == nil || took < 750*time.Millisecond {
				t.Errorf("%v after %v", err, took)
			}
			_ = c.Close()
		})
	}
	calls.Wait()
}

type statusServer struct {
	kvpb.UnimplementedAdminServiceServer
}

func (statusServer) Status(_ context.Context, _ *kvpb.StatusRequest) (*kvpb.StatusResponse, error) {
	return &kvpb.StatusResponse{}, nil
}
