package server

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/vfs"
)

// with is a context of requests with a token.
func with(t testing.TB, token string) context.Context {
	t.Helper()
	return metadata.AppendToOutgoingContext(testContext(t), "authorization", "Bearer "+token)
}

// startWithUsers is a server with the administrator "ann" and the user "bob", and tokens of both.
func startWithUsers(t testing.TB, disk *vfs.Mem, adjust ...func(*config.Config)) (h *harness, client pb.AuthServiceClient, ann, bob string) {
	t.Helper()
	passwordCost = users.HashCost{KiB: 8, Passes: 1, Threads: 1}
	t.Cleanup(func() { passwordCost = users.HashCost{} })
	h = mustStartUnchecked(t, disk, adjust...)
	client = pb.NewAuthServiceClient(h.conn)
	_, err := client.Bootstrap(testContext(t), &pb.BootstrapRequest{Token: h.gate.users.BootstrapToken(), User: "ann", Password: "ann's secret"})
	must(t, err)
	login := func(user string) string {
		out, err := client.Login(testContext(t), &pb.LoginRequest{User: user, Password: user + "'s secret"})
		must(t, err)
		return out.GetToken()
	}
	ann = login("ann")
	_, err = client.CreateRole(with(t, ann), &pb.CreateRoleRequest{Role: &pb.Role{Name: "reader", Grants: []*pb.KeyGrant{{Start: []byte("a"), End: []byte("b"), Read: true}}}})
	must(t, err)
	_, err = client.CreateUser(with(t, ann), &pb.CreateUserRequest{Name: "bob", Password: "bob's secret", Roles: []string{"reader"}, Limits: &pb.UserLimits{Requests: 100}})
	must(t, err)
	return h, client, ann, login("bob")
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestOnlyKnownClientsChangeUsers: each method, by a client that is not known, and by a user without the action users. That
// holds also while users are not checked.
func TestOnlyKnownClientsChangeUsers(t *testing.T) {
	_, client, ann, bob := startWithUsers(t, vfs.NewMem())
	before, err := client.WhoAmI(with(t, ann), &pb.WhoAmIRequest{})
	must(t, err)
	calls := map[string]func(context.Context) error{
		"CreateUser": func(ctx context.Context) error {
			_, err := client.CreateUser(ctx, &pb.CreateUserRequest{Name: "eve", Roles: []string{"root"}})
			return err
		},
		"UpdateUser": func(ctx context.Context) error {
			_, err := client.UpdateUser(ctx, &pb.UpdateUserRequest{Name: "bob", AddRoles: []string{"root"}})
			return err
		},
		"DeleteUser": func(ctx context.Context) error {
			_, err := client.DeleteUser(ctx, &pb.DeleteUserRequest{Name: "ann"})
			return err
		},
		"ListUsers": func(ctx context.Context) error { _, err := client.ListUsers(ctx, &pb.ListUsersRequest{}); return err },
		"SetPassword": func(ctx context.Context) error {
			_, err := client.SetPassword(ctx, &pb.SetPasswordRequest{User: "ann", Password: "eve's secret", CurrentPassword: "ann's secret"})
			return err
		},
		"CreateRole": func(ctx context.Context) error {
			_, err := client.CreateRole(ctx, &pb.CreateRoleRequest{Role: &pb.Role{Name: "x", Actions: []string{"all"}}})
			return err
		},
		"UpdateRole": func(ctx context.Context) error {
			_, err := client.UpdateRole(ctx, &pb.UpdateRoleRequest{Role: &pb.Role{Name: "reader", Actions: []string{"all"}}})
			return err
		},
		"DeleteRole": func(ctx context.Context) error {
			_, err := client.DeleteRole(ctx, &pb.DeleteRoleRequest{Name: "reader"})
			return err
		},
		"ListRoles": func(ctx context.Context) error { _, err := client.ListRoles(ctx, &pb.ListRolesRequest{}); return err },
		"CreateToken": func(ctx context.Context) error {
			_, err := client.CreateToken(ctx, &pb.CreateTokenRequest{User: "ann"})
			return err
		},
		"ListTokens": func(ctx context.Context) error {
			_, err := client.ListTokens(ctx, &pb.ListTokensRequest{All: true})
			return err
		},
		"ListTokens of another": func(ctx context.Context) error {
			_, err := client.ListTokens(ctx, &pb.ListTokensRequest{User: "ann"})
			return err
		},
		"Explain": func(ctx context.Context) error {
			_, err := client.Explain(ctx, &pb.ExplainRequest{User: "ann"})
			return err
		},
		"Enable":  func(ctx context.Context) error { _, err := client.Enable(ctx, &pb.EnableRequest{}); return err },
		"Disable": func(ctx context.Context) error { _, err := client.Disable(ctx, &pb.DisableRequest{}); return err },
	}
	for name, call := range calls {
		for what, ctx := range map[string]context.Context{
			"no token": testContext(t), "a wrong token": with(t, ann[:len(ann)-1]+"_"), "two tokens": metadata.AppendToOutgoingContext(with(t, ann), "authorization", "Bearer "+bob),
		} {
			if f := failureOf(t, call(ctx)); f.code != codes.Unauthenticated || f.reason != "UNAUTHENTICATED" {
				t.Errorf("%s with %s: %+v", name, what, f)
			}
		}
		if f := failureOf(t, call(with(t, bob))); f.code != codes.PermissionDenied || f.metadata["actions"] != "users" || f.metadata["user"] != "bob" {
			t.Errorf("%s by bob: %+v", name, f)
		}
	}
	after, err := client.WhoAmI(with(t, ann), &pb.WhoAmIRequest{})
	must(t, err)
	if after.GetRevision() != before.GetRevision() {
		t.Errorf("the revision was %d and is %d", before.GetRevision(), after.GetRevision())
	}
}

// TestATokenThatExpiresMakesNoneThatOutlivesIt: else a token that was found once would be valid for ever.
func TestATokenThatExpiresMakesNoneThatOutlivesIt(t *testing.T) {
	_, client, ann, bob := startWithUsers(t, vfs.NewMem())
	made := func(with context.Context, lifetime *durationpb.Duration) (*pb.Token, string, error) {
		out, err := client.CreateToken(with, &pb.CreateTokenRequest{User: "bob", Lifetime: lifetime})
		return out.GetInfo(), out.GetToken(), err
	}
	lasting, _, err := made(with(t, bob), nil) // of a login, which took the password
	must(t, err)
	if lasting.GetExpires() != nil {
		t.Errorf("a lasting token expires at %v", lasting.GetExpires())
	}
	short, secret, err := made(with(t, bob), durationpb.New(time.Hour))
	must(t, err)
	if _, _, err := made(with(t, secret), durationpb.New(2*time.Hour)); failureOf(t, err).code != codes.InvalidArgument {
		t.Errorf("a token of an hour makes one of two hours: %v", err)
	}
	next, _, err := made(with(t, secret), nil)
	must(t, err)
	if got, want := next.GetExpires().AsTime(), short.GetExpires().AsTime(); !got.Equal(want) {
		t.Errorf("a token that expires at %v makes one that expires at %v", want, got)
	}
	if _, _, err := made(with(t, secret), durationpb.New(time.Minute)); err != nil {
		t.Error(err)
	}
	if other, _, err := made(with(t, ann), nil); err != nil || other.GetExpires() != nil {
		t.Errorf("of an administrator: %v, %v", other, err)
	}
}

// TestUsersManageThemselves: password, tokens, and what they may do.
func TestUsersManageThemselves(t *testing.T) {
	_, client, ann, bob := startWithUsers(t, vfs.NewMem())
	out, err := client.CreateToken(with(t, bob), &pb.CreateTokenRequest{Label: "mine", Lifetime: durationpb.New(time.Hour)})
	must(t, err)
	if out.GetInfo().GetUser() != "bob" || !strings.HasPrefix(out.GetToken(), "epochkv_") || time.Until(out.GetInfo().GetExpires().AsTime()) > time.Hour {
		t.Errorf("%+v", out)
	}
	list, err := client.ListTokens(with(t, bob), &pb.ListTokensRequest{})
	must(t, err)
	if len(list.GetTokens()) != 2 || slices.ContainsFunc(list.GetTokens(), func(k *pb.Token) bool { return k.GetUser() != "bob" }) {
		t.Errorf("bob's tokens: %v", list.GetTokens())
	}
	who, err := client.WhoAmI(with(t, out.GetToken()), &pb.WhoAmIRequest{})
	must(t, err)
	if who.GetUser() != "bob" || who.GetMethod() != "token" || who.GetEnabled() || len(who.GetGrants()) != 1 || string(who.GetGrants()[0].GetStart()) != "a" {
		t.Errorf("%+v", who)
	}
	for key, want := range map[string]string{"aa": "", "c": "read"} {
		e, err := client.Explain(with(t, bob), &pb.ExplainRequest{Grants: []*pb.KeyGrant{{Start: []byte(key), End: []byte(key + "\x00"), Read: true}}})
		must(t, err)
		if e.GetMissing() != want || e.GetPermitted() != (want == "") {
			t.Errorf("%s: %+v", key, e)
		}
	}
	// ann's token is not bob's to revoke, and bob does not learn that it exists.
	all, err := client.ListTokens(with(t, ann), &pb.ListTokensRequest{})
	must(t, err)
	_, err = client.RevokeToken(with(t, bob), &pb.RevokeTokenRequest{Id: all.GetTokens()[0].GetId()})
	failureOf(t, err).want(t, codes.NotFound, pb.ErrorReason_ERROR_REASON_AUTH_NOT_FOUND, "kind", "name")

	change := &pb.SetPasswordRequest{Password: "another secret", CurrentPassword: "wrong secret"}
	_, err = client.SetPassword(with(t, bob), change)
	failureOf(t, err).want(t, codes.Unauthenticated, pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED)
	change.CurrentPassword = "bob's secret"
	_, err = client.SetPassword(with(t, bob), change)
	must(t, err)
	_, err = client.ListTokens(with(t, bob), &pb.ListTokensRequest{}) // the session has ended, the other token has not
	failureOf(t, err).want(t, codes.Unauthenticated, pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED)
	_, err = client.RevokeToken(with(t, out.GetToken()), &pb.RevokeTokenRequest{Id: out.GetInfo().GetId()})
	must(t, err)
	_, err = client.Logout(with(t, out.GetToken()), &pb.LogoutRequest{})
	failureOf(t, err).want(t, codes.Unauthenticated, pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED)
	_, err = client.Logout(with(t, ann), &pb.LogoutRequest{})
	must(t, err)
	_, err = client.ListUsers(with(t, ann), &pb.ListUsersRequest{})
	failureOf(t, err).want(t, codes.Unauthenticated, pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED)
}

// TestAdministratorsManageUsers: what was changed is shown, and is still there after a restart.
func TestAdministratorsManageUsers(t *testing.T) {
	disk := vfs.NewMem()
	h, client, ann, bob := startWithUsers(t, disk)
	yes := true
	_, err := client.UpdateUser(with(t, ann), &pb.UpdateUserRequest{Name: "bob", Disabled: &yes, Limits: &pb.UserLimits{Watches: 3, BytesIn: 9}})
	must(t, err)
	_, err = client.WhoAmI(with(t, bob), &pb.WhoAmIRequest{})
	must(t, err)
	_, err = client.ListTokens(with(t, bob), &pb.ListTokensRequest{})
	failureOf(t, err).want(t, codes.Unauthenticated, pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED)
	_, err = client.Enable(with(t, ann), &pb.EnableRequest{})
	must(t, err)
	must(t, h.stop())

	h = mustStartUnchecked(t, disk)
	client = pb.NewAuthServiceClient(h.conn)
	who, err := client.WhoAmI(with(t, ann), &pb.WhoAmIRequest{})
	must(t, err)
	if !who.GetEnabled() || who.GetUser() != "ann" || !slices.Equal(who.GetRoles(), []string{"root"}) || len(who.GetActions()) != 5 {
		t.Errorf("%+v", who)
	}
	list, err := client.ListUsers(with(t, ann), &pb.ListUsersRequest{})
	must(t, err)
	u := list.GetUsers()[1]
	if len(list.GetUsers()) != 2 || u.GetName() != "bob" || !u.GetDisabled() || !u.GetHasPassword() || u.GetLimits().GetWatches() != 3 || u.GetLimits().GetRequests() != 0 {
		t.Errorf("%v", list.GetUsers())
	}
	roles, err := client.ListRoles(with(t, ann), &pb.ListRolesRequest{})
	must(t, err)
	if len(roles.GetRoles()) != 2 || roles.GetRoles()[1].GetName() != "reader" {
		t.Errorf("%v", roles.GetRoles())
	}
	_, err = client.Disable(with(t, ann), &pb.DisableRequest{})
	must(t, err)
	_, err = client.Disable(with(t, ann), &pb.DisableRequest{})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_AUTH_NOT_ENABLED)
	if text := h.log.String(); strings.Contains(text, "secret") || strings.Contains(text, ann) {
		t.Errorf("the log has a password or a token:\n%s", text)
	}
}

