package users

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/vfs"
)

func grant(lower, upper string) auth.Grant {
	return auth.Grant{Lower: []byte(lower), Upper: []byte(upper), Read: true}
}

// TestUsersSurviveARestart: users, roles, tokens, limits, and that they are checked.
func TestUsersSurviveARestart(t *testing.T) {
	ctx, fs := context.Background(), vfs.NewMem()
	h := bootstrapped(t, fs)
	large := &Role{Name: "large"}
	for i := range 300 { // longer than a leaf holds
		large.Grants = append(large.Grants, grant(fmt.Sprintf("tenant-with-a-long-name/%04d/a", i), fmt.Sprintf("tenant-with-a-long-name/%04d/b", i)))
	}
	must(t, h.CreateRole(ctx, large))
	must(t, h.CreateRole(ctx, &Role{Name: "ops", Actions: auth.ActionOperate, Grants: []auth.Grant{grant("y", "")}}))
	must(t, h.CreateUser(ctx, User{Name: "bob", Roles: []string{"ops", "large"}, Limits: auth.Limits{Requests: 7, BytesOut: 1 << 40}}, "bob's secret"))
	ann, annToken := h.login("ann", "ann's secret")
	must(t, h.Enable(ctx, &ann))
	_, bobToken := h.login("bob", "bob's secret")
	lasting, info, err := h.CreateToken(ctx, NewToken{User: "bob", Label: "nightly export"})
	must(t, err)
	revision := h.Table().Revision
	must(t, h.store.Checkpoint(ctx)) // so that the large record is outside of its leaf
	h.stop()

	h = mustOpen(t, fs)
	if len(h.bad) > 0 {
		t.Fatalf("cannot be read: %q", h.bad)
	}
	if a := h.Table(); !a.Enabled || a.Revision != revision {
		t.Errorf("enabled %v, revision %d, want %d", a.Enabled, a.Revision, revision)
	}
	if h.BootstrapToken() != "" {
		t.Error("a bootstrap token with an administrator")
	}
	for _, secret := range []string{bobToken, lasting} {
		id, err := h.Bearer("Bearer " + secret)
		must(t, err)
		for key, want := range map[string]bool{"tenant-with-a-long-name/0299/a1": true, "z": true, "tenant-with-a-long-name/0299/c": false} {
			if got := h.may(id, key) == nil; got != want {
				t.Errorf("bob may read %q: %v", key, got)
			}
		}
	}
	if _, err := h.Bearer("Bearer " + annToken); err != nil {
		t.Error(err)
	}
	bob, err := h.User(ctx, "bob")
	must(t, err)
	if fmt.Sprint(bob.Roles) != "[large ops]" || bob.Limits.Requests != 7 || bob.Limits.BytesOut != 1<<40 || bob.Disabled || !bob.Created.Equal(h.now) {
		t.Errorf("bob is %+v", bob)
	}
	all, err := h.Tokens(ctx, "bob")
	must(t, err)
	if len(all) != 2 || all[0].ID != info.ID && all[1].ID != info.ID {
		t.Errorf("bob's tokens are %+v", all)
	}
}

// TestTheBootstrapTokenWorksOnce, and only in the process that has made it.
func TestTheBootstrapTokenWorksOnce(t *testing.T) {
	ctx := context.Background()
	h := mustOpen(t, vfs.NewMem())
	token := h.BootstrapToken()
	if !strings.HasPrefix(token, bootstrapPrefix) {
		t.Fatalf("the token is %q", token)
	}
	if err := h.Bootstrap(ctx, token+"x", "eve", "eve's secret"); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("a wrong token: %v", err)
	}
	must(t, h.Bootstrap(ctx, token, "ann", "ann's secret"))
	if err := h.Bootstrap(ctx, token, "eve", "eve's secret"); !errors.Is(err, ErrBootstrapped) {
		t.Errorf("again: %v", err)
	}
	if h.BootstrapToken() != "" {
		t.Error("the token is shown again")
	}
}

