package users

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
)

// world is what the users of a store have to be: the model of TestUsersAgainstAModel. A step changes a copy of it.
type world struct {
	enabled bool
	users   map[string]worldUser
	roles   map[string]*Role      // never changed
	tokens  map[string]worldToken // by label
}

type worldUser struct {
	roles    []string
	disabled bool
	password string
	limits   auth.Limits
}

type worldToken struct {
	user    string
	session bool
	expires time.Time
}

func newWorld() *world {
	return &world{users: map[string]worldUser{}, roles: map[string]*Role{}, tokens: map[string]worldToken{}}
}

func (w *world) clone() *world {
	return &world{w.enabled, maps.Clone(w.users), maps.Clone(w.roles), maps.Clone(w.tokens)}
}

func (w *world) hasRole(name string) bool { return name == RoleRoot || w.roles[name] != nil }

func (w *world) rights(name string) *auth.Rights {
	var grants []auth.Grant
	for _, role := range w.users[name].roles {
		r := w.roles[role]
		if role == RoleRoot {
			r = rootRole
		}
		grants = append(append(grants, r.Grants...), auth.Grant{Actions: r.Actions})
	}
	return auth.Compile(grants)
}

func (w *world) isAdministrator(name string) bool {
	u, known := w.users[name]
	return known && !u.disabled && w.rights(name).Everything()
}

func (w *world) hasAdministrator() bool {
	for name := range w.users {
		if w.isAdministrator(name) {
			return true
		}
	}
	return false
}

// verify is what a token is worth.
func (w *world) verify(label string, now time.Time) error {
	k, known := w.tokens[label]
	u, exists := w.users[k.user]
	switch {
	case !known || !exists || u.disabled:
		return auth.ErrUnauthenticated
	case !k.expires.IsZero() && !now.Before(k.expires):
		return auth.ErrTokenExpired
	}
	return nil
}

// permit is that of an administrator's request with a token.
func (w *world) permit(label string, now time.Time) error {
	if err := w.verify(label, now); err != nil {
		return err
	}
	if _, actions := w.rights(w.tokens[label].user).Grants(); actions&auth.ActionUsers == 0 {
		return new(auth.DeniedError)
	}
	return nil
}

func (w *world) checkPassword(name, password string) error {
	if u, known := w.users[name]; !known || u.disabled || u.password == "" || u.password != password {
		return auth.ErrUnauthenticated
	}
	return nil
}

func (w *world) createUser(name string, u worldUser) error {
	if _, exists := w.users[name]; exists {
		return new(ExistsError)
	}
	return w.setUser(name, u)
}

func (w *world) setUser(name string, u worldUser) error {
	u.roles = slices.Compact(slices.Sorted(slices.Values(u.roles)))
	for _, role := range u.roles {
		if !w.hasRole(role) {
			return &NotFoundError{Kind: "role"}
		}
	}
	w.users[name] = u
	return nil
}

func (w *world) updateUser(name string, c *UserChange) error {
	u, known := w.users[name]
	if !known {
		return &NotFoundError{Kind: "user"}
	}
	u.roles = slices.DeleteFunc(slices.Concat(u.roles, c.AddRoles), func(role string) bool { return slices.Contains(c.RemoveRoles, role) })
	if c.Disabled != nil {
		u.disabled = *c.Disabled
	}
	if c.Limits != nil {
		u.limits = *c.Limits
	}
	return w.setUser(name, u)
}

func (w *world) deleteUser(name string) error {
	if _, known := w.users[name]; !known {
		return &NotFoundError{Kind: "user"}
	}
	delete(w.users, name)
	w.removeTokens(func(k worldToken) bool { return k.user == name })
	return nil
}

func (w *world) removeTokens(match func(worldToken) bool) {
	maps.DeleteFunc(w.tokens, func(_ string, k worldToken) bool { return match(k) })
}

func (w *world) setPassword(name, password string) error {
	u, known := w.users[name]
	if !known {
		return &NotFoundError{Kind: "user"}
	}
	u.password = password
	w.users[name] = u
	w.removeTokens(func(k worldToken) bool { return k.user == name && k.session })
	return nil
}

func (w *world) deleteRole(name string) error {
	if w.roles[name] == nil {
		return &NotFoundError{Kind: "role"}
	}
	delete(w.roles, name)
	for user, u := range w.users {
		u.roles = slices.DeleteFunc(slices.Clone(u.roles), func(role string) bool { return role == name })
		w.users[user] = u
	}
	return nil
}

func (k worldToken) expired(now time.Time) bool { return !k.expires.IsZero() && !now.Before(k.expires) }

// createToken makes a token; maker is the label of the one that makes it, empty for none.
func (w *world) createToken(label string, k worldToken, maker string, now time.Time) error {
	if _, known := w.users[k.user]; !known {
		return &NotFoundError{Kind: "user"}
	}
	if maker != "" {
		m, known := w.tokens[maker]
		switch {
		case !known:
			return auth.ErrUnauthenticated
		case m.session || m.expires.IsZero():
		case k.expires.IsZero():
			k.expires = m.expires
		case k.expires.After(m.expires):
			return new(InvalidError)
		}
	}
	w.removeTokens(func(other worldToken) bool { return other.user == k.user && other.expired(now) })
	w.tokens[label] = k
	return nil
}

func (w *world) String() string {
	return fmt.Sprintf("checked %v\nusers %+v\nroles %v\ntokens %+v", w.enabled, w.users, slices.Sorted(maps.Keys(w.roles)), w.tokens)
}

// kindOf is what an error means to a client; failed are those that the model has not.
func kindOf(err error) string {
	var notFound *NotFoundError
	switch {
	case err == nil:
		return "done"
	case errors.As(err, &notFound):
		return "no " + notFound.Kind
	case errors.As(err, new(*ExistsError)):
		return "exists"
	case errors.As(err, new(*InvalidError)):
		return "invalid"
	case errors.As(err, new(*auth.DeniedError)):
		return "denied"
	}
	for _, known := range []error{auth.ErrUnauthenticated, auth.ErrTokenExpired, ErrLastAdministrator, ErrNotEnabled, ErrNotAdministrator, ErrBootstrapped} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	return failed
}

const failed = "failed"
