package server

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestNoUserIsChangedWithARightThatHasEnded: requests that wait while their administrator is removed are refused, so that nothing has
// changed by its wish after the answer to that. The same is so of a token that is revoked, and its user's own changes.
func TestNoUserIsChangedWithARightThatHasEnded(t *testing.T) {
	for name, end := range map[string]func(context.Context, pb.AuthServiceClient) error{
		"user removed": func(ctx context.Context, client pb.AuthServiceClient) error {
			_, err := client.DeleteUser(ctx, &pb.DeleteUserRequest{Name: "eve"})
			return err
		},
		"role taken": func(ctx context.Context, client pb.AuthServiceClient) error {
			_, err := client.UpdateUser(ctx, &pb.UpdateUserRequest{Name: "eve", RemoveRoles: []string{"root"}})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			h, client, ann, bob := startWithUsers(t, vfs.NewMem())
			_, err := client.CreateUser(with(t, ann), &pb.CreateUserRequest{Name: "eve", Roles: []string{"root"}})
			must(t, err)
			made, err := client.CreateToken(with(t, ann), &pb.CreateTokenRequest{User: "eve"})
			must(t, err)
			eve := made.GetToken()
			requests := map[string]func() error{
				"CreateUser": func() error {
					_, err := client.CreateUser(with(t, eve), &pb.CreateUserRequest{Name: "backdoor", Roles: []string{"root"}})
					return err
				},
				"UpdateUser": func() error {
					_, err := client.UpdateUser(with(t, eve), &pb.UpdateUserRequest{Name: "bob", AddRoles: []string{"root"}})
					return err
				},
				"UpdateRole": func() error {
					_, err := client.UpdateRole(with(t, eve), &pb.UpdateRoleRequest{Role: &pb.Role{Name: "reader", Actions: []string{"all"}}})
					return err
				},
				"CreateToken": func() error {
					_, err := client.CreateToken(with(t, eve), &pb.CreateTokenRequest{User: "bob", Lifetime: durationpb.New(time.Hour)})
					return err
				},
				"SetPassword": func() error {
					_, err := client.SetPassword(with(t, eve), &pb.SetPasswordRequest{User: "bob", Remove: true})
					return err
				},
			}
			held := make(chan struct{})
			rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: held})
			release := sync.OnceFunc(func() { rule.Remove(); close(held) })
			t.Cleanup(release)
			ended := make(chan error, 1)
			go func() { ended <- end(with(t, ann), client) }()
			eventually(t, "the change waits for the device", func() bool { return rule.Fired() > 0 })
			type result struct {
				name string
				err  error
			}
			results := make(chan result, len(requests))
			for name, request := range requests {
				go func() { results <- result{name, request()} }()
			}
			time.Sleep(100 * time.Millisecond) // so that they have been permitted: otherwise the test shows less
			release()
			must(t, <-ended)
			for range requests {
				r := <-results
				if f := failureOf(t, r.err); f.code != codes.Unauthenticated && f.code != codes.PermissionDenied {
					t.Errorf("%s: %+v", r.name, f)
				}
			}
			who, err := client.WhoAmI(with(t, bob), &pb.WhoAmIRequest{})
			must(t, err)
			if len(who.GetActions()) > 0 {
				t.Errorf("bob may %v", who.GetActions())
			}
		})
	}
}

// TestPasswordsAreCheckedUntilNoRequestIsLeft: a login that has begun does not hold up a server that stops until its drain timeout, because
// of a hash that is never computed; nor does a scrape with a password, whatever its time limit is.
func TestPasswordsAreCheckedUntilNoRequestIsLeft(t *testing.T) {
	h, _, _, _ := startWithUsers(t, vfs.NewMem())
	held := make(chan struct{})
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: held})
	release := sync.OnceFunc(func() { rule.Remove(); close(held) })
	t.Cleanup(release)
	put := make(chan error, 1)
	go func() {
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC})
		put <- err
	}()
	eventually(t, "a request waits", func() bool { return rule.Fired() > 0 })
	stopped := make(chan error, 1)
	go func() { stopped <- h.stop() }()
	<-h.drain.begun
	check := func() error {
		ctx, cancel := context.WithTimeout(testContext(t), 20*time.Second)
		defer cancel()
		_, err := h.gate.users.Password(ctx, "ann", "ann's secret")
		return err
	}
	for range 10 {
		must(t, check())
	}
	release()
	must(t, errors.Join(<-put, <-stopped))
	if err := check(); !errors.Is(err, mvcc.ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
}