// TestAnAdministratorAlwaysRemains while users are checked, and only an administrator begins that.
func TestAnAdministratorAlwaysRemains(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	must(t, h.CreateRole(ctx, &Role{Name: "nearly", Actions: auth.ActionsAll, Grants: []auth.Grant{{Read: true, Write: true, Lease: true, Lower: []byte("a")}}}))
	must(t, h.CreateUser(ctx, User{Name: "bob", Roles: []string{"nearly"}}, "bob's secret"))
	bob, _ := h.login("bob", "bob's secret")
	if err := h.Enable(ctx, &bob); !errors.Is(err, ErrNotAdministrator) {
		t.Errorf("enabled by a user that lacks the keys before a: %v", err)
	}
	if err := h.Enable(ctx, new(auth.Identity)); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("enabled by a client that is not known: %v", err)
	}
	if err := h.Disable(ctx); !errors.Is(err, ErrNotEnabled) {
		t.Errorf("disabled before it was enabled: %v", err)
	}
	ann, _ := h.login("ann", "ann's secret")
	must(t, h.Enable(ctx, &ann))
	yes := true
	for name, change := range map[string]func() error{
		"delete":    func() error { return h.DeleteUser(ctx, "ann") },
		"disable":   func() error { return h.UpdateUser(ctx, "ann", &UserChange{Disabled: &yes}) },
		"take role": func() error { return h.UpdateUser(ctx, "ann", &UserChange{RemoveRoles: []string{RoleRoot}}) },
	} {
		if err := change(); !errors.Is(err, ErrLastAdministrator) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := h.may(ann, "any"); err != nil {
		t.Errorf("after refused changes: %v", err)
	}
	must(t, h.UpdateUser(ctx, "bob", &UserChange{AddRoles: []string{RoleRoot}}))
	must(t, h.DeleteUser(ctx, "ann"))
	must(t, h.Disable(ctx))
	must(t, h.DeleteUser(ctx, "bob"))
}

// TestAChangeIsInForceWhenItIsAnswered: for identities of before, too; and tables are observed in the order of revisions.
func TestAChangeIsInForceWhenItIsAnswered(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	ann, _ := h.login("ann", "ann's secret")
	must(t, h.Enable(ctx, &ann))
	must(t, h.CreateRole(ctx, &Role{Name: "a", Grants: []auth.Grant{grant("a", "b")}}))
	must(t, h.CreateUser(ctx, User{Name: "bob", Roles: []string{"a"}}, "bob's secret"))
	bob, _ := h.login("bob", "bob's secret")
	no, yes := false, true
	isDenied := func(err error) bool { _, ok := errors.AsType[*auth.DeniedError](err); return ok }
	isUnknown := func(err error) bool { return errors.Is(err, auth.ErrUnauthenticated) }
	isNil := func(err error) bool { return err == nil }
	for _, step := range []struct {
		name   string
		change func() error
		want   func(error) bool
	}{
		{"at first", func() error { return nil }, isNil},
		{"role changed", func() error { return h.UpdateRole(ctx, &Role{Name: "a", Grants: []auth.Grant{grant("c", "d")}}) }, isDenied},
		{"role changed back", func() error { return h.UpdateRole(ctx, &Role{Name: "a", Grants: []auth.Grant{grant("", "")}}) }, isNil},
		{"role taken", func() error { return h.UpdateUser(ctx, "bob", &UserChange{RemoveRoles: []string{"a"}}) }, isDenied},
		{"role given", func() error { return h.UpdateUser(ctx, "bob", &UserChange{AddRoles: []string{"a", "a"}}) }, isNil},
		{"disabled", func() error { return h.UpdateUser(ctx, "bob", &UserChange{Disabled: &yes}) }, isUnknown},
		{"not disabled", func() error { return h.UpdateUser(ctx, "bob", &UserChange{Disabled: &no}) }, isNil},
		{"role deleted", func() error { return h.DeleteRole(ctx, "a") }, isDenied},
		{"role of the name made", func() error { return h.CreateRole(ctx, &Role{Name: "a", Grants: []auth.Grant{grant("", "")}}) }, isDenied},
		{"given", func() error { return h.UpdateUser(ctx, "bob", &UserChange{AddRoles: []string{"a"}}) }, isNil},
		{"new password", func() error { return h.SetPassword(ctx, "bob", "another secret") }, isUnknown},
	} {
		must(t, step.change())
		if err := h.may(bob, "ab"); !step.want(err) {
			t.Errorf("%s: %v", step.name, err)
		}
	}
	bob, _ = h.login("bob", "another secret")
	must(t, h.DeleteUser(ctx, "bob"))
	must(t, h.CreateUser(ctx, User{Name: "bob", Roles: []string{"a"}}, "")) // another user of the name
	if err := h.may(bob, "ab"); !isUnknown(err) {
		t.Errorf("a token of a user that was deleted: %v", err)
	}
	for i := range h.seen[1:] {
		if h.seen[i].Revision >= h.seen[i+1].Revision {
			t.Errorf("revision %d is observed after %d", h.seen[i+1].Revision, h.seen[i].Revision)
		}
	}
}

