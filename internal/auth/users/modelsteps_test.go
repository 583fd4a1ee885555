package users

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
)

var (
	lifeNames     = []string{"ann", "bob", "cem", "dee"}
	lifeRoles     = []string{"r1", "r2", "r3"}
	lifePasswords = []string{"first secret", "second secret"}
)

func pick[T any](l *life, of []T) T { return of[l.rng.IntN(len(of))] }

// someToken is the label of a token that is known, also of one that was removed; empty if there is none.
func (l *life) someToken() string {
	l.mu.Lock()
	known := slices.Sorted(maps.Keys(l.secrets))
	l.mu.Unlock()
	if len(known) == 0 {
		return ""
	}
	return pick(l, known[max(0, len(known)-8):])
}

func (l *life) someRoles() (names []string) {
	for range l.rng.IntN(3) {
		names = append(names, pick(l, append(lifeRoles, RoleRoot)))
	}
	return names
}

func (l *life) someLimits() auth.Limits {
	return auth.Limits{Transactions: l.rng.Uint32N(4), Requests: l.rng.Uint32N(2) * 1000}
}

// someRole is a role with a few rights, or with all.
func (l *life) someRole(name string) *Role {
	r := &Role{Name: name, Actions: auth.Actions(l.rng.Uint32N(uint32(auth.ActionsAll + 1)))}
	if l.rng.IntN(3) == 0 {
		return &Role{Name: name, Actions: auth.ActionsAll, Grants: rootRole.Grants}
	}
	for range l.rng.IntN(3) {
		from := byte('a' + l.rng.IntN(20))
		r.Grants = append(r.Grants, auth.Grant{
			Lower: []byte{from}, Upper: []byte{from + 1 + byte(l.rng.IntN(5))}, Read: true, Write: l.rng.IntN(2) == 0, Lease: l.rng.IntN(2) == 0,
		})
	}
	return r
}

// change is a random one.
func (l *life) change() *change {
	c := l.anyChange()
	if c.first == nil && l.rng.IntN(3) == 0 {
		c.by = l.someToken()
	}
	return c
}

func (l *life) anyChange() *change {
	h, name := l.h, pick(l, lifeNames)
	switch l.rng.IntN(18) {
	case 0, 1:
		u := User{Name: name, Roles: l.someRoles(), Limits: l.someLimits()}
		password := pick(l, append(lifePasswords, ""))
		return &change{
			name: fmt.Sprintf("create %+v", u),
			model: func(w *world) error {
				return w.createUser(name, worldUser{roles: u.Roles, limits: u.Limits, password: password})
			},
			do: func(ctx context.Context) error { return h.CreateUser(ctx, u, password) },
		}
	case 2, 3, 4:
		u := &UserChange{AddRoles: l.someRoles(), RemoveRoles: l.someRoles()}
		if l.rng.IntN(2) == 0 {
			disabled := l.rng.IntN(3) == 0
			u.Disabled = &disabled
		}
		if l.rng.IntN(2) == 0 {
			limits := l.someLimits()
			u.Limits = &limits
		}
		return &change{
			name:  fmt.Sprintf("update %s %+v", name, u),
			model: func(w *world) error { return w.updateUser(name, u) },
			do:    func(ctx context.Context) error { return h.UpdateUser(ctx, name, u) },
		}
	case 5:
		return &change{
			name:  "delete " + name,
			model: func(w *world) error { return w.deleteUser(name) },
			do:    func(ctx context.Context) error { return h.DeleteUser(ctx, name) },
		}
	case 6:
		password := pick(l, append(lifePasswords, ""))
		return &change{
			name:  fmt.Sprintf("password of %s: %q", name, password),
			model: func(w *world) error { return w.setPassword(name, password) },
			do:    func(ctx context.Context) error { return h.SetPassword(ctx, name, password) },
		}
	case 7:
		before, password := pick(l, lifePasswords), pick(l, lifePasswords)
		return &change{
			name:  fmt.Sprintf("password of %s: %q after %q", name, password, before),
			first: func(w *world) error { return w.checkPassword(name, before) },
			model: func(w *world) error { return w.setPassword(name, password) },
			do:    func(ctx context.Context) error { return h.ChangePassword(ctx, name, before, password) },
		}
	case 8, 9, 10:
		return l.changeOfRole(pick(l, lifeRoles))
	case 11, 12, 13:
		return l.newToken(name)
	case 14:
		return l.endOfToken()
	case 15:
		return l.enabling()
	case 16:
		return l.bootstrapping(name)
	}
	return &change{
		name: "tidy",
		model: func(w *world) error {
			w.removeTokens(func(k worldToken) bool { return k.expired(l.now.Add(-expiredKept)) })
			return nil
		},
		first: func(*world) error { return nil }, // the server itself does it
		do:    h.tidyTokens,
	}
}

