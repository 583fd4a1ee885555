package client_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// TestOperatorsCallsEndWithTheTimeout: a server that takes calls and answers none, as one with a hung file system may, holds no operator up for
// longer than the timeout.
func TestOperatorsCallsEndWithTheTimeout(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		<-stream.Context().Done()
		return stream.Context().Err()
	}))
	go func() { _ = server.Serve(l) }() // ends with Stop
	defer server.Stop()
	c, err := client.Dial(l.Addr().String(), quick, client.WithTimeout(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for name, made := range map[string]func() error{
		"Status":       func() error { _, err := c.Status(ctx); return err },
		"Clock":        func() error { _, err := c.Clock(ctx, false); return err },
		"Clock accept": func() error { _, err := c.Clock(ctx, true); return err },
		"SlowRequests": func() error { _, err := c.SlowRequests(ctx, 0, false); return err },
		"ReloadTLS":    func() error { _, err := c.ReloadTLS(ctx); return err },
		"SetConfig":    func() error { _, err := c.SetConfig(ctx, "log-level", "info"); return err },
		"ReloadConfig": func() error { _, err := c.ReloadConfig(ctx); return err },
		"ResizeCache":  func() error { _, err := c.ResizeCache(ctx, 1<<20); return err },
		"Config":       func() error { _, err := c.Config(ctx); return err },
		"Holds":        func() error { _, err := c.Holds(ctx); return err },
		"Archive":      func() error { _, err := c.ArchiveStatus(ctx); return err },
		"Backups":      func() error { _, err := c.ListBackups(ctx, &kvpb.ListBackupsRequest{}); return err },
	} {
		ended := make(chan error, 1)
		go func() { ended <- made() }()
		select {
		case err := <-ended:
			if e := (*client.Error)(nil); !errors.As(err, &e) || e.Code != codes.DeadlineExceeded {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s does not end", name)
		}
	}
}