// TestLimitsOfAUserStayTaken when the user changes.
func TestLimitsOfAUserStayTaken(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	must(t, h.UpdateUser(ctx, "ann", &UserChange{Limits: &auth.Limits{Watches: 1}}))
	must(t, h.Table().Users["ann"].Limiter.Open(auth.Watches))
	must(t, h.UpdateUser(ctx, "ann", &UserChange{Limits: &auth.Limits{Watches: 1, Requests: 5}}))
	if h.Table().Users["ann"].Limiter.Open(auth.Watches) == nil {
		t.Error("a second watch is open")
	}
}

// TestBadInputIsRefused, and changes nothing.
func TestBadInputIsRefused(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	revision := h.Table().Revision
	many := &Role{Name: "many"}
	for range RoleBytesMax / 8 {
		many.Grants = append(many.Grants, grant("aaaa", "b"))
	}
	for name, change := range map[string]func() error{
		"empty name":       func() error { return h.CreateUser(ctx, User{}, "") },
		"long name":        func() error { return h.CreateUser(ctx, User{Name: strings.Repeat("n", NameBytesMax+1)}, "") },
		"space":            func() error { return h.CreateUser(ctx, User{Name: "a b"}, "") },
		"control":          func() error { return h.CreateUser(ctx, User{Name: "a\x00"}, "") },
		"invisible":        func() error { return h.CreateUser(ctx, User{Name: "a\u200b"}, "") },
		"no UTF-8":         func() error { return h.CreateUser(ctx, User{Name: "a\xff"}, "") },
		"exists":           func() error { return h.CreateUser(ctx, User{Name: "ann"}, "") },
		"unknown role":     func() error { return h.CreateUser(ctx, User{Name: "bob", Roles: []string{"x"}}, "") },
		"short password":   func() error { return h.CreateUser(ctx, User{Name: "bob"}, "seven b") },
		"long password":    func() error { return h.SetPassword(ctx, "ann", strings.Repeat("p", PasswordBytesMax+1)) },
		"role root":        func() error { return h.UpdateRole(ctx, &Role{Name: RoleRoot}) },
		"make root":        func() error { return h.CreateRole(ctx, &Role{Name: RoleRoot}) },
		"delete root":      func() error { return h.DeleteRole(ctx, RoleRoot) },
		"no role":          func() error { return h.UpdateRole(ctx, &Role{Name: "x"}) },
		"range of no key":  func() error { return h.CreateRole(ctx, &Role{Name: "x", Grants: []auth.Grant{grant("b", "a")}}) },
		"range of nothing": func() error { return h.CreateRole(ctx, &Role{Name: "x", Grants: []auth.Grant{{Lower: []byte("a")}}}) },
		"unknown action":   func() error { return h.CreateRole(ctx, &Role{Name: "x", Actions: auth.ActionsAll + 1}) },
		"too many ranges":  func() error { return h.CreateRole(ctx, many) },
		"token of nobody":  func() error { _, _, err := h.CreateToken(ctx, NewToken{User: "bob"}); return err },
		"expired token":    func() error { _, _, err := h.CreateToken(ctx, NewToken{User: "ann", Expires: h.now}); return err },
		"label":            func() error { _, _, err := h.CreateToken(ctx, NewToken{User: "ann", Label: "a\n"}); return err },
		"long session":     func() error { _, _, err := h.Login(ctx, "ann", "ann's secret", "", TokenTimeMax+1); return err },
	} {
		if err := change(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if got := h.Table().Revision; got != revision {
		t.Errorf("the revision is %d, want %d", got, revision)
	}
}

// TestUnreadableRecordsGiveNoRights: a damaged user does not exist, and damaged settings mean that users are checked.
func TestUnreadableRecordsGiveNoRights(t *testing.T) {
	fs := vfs.NewMem()
	h := bootstrapped(t, fs)
	_, secret := h.login("ann", "ann's secret")
	h.overwrite(settingsKey, []byte{2, 0, 0, 0})
	h.damage(userKey("ann"))
	h.stop()

	h = mustOpen(t, fs)
	if len(h.bad) != 2 || !h.Table().Enabled {
		t.Errorf("reported %q, users are checked: %v", h.bad, h.Table().Enabled)
	}
	if _, err := h.Bearer("Bearer " + secret); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("a token of a user that cannot be read: %v", err)
	}
	if h.BootstrapToken() == "" { // the data directory is damaged: the operator has to get in
		t.Error("no bootstrap token")
	}
}

// TestAUserWithARoleThatCannotBeReadIsChanged: it can be disabled and reset, and gets the rights again when the role is made anew.
func TestAUserWithARoleThatCannotBeReadIsChanged(t *testing.T) {
	ctx, fs := context.Background(), vfs.NewMem()
	h := bootstrapped(t, fs)
	must(t, h.CreateRole(ctx, &Role{Name: "a", Grants: []auth.Grant{grant("a", "b")}}))
	must(t, h.CreateRole(ctx, &Role{Name: "c", Grants: []auth.Grant{grant("c", "d")}}))
	must(t, h.CreateUser(ctx, User{Name: "bob", Roles: []string{"a", "c"}}, "bob's secret"))
	h.damage(roleKey("a"))
	h.stop()

	h = mustOpen(t, fs)
	yes, no := true, false
	must(t, h.UpdateUser(ctx, "bob", &UserChange{Disabled: &yes}))
	must(t, h.UpdateUser(ctx, "bob", &UserChange{Disabled: &no}))
	must(t, h.SetPassword(ctx, "bob", "bob's secret"))
	must(t, h.DeleteRole(ctx, "c"))
	if err := h.CreateUser(ctx, User{Name: "eve", Roles: []string{"a"}}, ""); err == nil {
		t.Error("another user gets the role")
	}
	ann, _ := h.login("ann", "ann's secret")
	must(t, h.Enable(ctx, &ann))
	bob, _ := h.login("bob", "bob's secret")
	if err := h.may(bob, "ab"); err == nil {
		t.Error("a role that cannot be read gives rights")
	}
	must(t, h.CreateRole(ctx, &Role{Name: "a", Grants: []auth.Grant{grant("a", "b")}}))
	must(t, h.may(bob, "ab"))
	must(t, h.reset(ctx, "bob", "new secret"))
}

// TestTokensExpire: at their time, not before; they are told from wrong ones for a day, and then removed.
func TestTokensExpire(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	secret, _, err := h.CreateToken(ctx, NewToken{User: "ann", Expires: h.now.Add(time.Hour)})
	must(t, err)
	h.now = h.now.Add(time.Hour - 1)
	if _, err := h.Bearer("bearer " + secret); err != nil {
		t.Errorf("before its end: %v", err)
	}
	h.now = h.now.Add(1)
	if _, err := h.Bearer("Bearer " + secret); !errors.Is(err, auth.ErrTokenExpired) {
		t.Errorf("at its end: %v", err)
	}
	must(t, h.tidyTokens(ctx))
	if all, err := h.Tokens(ctx, ""); err != nil || len(all) != 1 {
		t.Errorf("after an hour: %+v, %v", all, err)
	}
	h.now = h.now.Add(expiredKept)
	must(t, h.tidyTokens(ctx))
	if all, err := h.Tokens(ctx, ""); err != nil || len(all) != 0 {
		t.Errorf("after a day: %+v, %v", all, err)
	}
	for _, header := range []string{"", "Bearer", "Bearer ", secret, "Basic " + secret, "Bearer " + secret, "Bearer " + h.bootstrap} {
		if _, err := h.Bearer(header); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("header %.20q: %v", header, err)
		}
	}
}

