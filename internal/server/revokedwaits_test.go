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

// waitForLock has requests of alice wait for a lock that lease 1 holds, each for a lease of its own.
func (h *harness) waitForLock(t *testing.T, requests int) (ended chan error) {
	t.Helper()
	ended = make(chan error, requests)
	for i := range requests {
		go func() {
			_, err := clientsOf(h.conn).lock.AcquireLock(as(testContext(t), "alice"), &pb.AcquireLockRequest{
				Name: []byte("k"), LeaseId: uint64(i) + 2, Wait: durationpb.New(time.Hour),
			})
			ended <- err
		}()
	}
	eventually(t, "they wait", func() bool { return h.leases.Stats().Waiters == requests })
	return ended
}

// TestAWaitForALockEndsWhenItsRightIsTakenAway, and its place with it.
func TestAWaitForALockEndsWhenItsRightIsTakenAway(t *testing.T) {
	const requests = 10
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.gate.publish(nil)
		leases := clientsOf(h.conn).lease
		for id := range uint64(requests + 1) {
			mustGrantLease(t, leases, id+1, time.Hour)
		}
		token := mustLock(t, h, "k", 1)
		unknown := map[string][]auth.Grant{"bob": {grant("l", "k")}}
		for name, c := range map[string]struct {
			before, after func()
			want          codes.Code
		}{
			"the right": {
				func() { h.setUsers(only(grant("l", "k"))) },
				func() { h.setUsers(only(grant("l", "j"))) }, codes.PermissionDenied,
			},
			"the user": {
				func() { h.setUsers(only(grant("l", "k"))) },
				func() { h.setUsers(unknown) }, codes.Unauthenticated,
			},
			"the user, after a change that leaves the right": {
				func() { h.setUsers(only(grant("l", "k"))) },
				func() { h.setUsers(only(grant("rl", "k"))); h.setUsers(unknown) }, codes.Unauthenticated,
			},
			"the token": {
				func() { h.setUsers(only(grant("l", "k"))) },
				func() {
					h.setUsers(only(grant("l", "k")), func(t *auth.Table) { addToken(t, "alice", time.Now().Add(-time.Second)) })
				}, codes.Unauthenticated,
			},
			"all rights, which were not checked": {
				func() { h.gate.publish(nil) },
				func() { h.setUsers(unknown) }, codes.Unauthenticated,
			},
		} {
			c.before()
			ended := h.waitForLock(t, requests)
			c.after()
			for range requests {
				if err := <-ended; status.Code(err) != c.want {
					t.Errorf("%s was taken away: %v; want %v", name, err, c.want)
				}
			}
			if n := h.leases.Stats().Waiters; n != 0 {
				t.Errorf("%s was taken away: %d wait", name, n)
			}
		}
		if held, err := clientsOf(h.conn).lock.GetLock(as(testContext(t), "root"), &pb.GetLockRequest{Name: []byte("k")}); err != nil || held.GetHolder().GetToken() != token {
			t.Errorf("the holder is %v, %v", held, err)
		}
	})
}

// TestAWaitForALockGoesOnWhileItsRightStays: the user changes, and other users do, again and again. The request is executed when the lock is free.
func TestAWaitForALockGoesOnWhileItsRightStays(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		h.gate.publish(nil)
		leases := clientsOf(h.conn).lease
		mustGrantLease(t, leases, 1, time.Hour)
		mustGrantLease(t, leases, 2, time.Hour)
		token := mustLock(t, h, "k", 1)
		h.setUsers(only(grant("l", "k")))
		ended := h.waitForLock(t, 1)
		for _, rights := range []string{"rl", "wl", "rwl", "l"} {
			h.setUsers(only(grant(rights, "k")))
		}
		_, err := clientsOf(h.conn).lock.ReleaseLock(as(testContext(t), "root"), &pb.ReleaseLockRequest{Name: []byte("k"), Token: token})
		must(t, err)
		if err := <-ended; err != nil {
			t.Errorf("got %v", err)
		}
	})
}