// TestTheFirstAdministratorNeedsTheBootstrapToken, which the log has while there is none.
func TestTheFirstAdministratorNeedsTheBootstrapToken(t *testing.T) {
	h, client, _, _ := startWithUsers(t, vfs.NewMem())
	_, err := client.Bootstrap(testContext(t), &pb.BootstrapRequest{Token: "epochkv_once_x", User: "eve", Password: "eve's secret"})
	failureOf(t, err).want(t, codes.Unauthenticated, pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED)
	log := new(logBuffer)
	h.announceBootstrap(slog.New(slog.NewTextHandler(log, nil)))
	if log.String() != "" {
		t.Errorf("announced with an administrator: %s", log)
	}
	none := mustStartUnchecked(t, vfs.NewMem())
	none.announceBootstrap(slog.New(slog.NewTextHandler(log, nil)))
	if !strings.Contains(log.String(), "bootstrap_token=epochkv_once_") {
		t.Errorf("announced: %q", log)
	}
}

// TestServersThatOnlyUsersProtectNeedThem: over TLS without client certificates a server starts on an address that other machines
// can reach only if it checks users, and does not stop checking them.
func TestServersThatOnlyUsersProtectNeedThem(t *testing.T) {
	disk := vfs.NewMem()
	h, _, ann, _ := startWithUsers(t, disk)
	must(t, h.stop())
	files := newCertFiles(t)
	ca := newTestCA(t)
	files.write(ca.server(), ca)
	exposed := func(c *config.Config) {
		c.Listen, c.TLS.Cert, c.TLS.Key, c.TLS.ClientAuth, c.TLS.ClientCA = "0.0.0.0:0", files.c.Cert, files.c.Key, config.ClientAuthNone, ""
	}
	c := testConfig()
	exposed(&c)
	if _, err := open(t.Context(), c, slog.New(slog.DiscardHandler), disk); err == nil || !strings.Contains(err.Error(), "--tls-client-auth") {
		t.Fatalf("without users: %v", err)
	}
	h = mustStartUnchecked(t, disk)
	client := pb.NewAuthServiceClient(h.conn)
	_, err := client.Enable(with(t, ann), &pb.EnableRequest{})
	must(t, err)
	must(t, h.stop())
	h = mustStartUnchecked(t, disk, exposed) // with users
	ctx := metadata.NewIncomingContext(testContext(t), metadata.Pairs("authorization", "Bearer "+ann))
	_, err = (&authService{Server: h.Server}).Disable(ctx, &pb.DisableRequest{})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_AUTH_STATE)
}

