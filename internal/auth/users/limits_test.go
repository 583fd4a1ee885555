package users

import (
	"context"
	"errors"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAChangeThatIsNotMadeChangesNoLimit: one that is refused, and one that cannot be committed.
func TestAChangeThatIsNotMadeChangesNoLimit(t *testing.T) {
	ctx, faults := context.Background(), vfs.NewFaulty(vfs.NewMem())
	h := bootstrapped(t, faults)
	ann, _ := h.login("ann", "ann's secret")
	must(t, h.Enable(ctx, &ann))
	must(t, h.UpdateUser(ctx, "ann", &UserChange{Limits: &auth.Limits{Transactions: 3}}))
	limiter, yes := h.Table().Users["ann"].Limiter, true
	err := h.UpdateUser(ctx, "ann", &UserChange{Disabled: &yes, Limits: &auth.Limits{Transactions: 1}})
	if n := openMost(limiter); !errors.Is(err, ErrLastAdministrator) || n != 3 {
		t.Errorf("%v, and she may open %d transactions", err, n)
	}
	defer faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Err: syscall.EIO}).Remove()
	err = h.UpdateUser(ctx, "ann", &UserChange{Limits: &auth.Limits{Transactions: 1}})
	if n := openMost(limiter); err == nil || n != 3 {
		t.Errorf("%v, and she may open %d transactions", err, n)
	}
	h.stop = func() { _ = h.end() } // the store has failed
}

// TestUsersLogInWhileDamageHidesTheAdministrator: what damage has taken away is no reason to refuse changes that take away nothing.
func TestUsersLogInWhileDamageHidesTheAdministrator(t *testing.T) {
	ctx, fs := context.Background(), vfs.NewMem()
	h := bootstrapped(t, fs)
	must(t, h.CreateUser(ctx, User{Name: "bob"}, "bob's secret"))
	ann, _ := h.login("ann", "ann's secret")
	must(t, h.Enable(ctx, &ann))
	h.damage(userKey("ann"))
	h.stop()

	h = mustOpen(t, fs)
	bob, _ := h.login("bob", "bob's secret")
	must(t, h.Logout(ctx, &bob))
	must(t, h.Bootstrap(ctx, h.BootstrapToken(), "cem", "cem's secret"))
	if err := h.DeleteUser(ctx, "cem"); !errors.Is(err, ErrLastAdministrator) {
		t.Errorf("the new administrator: %v", err)
	}
}
