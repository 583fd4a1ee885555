package users

import (
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/auth"
)

// CreateUser makes a user. Without a password it cannot log in: it has tokens or a certificate.
func (m *Manager) CreateUser(ctx context.Context, u User, password string) error {
	if password != "" {
		var err error
		if u.hash, err = m.newHash(ctx, password); err != nil {
			return err
		}
	}
	u.Roles = slices.Clone(u.Roles)
	return m.change(ctx, func(d *draft) error { return d.createUser(u.Name, u) })
}

// UserChange says what becomes different of a user; a nil field stays.
type UserChange struct {
	AddRoles, RemoveRoles []string
	Disabled              *bool
	Limits                *auth.Limits
}

// UpdateUser changes a user.
func (m *Manager) UpdateUser(ctx context.Context, name string, c *UserChange) error {
	return m.change(ctx, func(d *draft) error {
		before := d.next.users[name]
		if before == nil {
			return &NotFoundError{Kind: "user", Name: name}
		}
		u := *before
		u.Roles = slices.Concat(u.Roles, c.AddRoles)
		u.Roles = slices.DeleteFunc(u.Roles, func(role string) bool { return slices.Contains(c.RemoveRoles, role) })
		if c.Disabled != nil {
			u.Disabled = *c.Disabled
		}
		if c.Limits != nil {
			u.Limits = *c.Limits
		}
		return d.setUser(&u)
	})
}

// DeleteUser removes a user and its tokens.
func (m *Manager) DeleteUser(ctx context.Context, name string) error {
	return m.change(ctx, func(d *draft) error {
		if d.next.users[name] == nil {
			return &NotFoundError{Kind: "user", Name: name}
		}
		delete(d.next.users, name)
		d.users[name] = true
		d.remove(userKey(name))
		d.removeTokens(name, func(*token) bool { return true })
		return nil
	})
}

// SetPassword changes a password, or removes it if it is empty. The session tokens of the user end.
func (m *Manager) SetPassword(ctx context.Context, name, password string) error {
	return m.setPassword(ctx, name, password, func(*draft) error { return nil })
}

// ChangePassword is SetPassword for a user that has to know the password before.
func (m *Manager) ChangePassword(ctx context.Context, name, current, password string) error {
	before, err := m.checkPassword(ctx, name, current)
	if err != nil {
		return err
	}
	return m.setPassword(ctx, name, password, func(d *draft) error { return d.stillHas(name, before) })
}

func (m *Manager) setPassword(ctx context.Context, name, password string, check func(*draft) error) error {
	hash := ""
	if password != "" {
		var err error
		if hash, err = m.newHash(ctx, password); err != nil {
			return err
		}
	}
	return m.change(ctx, func(d *draft) error {
		if err := check(d); err != nil {
			return err
		}
		before := d.next.users[name]
		if before == nil {
			return &NotFoundError{Kind: "user", Name: name}
		}
		u := *before
		u.hash = hash
		d.removeTokens(name, func(k *token) bool { return k.session })
		return d.setUser(&u)
	})
}

// CreateRole makes a role.
func (m *Manager) CreateRole(ctx context.Context, x *Role) error {
	return m.change(ctx, func(d *draft) error {
		if d.next.role(x.Name) != nil {
			return &ExistsError{Kind: "role", Name: x.Name}
		}
		return d.setRole(x)
	})
}

// UpdateRole replaces the ranges and actions of a role.
func (m *Manager) UpdateRole(ctx context.Context, x *Role) error {
	return m.change(ctx, func(d *draft) error {
		if d.next.role(x.Name) == nil {
			return &NotFoundError{Kind: "role", Name: x.Name}
		}
		return d.setRole(x)
	})
}

// DeleteRole removes a role, also from the users that have it.
func (m *Manager) DeleteRole(ctx context.Context, name string) error {
	return m.change(ctx, func(d *draft) error {
		switch {
		case name == RoleRoot:
			return &InvalidError{Field: "name", Text: "the role root cannot be removed"}
		case d.next.roles[name] == nil:
			return &NotFoundError{Kind: "role", Name: name}
		}
		delete(d.next.roles, name)
		d.roles[name] = true
		d.remove(roleKey(name))
		for _, before := range d.next.users {
			if !slices.Contains(before.Roles, name) {
				continue
			}
			u := *before
			u.Roles = slices.DeleteFunc(slices.Clone(u.Roles), func(role string) bool { return role == name })
			if err := d.setUser(&u); err != nil {
				return err
			}
		}
		return nil
	})
}

// Users lists the users by name.
func (m *Manager) Users(ctx context.Context) (all []*User, err error) {
	return all, m.read(ctx, func(s *state) { all = sorted(s.users) })
}

// User is one user.
func (m *Manager) User(ctx context.Context, name string) (u *User, err error) {
	if err := m.read(ctx, func(s *state) { u = s.users[name] }); err != nil {
		return nil, err
	}
	if u == nil {
		return nil, &NotFoundError{Kind: "user", Name: name}
	}
	return u, nil
}

// Roles lists the roles by name, with root.
func (m *Manager) Roles(ctx context.Context) (all []*Role, err error) {
	return all, m.read(ctx, func(s *state) { all = append([]*Role{rootRole}, sorted(s.roles)...) })
}

// read calls f with the state of the newest table, unless the context has ended. A change that is being made may wait for the device: it is
// in the next state.
func (m *Manager) read(ctx context.Context, f func(*state)) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	f(m.newest.Load())
	return nil
}