func (l *life) changeOfRole(name string) *change {
	h, r := l.h, l.someRole(name)
	switch l.rng.IntN(3) {
	case 0:
		return &change{
			name: fmt.Sprintf("create role %+v", r),
			model: func(w *world) error {
				if w.roles[name] != nil {
					return new(ExistsError)
				}
				w.roles[name] = r
				return nil
			},
			do: func(ctx context.Context) error { return h.CreateRole(ctx, r) },
		}
	case 1:
		return &change{
			name: fmt.Sprintf("update role %+v", r),
			model: func(w *world) error {
				if w.roles[name] == nil {
					return &NotFoundError{Kind: "role"}
				}
				w.roles[name] = r
				return nil
			},
			do: func(ctx context.Context) error { return h.UpdateRole(ctx, r) },
		}
	}
	return &change{
		name:  "delete role " + name,
		model: func(w *world) error { return w.deleteRole(name) },
		do:    func(ctx context.Context) error { return h.DeleteRole(ctx, name) },
	}
}

// newToken is one that an administrator, another token or a login makes.
func (l *life) newToken(name string) *change {
	l.labels++
	h, now, label := l.h, l.now, fmt.Sprintf("t%04d", l.labels)
	keep := func(secret string, err error) error {
		if err == nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.secrets[label] = secret
		}
		return err
	}
	lifetime := []time.Duration{0, time.Hour, 20 * time.Hour}[l.rng.IntN(3)]
	if l.rng.IntN(2) == 0 {
		password, k := pick(l, lifePasswords), worldToken{user: name, session: true, expires: now.Add(max(lifetime, time.Hour))}
		return &change{
			name:  fmt.Sprintf("login %s %q of %s with %q", label, lifetime, name, password),
			first: func(w *world) error { return w.checkPassword(name, password) },
			model: func(w *world) error { return w.createToken(label, k, "", now) },
			do: func(ctx context.Context) error {
				secret, _, err := h.Login(ctx, name, password, label, max(lifetime, time.Hour))
				return keep(secret, err)
			},
		}
	}
	k, n := worldToken{user: name}, NewToken{User: name, Label: label}
	if lifetime > 0 {
		k.expires = now.Add(lifetime)
		n.Expires = k.expires
	}
	maker := ""
	if by := l.someToken(); by != "" && l.rng.IntN(2) == 0 {
		id := l.identity(by)
		maker, n.Maker = by, &id.Token
	}
	return &change{
		name:  fmt.Sprintf("token %s %+v made by %q", label, k, maker),
		model: func(w *world) error { return w.createToken(label, k, maker, now) },
		do: func(ctx context.Context) error {
			secret, _, err := h.CreateToken(ctx, n)
			return keep(secret, err)
		},
	}
}

// endOfToken revokes a token, as its owner or as an administrator.
func (l *life) endOfToken() *change {
	h, label, owner := l.h, l.someToken(), ""
	if l.rng.IntN(2) == 0 {
		owner = pick(l, lifeNames)
	}
	return &change{
		name: fmt.Sprintf("revoke %s of %q", label, owner),
		model: func(w *world) error {
			k, known := w.tokens[label]
			if !known || owner != "" && k.user != owner {
				return &NotFoundError{Kind: "token"}
			}
			delete(w.tokens, label)
			return nil
		},
		do: func(ctx context.Context) error { return h.RevokeToken(ctx, TokenID(hashToken(l.secret(label))), owner) },
	}
}

func (l *life) enabling() *change {
	h, now, by := l.h, l.now, l.someToken()
	if l.rng.IntN(3) == 0 {
		return &change{
			name: "check no users",
			model: func(w *world) error {
				if !w.enabled {
					return ErrNotEnabled
				}
				w.enabled = false
				return nil
			},
			do: h.Disable,
		}
	}
	id := l.identity(by)
	return &change{
		name: "check users by " + by,
		model: func(w *world) error {
			if err := w.verify(by, now); err != nil {
				return err
			}
			if !w.isAdministrator(w.tokens[by].user) {
				return ErrNotAdministrator
			}
			w.enabled = true
			return nil
		},
		do: func(ctx context.Context) error { return h.Enable(ctx, &id) },
	}
}

