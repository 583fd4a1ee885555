package users

import (
	"context"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestUsersWithTheSameRolesShareTheirRights: a change of a role compiles the rights of those that have it, once, and leaves all others as they are,
// with all that waits for their end.
func TestUsersWithTheSameRolesShareTheirRights(t *testing.T) {
	h, ctx := mustOpen(t, vfs.NewMem()), context.Background()
	role := func(name, upper string) *Role {
		return &Role{Name: name, Grants: []auth.Grant{{Lower: []byte("a"), Upper: []byte(upper), Read: true}}}
	}
	must(t, h.CreateRole(ctx, role("many", "b")))
	must(t, h.CreateRole(ctx, role("few", "c")))
	for i := range 4 {
		must(t, h.CreateUser(ctx, User{Name: fmt.Sprint("many", i), Roles: []string{"many"}}, ""))
		must(t, h.CreateUser(ctx, User{Name: fmt.Sprint("both", i), Roles: []string{"many", "few"}}, ""))
	}
	check := func(when string) {
		t.Helper()
		users, rights := h.Table().Users, int64(0)
		for _, kind := range []string{"many", "both"} {
			of := users[kind+"0"].Rights
			rights += of.HeapBytes()
			for i := range 4 {
				if users[fmt.Sprint(kind, i)].Rights != of {
					t.Errorf("%s: users with the same roles have their own rights", when)
				}
			}
		}
		if h.state.rights != rights {
			t.Errorf("%s: the rights count %d bytes, want %d", when, h.state.rights, rights)
		}
	}
	check("made one after the other")

	before := h.Table().Users
	must(t, h.UpdateRole(ctx, role("few", "d")))
	check("after a change of a role")
	for i := range 4 {
		many, both := fmt.Sprint("many", i), fmt.Sprint("both", i)
		if h.Table().Users[many] != before[many] {
			t.Errorf("a change of a role that %s does not have ends what it is", many)
		}
		if now := h.Table().Users[both]; now == before[both] || fmt.Sprint(now.Rights.Grants()) == fmt.Sprint(before[both].Rights.Grants()) {
			t.Errorf("%s has the rights from before the change", both)
		}
	}
	must(t, h.UpdateUser(ctx, "many3", &UserChange{AddRoles: []string{"few"}, RemoveRoles: []string{"many"}}))
	if users := h.Table().Users; users["many3"].Rights == users["many2"].Rights {
		t.Error("a user with another role has the rights of those before")
	}
	must(t, h.UpdateUser(ctx, "many3", &UserChange{AddRoles: []string{"many"}, RemoveRoles: []string{"few"}}))
	check("with a user that has come back")
}