// TestLastUsesAreWritten without a new revision, to the hour.
func TestLastUsesAreWritten(t *testing.T) {
	ctx, fs := context.Background(), vfs.NewMem()
	h := bootstrapped(t, fs)
	secret, _, err := h.CreateToken(ctx, NewToken{User: "ann"})
	must(t, err)
	first := h.now
	for range 3 {
		_, err = h.Bearer("Bearer " + secret)
		must(t, err)
		h.now = h.now.Add(time.Minute)
	}
	revision, epoch := h.Table().Revision, h.store.Visible()
	must(t, h.tidyTokens(ctx))
	if h.Table().Revision != revision || h.store.Visible() == epoch {
		t.Errorf("revision %d, epoch %d", h.Table().Revision, h.store.Visible())
	}
	epoch = h.store.Visible()
	must(t, h.tidyTokens(ctx))
	if h.store.Visible() != epoch {
		t.Error("the same time is written again")
	}
	h.stop()
	h = mustOpen(t, fs)
	if all, err := h.Tokens(ctx, "ann"); err != nil || len(all) != 1 || !all[0].LastUsed.Equal(first) {
		t.Errorf("after a restart: %+v, %v", all, err)
	}
}

// TestCallersAreFoundAnewEveryHour: a connection that keeps a caller for a table sees another table, of the same revision.
func TestCallersAreFoundAnewEveryHour(t *testing.T) {
	h := bootstrapped(t, vfs.NewMem())
	before, seen := h.Table(), len(h.seen)
	must(t, h.tidyTokens(context.Background()))
	if after := h.Table(); after == before || after.Revision != before.Revision || len(h.seen) != seen+1 || h.seen[seen] != after {
		t.Errorf("revision %d after %d, %d tables were observed", after.Revision, before.Revision, len(h.seen)-seen)
	}
}