func (l *life) bootstrapping(name string) *change {
	h, token, password := l.h, l.h.bootstrap, pick(l, lifePasswords)
	wrong := l.rng.IntN(4) == 0
	if wrong {
		token += "x"
	}
	return &change{
		name: fmt.Sprintf("bootstrap %s, wrong: %v", name, wrong),
		first: func(*world) error {
			if wrong {
				return auth.ErrUnauthenticated
			}
			return nil
		},
		model: func(w *world) error {
			if w.hasAdministrator() {
				return ErrBootstrapped
			}
			return w.createUser(name, worldUser{roles: []string{RoleRoot}, password: password})
		},
		do: func(ctx context.Context) error { return h.Bootstrap(ctx, token, name, password) },
	}
}

// tryPassword tries a password of a user.
func (l *life) tryPassword() {
	w, name, password := l.may[0], pick(l, lifeNames), pick(l, lifePasswords)
	_, err := l.h.Password(context.Background(), name, password)
	if want := w.checkPassword(name, password); !errors.Is(err, want) {
		l.fail("password %q of %s: %v, want %v", password, name, err, want)
	}
}

// differs is how the users of the store differ from a world; empty if they do not.
func (l *life) differs(w *world) string {
	t, ctx := l.h.Table(), context.Background()
	if t.Enabled != w.enabled || len(t.Users) != len(w.users) {
		return fmt.Sprintf("checked %v, %d users", t.Enabled, len(t.Users))
	}
	all, err := l.h.Users(ctx)
	if err != nil {
		return err.Error()
	}
	for _, u := range all {
		want, known := w.users[u.Name]
		live := t.Users[u.Name]
		if got := (worldUser{u.Roles, u.Disabled, want.password, u.Limits}); !known || live == nil || fmt.Sprint(got) != fmt.Sprint(want) || u.HasPassword() != (want.password != "") {
			return fmt.Sprintf("user %s is %+v, want %+v", u.Name, u, want)
		}
		if p, _ := parseHash(u.hash); want.password != "" && !p.matches(want.password) {
			return fmt.Sprintf("user %s has another password than %q", u.Name, want.password)
		}
		if got, want := fmt.Sprint(live.Rights.Grants()), fmt.Sprint(w.rights(u.Name).Grants()); got != want || live.Disabled != u.Disabled {
			return fmt.Sprintf("user %s has the rights %s, want %s", u.Name, got, want)
		}
		if n := openMost(live.Limiter); n != int(want.limits.Transactions) {
			return fmt.Sprintf("user %s may open %d transactions, want %d", u.Name, n, want.limits.Transactions)
		}
	}
	roles, err := l.h.Roles(ctx)
	if err != nil || len(roles) != 1+len(w.roles) {
		return fmt.Sprintf("%d roles, %v", len(roles), err)
	}
	for _, r := range roles[1:] {
		if want := w.roles[r.Name]; want == nil || fmt.Sprint(*r) != fmt.Sprint(*want) {
			return fmt.Sprintf("role %+v, want %+v", r, want)
		}
	}
	if (l.h.BootstrapToken() == "") != w.hasAdministrator() {
		return "the token of the first administrator"
	}
	return l.tokensDiffer(w)
}

func (l *life) tokensDiffer(w *world) string {
	all, err := l.h.Tokens(context.Background(), "")
	if err != nil || len(all) != len(w.tokens) || l.h.state.count != len(all) {
		return fmt.Sprintf("%d tokens, counted as %d, want %d; %v", len(all), l.h.state.count, len(w.tokens), err)
	}
	for i := range all {
		got := worldToken{all[i].User, all[i].Session, all[i].Expires}
		if want := w.tokens[all[i].Label]; got.user != want.user || got.session != want.session || !got.expires.Equal(want.expires) {
			return fmt.Sprintf("token %s is %+v, want %+v", all[i].Label, got, want)
		}
	}
	for label := range l.secrets {
		id, err := l.h.Bearer("Bearer " + l.secrets[label])
		if want := w.verify(label, l.now); !errors.Is(err, want) || err == nil && id.User != w.tokens[label].user {
			return fmt.Sprintf("token %s: %+v, %v, want %v", label, id, err, want)
		}
	}
	return ""
}

// openMost is how many transactions a limiter lets be open; 0 is no limit.
func openMost(x *auth.Limiter) int {
	for n := range 5 {
		if x.Open(auth.Transactions) != nil {
			return n
		}
		defer x.Close(auth.Transactions)
	}
	return 0
}
