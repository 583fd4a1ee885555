package server

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// dialFrom is dial from another address of this host.
func (h *harness) dialFrom(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	return h.dial(t, fromAddress(address))
}

func fromAddress(address string) grpc.DialOption {
	from := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	return grpc.WithContextDialer(func(ctx context.Context, to string) (net.Conn, error) { return from.DialContext(ctx, "tcp", to) })
}

// dialClient is dial as another client: from an address that nothing else of the test has.
func (h *harness) dialClient(t *testing.T) *grpc.ClientConn {
	t.Helper()
	return h.dialFrom(t, clientAddress())
}

// clientAddress is an address of this host that no other client has.
func clientAddress() string {
	n := clientAddresses.Add(1)
	return fmt.Sprintf("127.%d.%d.1", 1+n/200%200, 1+n%200)
}

var clientAddresses atomic.Int64

// TestConnectionsOfOneClientLeavePlacesToWaitForLocks: a client observes locks on many connections. Others wait for theirs, and what needs not
// wait is served in any case.
func TestConnectionsOfOneClientLeavePlacesToWaitForLocks(t *testing.T) {
	const places = 6
	onBothTransports(t, func(t *testing.T, h *harness) {
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		leases := pb.NewLeaseServiceClient(h.conn)
		mustGrantLease(t, leases, 1, time.Hour)
		mustGrantLease(t, leases, 2, time.Hour)
		token := mustLock(t, h, "held", 1)
		observe := func(conn *grpc.ClientConn) error {
			stream, err := pb.NewLockServiceClient(conn).ObserveLock(ctx, &pb.ObserveLockRequest{Name: []byte("held")})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		}
		for range places / 2 {
			if err := observe(h.dial(t)); err != nil {
				t.Fatal(err)
			}
		}
		failureOf(t, observe(h.dial(t))).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_WAITERS)
		acquire := func(conn *grpc.ClientConn, name string) (*pb.AcquireLockResponse, error) {
			request := &pb.AcquireLockRequest{Name: []byte(name), LeaseId: 2, Wait: durationpb.New(time.Hour)}
			return pb.NewLockServiceClient(conn).AcquireLock(ctx, request)
		}
		_, err := acquire(h.conn, "held")
		failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_WAITERS)
		if out, err := acquire(h.conn, "free"); err != nil || !out.GetAcquired() {
			t.Errorf("a free lock: %v, %v", out, err)
		}
		other := h.dialFrom(t, "127.0.0.2")
		acquired := make(chan error, 1)
		go func() {
			_, err := acquire(other, "held")
			acquired <- err
		}()
		eventually(t, "the other client waits", func() bool { return h.leases.Stats().Waiters == places/2+1 || len(acquired) > 0 })
		if _, err := pb.NewLockServiceClient(h.conn).ReleaseLock(ctx, &pb.ReleaseLockRequest{Name: []byte("held"), Token: token}); err != nil {
			t.Fatal(err)
		}
		if err := <-acquired; err != nil {
			t.Errorf("another client: %v", err)
		}
	}, func(c *config.Config) { c.Limits.LockWaiters = places })
}