// TestTokensAreRevokedByTheirOwners, not by others.
func TestTokensAreRevokedByTheirOwners(t *testing.T) {
	ctx := context.Background()
	h := bootstrapped(t, vfs.NewMem())
	must(t, h.CreateUser(ctx, User{Name: "bob"}, "bob's secret"))
	bob, secret := h.login("bob", "bob's secret")
	if err := h.RevokeToken(ctx, TokenID(bob.Token), "ann"); err == nil {
		t.Error("revoked by another user")
	}
	must(t, h.Logout(ctx, &bob))
	if _, err := h.Bearer("Bearer " + secret); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("after a logout: %v", err)
	}
}

// Records of requests tell users apart by a checksum of their names.
func TestNoTwoUsersHaveTheSameRecordsOfRequests(t *testing.T) {
	const first, second = "user-1371838", "user-2000402" // the first of such names that have the same
	if auth.RequestIdentity(first) != auth.RequestIdentity(second) {
		t.Fatal("the checksums differ: the test tests nothing")
	}
	h, ctx := mustOpen(t, vfs.NewMem()), context.Background()
	must(t, h.CreateUser(ctx, User{Name: first}, ""))
	var invalid *InvalidError
	if err := h.CreateUser(ctx, User{Name: second}, ""); !errors.As(err, &invalid) || invalid.Field != "name" {
		t.Errorf("%s and %s: %v", first, second, err)
	}
	must(t, h.DeleteUser(ctx, first))
	must(t, h.CreateUser(ctx, User{Name: second}, ""))
}