// TestEnabledUsersAreCheckedByTheirRecords: from a login, a token and a certificate to the keys of their users, on the transport;
// and a change is in force when it is answered.
func TestEnabledUsersAreCheckedByTheirRecords(t *testing.T) {
	disk := vfs.NewMem()
	h, client, ann, bob := startWithUsers(t, disk)
	get := func(conn grpc.ClientConnInterface, ctx context.Context, key string) error {
		_, err := pb.NewKVServiceClient(conn).Get(ctx, &pb.GetRequest{Key: []byte(key)})
		return err
	}
	must(t, get(h.conn, testContext(t), "c")) // users are not checked
	_, err := client.Enable(with(t, ann), &pb.EnableRequest{})
	must(t, err)
	failureOf(t, get(h.conn, testContext(t), "aa")).want(t, codes.Unauthenticated, pb.ErrorReason_ERROR_REASON_UNAUTHENTICATED)
	must(t, get(h.conn, with(t, bob), "aa"))
	f := failureOf(t, get(h.conn, with(t, bob), "c"))
	f.want(t, codes.PermissionDenied, pb.ErrorReason_ERROR_REASON_PERMISSION_DENIED, "user", "right", "key")
	if f.metadata["key"] != "c" || f.metadata["right"] != "read" {
		t.Errorf("%+v", f)
	}
	_, err = client.UpdateRole(with(t, ann), &pb.UpdateRoleRequest{Role: &pb.Role{Name: "reader", Grants: []*pb.KeyGrant{{Start: []byte("c"), End: []byte("d"), Read: true}}}})
	must(t, err)
	must(t, get(h.conn, with(t, bob), "c"))
	failureOf(t, get(h.conn, with(t, bob), "aa")).want(t, codes.PermissionDenied, pb.ErrorReason_ERROR_REASON_PERMISSION_DENIED, "user", "right", "key")
	_, err = client.CreateUser(with(t, ann), &pb.CreateUserRequest{Name: "client", Roles: []string{"reader"}}) // as the certificate is
	must(t, err)
	must(t, h.stop())

	files, ca := newCertFiles(t), newTestCA(t)
	files.write(ca.server(), ca)
	h = mustStartUnchecked(t, disk, files.use, func(c *config.Config) { c.TLS.ClientUser = config.ClientUserCN })
	conn := h.secured(t, ca.client(ca))
	must(t, get(conn, testContext(t), "c"))
	failureOf(t, get(conn, testContext(t), "aa")).want(t, codes.PermissionDenied, pb.ErrorReason_ERROR_REASON_PERMISSION_DENIED, "user", "right", "key")
	must(t, get(conn, with(t, ann), "aa")) // a token is before the certificate
	who, err := pb.NewAuthServiceClient(conn).WhoAmI(testContext(t), &pb.WhoAmIRequest{})
	must(t, err)
	if who.GetUser() != "client" || who.GetMethod() != "certificate" {
		t.Errorf("%+v", who)
	}
}
