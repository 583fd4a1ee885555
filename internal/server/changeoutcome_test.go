package server

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

// changing is a server with what the changes of TestChangesWhoseLogFailsHaveAnUnknownOutcome are about.
type changing struct {
	admin  pb.AdminServiceClient
	auth   pb.AuthServiceClient
	leases pb.LeaseServiceClient
	locks  pb.LockServiceClient

	hold, lease, token uint64 // token is that of the lock "held"
}

// failOf makes a change and returns its error.
type failOf func(ctx context.Context, c *changing) error

// changesOfServer are the requests that change something else than keys, each by the administrator.
var changesOfServer = map[string]failOf{
	"CreateUser": func(ctx context.Context, c *changing) error {
		_, err := c.auth.CreateUser(ctx, &pb.CreateUserRequest{Name: "eve", Password: "eve's secret"})
		return err
	},
	"UpdateUser": func(ctx context.Context, c *changing) error {
		_, err := c.auth.UpdateUser(ctx, &pb.UpdateUserRequest{Name: "bob", RemoveRoles: []string{"reader"}})
		return err
	},
	"DeleteUser": func(ctx context.Context, c *changing) error {
		_, err := c.auth.DeleteUser(ctx, &pb.DeleteUserRequest{Name: "bob"})
		return err
	},
	"SetPassword": func(ctx context.Context, c *changing) error {
		_, err := c.auth.SetPassword(ctx, &pb.SetPasswordRequest{User: "bob", Password: "another secret"})
		return err
	},
	"CreateRole": func(ctx context.Context, c *changing) error {
		_, err := c.auth.CreateRole(ctx, &pb.CreateRoleRequest{Role: &pb.Role{Name: "observer", Actions: []string{"observe"}}})
		return err
	},
	"DeleteRole": func(ctx context.Context, c *changing) error {
		_, err := c.auth.DeleteRole(ctx, &pb.DeleteRoleRequest{Name: "reader"})
		return err
	},
	"CreateToken": func(ctx context.Context, c *changing) error {
		_, err := c.auth.CreateToken(ctx, &pb.CreateTokenRequest{})
		return err
	},
	"Logout": func(ctx context.Context, c *changing) error {
		_, err := c.auth.Logout(ctx, &pb.LogoutRequest{})
		return err
	},
	"Login": func(ctx context.Context, c *changing) error {
		_, err := c.auth.Login(ctx, &pb.LoginRequest{User: "bob", Password: "bob's secret"})
		return err
	},
	"Enable": func(ctx context.Context, c *changing) error {
		_, err := c.auth.Enable(ctx, &pb.EnableRequest{})
		return err
	},
	"TakeHold": func(ctx context.Context, c *changing) error {
		_, err := c.admin.TakeHold(ctx, &pb.TakeHoldRequest{Owner: "a reader", Ttl: durationpb.New(time.Hour)})
		return err
	},
	"RenewHold": func(ctx context.Context, c *changing) error {
		_, err := c.admin.TakeHold(ctx, &pb.TakeHoldRequest{Id: c.hold, Ttl: durationpb.New(2 * time.Hour)})
		return err
	},
	"EndHold": func(ctx context.Context, c *changing) error {
		_, err := c.admin.EndHold(ctx, &pb.EndHoldRequest{Id: c.hold})
		return err
	},
	"GrantLease": func(ctx context.Context, c *changing) error {
		_, err := c.leases.GrantLease(ctx, &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Hour)})
		return err
	},
	"RevokeLease": func(ctx context.Context, c *changing) error {
		_, err := c.leases.RevokeLease(ctx, &pb.RevokeLeaseRequest{Id: c.lease})
		return err
	},
	"AcquireLock": func(ctx context.Context, c *changing) error {
		_, err := c.locks.AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("free"), LeaseId: c.lease})
		return err
	},
	"ReleaseLock": func(ctx context.Context, c *changing) error {
		_, err := c.locks.ReleaseLock(ctx, &pb.ReleaseLockRequest{Name: []byte("held"), LeaseId: c.lease, Token: c.token})
		return err
	},
}

// TestChangesWhoseLogFailsHaveAnUnknownOutcome: the record of a change is in the log, and its sync has failed, so that a restart may find
// the change. READ_ONLY says that nothing has changed, as it is so of the next request.
func TestChangesWhoseLogFailsHaveAnUnknownOutcome(t *testing.T) {
	for name, change := range changesOfServer {
		t.Run(name, func(t *testing.T) {
			h, auth, ann, _ := startWithUsers(t, vfs.NewMem())
			c := &changing{admin: h.admin, auth: auth, leases: pb.NewLeaseServiceClient(h.conn), locks: pb.NewLockServiceClient(h.conn)}
			ctx := with(t, ann)
			hold, err := c.admin.TakeHold(ctx, &pb.TakeHoldRequest{Owner: "a reader", Ttl: durationpb.New(time.Hour)})
			must(t, err)
			lease, err := c.leases.GrantLease(ctx, &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Hour)})
			must(t, err)
			lock, err := c.locks.AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("held"), LeaseId: lease.GetId()})
			must(t, err)
			c.hold, c.lease, c.token = hold.GetHold().GetId(), lease.GetId(), lock.GetToken()
			h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log"})
			failureOf(t, change(ctx, c)).want(t, codes.Internal, pb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, "epoch", "cause")
			failureOf(t, change(ctx, c)).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_READ_ONLY, "cause")
		})
	}
}
