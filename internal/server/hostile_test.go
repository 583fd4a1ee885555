package server

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
)

// The tests in this file do as a user what its rights do not permit.

func TestLeaseThatHoldsLocksOfOthersIsNotRevoked(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(map[string][]auth.Grant{"alice": {grant("l", "a/")}, "mallory": {grant("rwl", "m/")}})
		c, ctx := clientsOf(h.conn), testContext(t)
		alice, mallory := as(ctx, "alice"), as(ctx, "mallory")
		granted, err := c.lease.GrantLease(alice, &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Minute)})
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"a/1", "a/2"} {
			held, err := c.lock.AcquireLock(alice, &pb.AcquireLockRequest{Name: []byte(name), LeaseId: granted.Id})
			if err != nil || !held.Acquired {
				t.Fatal(held, err)
			}
		}
		if _, err := c.lease.RevokeLease(mallory, &pb.RevokeLeaseRequest{Id: granted.Id}); status.Code(err) != codes.NotFound {
			t.Errorf("mallory revokes the lease of alice's lock: %v", err)
		}
		if _, err := c.lease.RevokeLease(alice, &pb.RevokeLeaseRequest{Id: granted.Id}); err != nil {
			t.Errorf("alice revokes her own: %v", err)
		}
	})
}

// A watch that began before users were checked ends with its token, too.
func TestWatchFromBeforeUsersWereCheckedEndsWithItsToken(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.setUsers(map[string][]auth.Grant{})
		h.gate.publish(nil)
		watch, err := clientsOf(h.conn).feed.Watch(as(testContext(t), "alice"))
		if err == nil {
			err = watch.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{prefixRange("k")}}}})
		}
		if err == nil {
			_, err = watch.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		table := makeTable(only(grant("r", "k")))
		addToken(table, "alice", time.Now().Add(300*time.Millisecond))
		h.gate.publish(table)
		if out, err := watch.Recv(); err != nil || status.FromProto(out.GetEnded().GetError()).Code() != codes.Unauthenticated {
			t.Errorf("got %v, %v", out, err)
		}
	})
}
