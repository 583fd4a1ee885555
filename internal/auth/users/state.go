package users

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// User is what is stored of a user.
type User struct {
	Name     string
	Disabled bool
	Created  time.Time
	Roles    []string
	Limits   auth.Limits
	hash     string // of the password, in PHC form; empty if it has none
}

// HasPassword reports whether the user can log in.
func (u *User) HasPassword() bool { return u.hash != "" }

// Role is what is stored of a role.
type Role struct {
	Name    string
	Grants  []auth.Grant // ranges
	Actions auth.Actions
}

// rootRole is RoleRoot.
var rootRole = &Role{Name: RoleRoot, Actions: auth.ActionsAll, Grants: []auth.Grant{{Read: true, Write: true, Lease: true}}}

// token is what is stored of a token. A record is never changed, but what live says of the last use.
type token struct {
	live     *auth.Token
	label    string
	session  bool
	created  time.Time
	lastUsed time.Time // as it is stored
}

// state is everything that is stored.
type state struct {
	enabled bool
	users   map[string]*User
	roles   map[string]*Role
	tokens  [256]map[auth.TokenHash]*token // by the first byte: a change copies one of the maps
	count   int                            // of tokens
	rights  int64                          // bytes of the heap that the compiled rights of all users take
}

// What a user without rights, and a token, take of the heap: 450 and 520 bytes with the longest names were measured.
const (
	userHeapBytes  = 512
	tokenHeapBytes = 640
)

func (s *state) heapBytes() int64 {
	return int64(len(s.users))*userHeapBytes + int64(s.count)*tokenHeapBytes + s.rights
}

// role is a role of the state; nil if there is none.
func (s *state) role(name string) *Role {
	if name == RoleRoot {
		return rootRole
	}
	return s.roles[name]
}

func (s *state) token(h auth.TokenHash) *token { return s.tokens[h[0]][h] }

// rightsOf compiles the rights of a user. A role that does not exist gives none.
func (s *state) rightsOf(u *User) *auth.Rights {
	var grants []auth.Grant
	for _, name := range u.Roles {
		if role := s.role(name); role != nil {
			grants = append(append(grants, role.Grants...), auth.Grant{Actions: role.Actions})
		}
	}
	return auth.Compile(grants)
}

// compile makes a table from a state, and says in the state what the rights take. Users that have not changed are the same as before, and users with
// the same roles have the same rights: there may be ten thousand of them.
func (m *Manager) compile(s *state, revision keys.Epoch, before *auth.Table, changed func(*User) bool) *auth.Table {
	t := &auth.Table{Revision: revision, Enabled: s.enabled, Users: make(map[string]*auth.User, len(s.users))}
	s.rights = 0
	shared := make(map[string]*auth.Rights) // by the names of the roles, none of which has a space
	var others []*User
	for name, u := range s.users {
		if before == nil || before.Users[name] == nil || changed(u) {
			others = append(others, u)
			continue
		}
		old, roles := before.Users[name], strings.Join(u.Roles, " ")
		if t.Users[name] = old; shared[roles] == nil {
			shared[roles] = old.Rights
			s.rights += old.Rights.HeapBytes()
		}
	}
	for _, u := range others {
		roles := strings.Join(u.Roles, " ")
		if shared[roles] == nil {
			shared[roles] = s.rightsOf(u)
			s.rights += shared[roles].HeapBytes()
		}
		compiled := &auth.User{Name: u.Name, Disabled: u.Disabled, Rights: shared[roles]}
		if before != nil && before.Users[u.Name] != nil {
			compiled.Limiter = before.Users[u.Name].Limiter // it knows what the user has taken, and gets the limits when the change is made
		}
		if compiled.Limiter == nil && u.Limits != (auth.Limits{}) {
			compiled.Limiter = auth.NewLimiter(u.Limits, m.options.Elapsed)
		}
		t.Users[u.Name] = compiled
	}
	return t
}

// setLimits lets the limits of a state be in force for users that have had others.
func (s *state) setLimits(t, before *auth.Table) {
	for name, u := range t.Users {
		if old := before.Users[name]; old != nil && old != u && old.Limiter != nil {
			old.Limiter.Set(s.users[name].Limits)
		}
	}
}

// liveTokens are the tokens of a shard as a table has them.
func liveTokens(shard map[auth.TokenHash]*token) map[auth.TokenHash]*auth.Token {
	live := make(map[auth.TokenHash]*auth.Token, len(shard))
	for h, k := range shard {
		live[h] = k.live
	}
	return live
}

// load reads all records. One that cannot be read is reported, and is as if it were not there; only of the settings it is as
// if users were checked.
func (m *Manager) load(ctx context.Context) error {
	s := &m.state
	s.users, s.roles = map[string]*User{}, map[string]*Role{}
	var revision keys.Epoch
	var large [][]byte
	visit := func(key, value []byte, epoch keys.Epoch) bool {
		if len(value) == 0 { // it is stored outside of its leaf
			large = append(large, bytes.Clone(key))
			return true
		}
		revision = max(revision, epoch)
		m.enter(key, value)
		return true
	}
	hidden := func(lower, upper []byte, err error) {
		m.report("records of users, roles or tokens", err)
		if bytes.Compare(lower, settingsKey) <= 0 && (upper == nil || bytes.Compare(settingsKey, upper) < 0) {
			s.enabled = true
		}
	}
	for _, first := range []byte{keys.SystemUser, keys.SystemRole, keys.SystemToken} {
		if err := m.session.ScanReadable(ctx, []byte{first}, []byte{first + 1}, visit, hidden); err != nil {
			return fmt.Errorf("read the users: %w", err)
		}
	}
	for _, key := range large {
		n, err := m.session.NewestVersion(ctx, keys.Append(nil, keys.SpaceSystem, key))
		if err != nil {
			m.report(describe(key), err)
			continue
		}
		revision = max(revision, n.Epoch)
		m.enter(key, n.Value)
	}
	t := m.compile(s, revision, nil, nil)
	for i := range s.tokens {
		t.Tokens[i] = liveTokens(s.tokens[i])
	}
	m.adopt(*s)
	m.publish(t)
	return nil
}

func (m *Manager) report(what string, err error) {
	if m.options.Report != nil {
		m.options.Report(what, err)
	}
}

// describe says what a record is about.
func describe(key []byte) string {
	switch {
	case len(key) == 1:
		return "the settings of users"
	case key[0] == keys.SystemUser:
		return fmt.Sprintf("user %q", key[1:])
	case key[0] == keys.SystemRole:
		return fmt.Sprintf("role %q", key[1:])
	}
	return "a token"
}

// enter adds a record to the state.
func (m *Manager) enter(key, value []byte) {
	s, err := &m.state, error(nil)
	switch name := string(key[1:]); key[0] {
	case keys.SystemUser:
		if name == "" {
			s.enabled, err = decodeSettings(value)
			break
		}
		var u *User
		if u, err = decodeUser(value); err == nil {
			u.Name = name
			s.users[name] = u
		}
	case keys.SystemRole:
		var r *Role
		if r, err = decodeRole(value); err == nil {
			r.Name = name
			s.roles[name] = r
		}
	case keys.SystemToken:
		var k *token
		if k, err = decodeToken(value); err == nil && len(name) != len(auth.TokenHash{}) {
			err = errMalformed
		}
		if err == nil {
			s.enterToken(auth.TokenHash([]byte(name)), k)
		}
	}
	if err != nil {
		m.report(describe(key), err)
	}
}

func (s *state) enterToken(h auth.TokenHash, k *token) {
	if s.tokens[h[0]] == nil {
		s.tokens[h[0]] = map[auth.TokenHash]*token{}
	}
	s.tokens[h[0]][h] = k
	s.count++
}

// draft is a change under way: the state after it, and its records.
type draft struct {
	m     *Manager
	write mvcc.Write
	next  state
	// What differs: a role changes the rights of the users that have it.
	users, roles map[string]bool
	shards       map[byte]bool
}

// changes reports whether the draft changes a user or its rights.
func (d *draft) changes(u *User) bool {
	return d.users[u.Name] || slices.ContainsFunc(u.Roles, func(role string) bool { return d.roles[role] })
}

// permitKey is the key of WithPermit in a context.
type permitKey struct{}

// WithPermit is a context in which a change is made only if permit is nil for the table before it. It is asked in the turn of the change:
// what the change has waited for, its turn and the hash of a password, may have taken the right to it away.
func WithPermit(ctx context.Context, permit func(*auth.Table) error) context.Context {
	return context.WithValue(ctx, permitKey{}, permit)
}

// change commits what edit does to a draft. If it returns an error, and the context has not ended, nothing has changed, unless it is
// *mvcc.OutcomeUnknownError.
func (m *Manager) change(ctx context.Context, edit func(*draft) error) error {
	if err := m.store.RequireFeatureLevel(keys.FeatureLevelHistory, "users"); err != nil {
		return err
	}
	if err := m.takeTurn(ctx); err != nil {
		return err
	}
	defer m.endTurn()
	if permit, ok := ctx.Value(permitKey{}).(func(*auth.Table) error); ok {
		if err := permit(m.Table()); err != nil {
			return err
		}
	}
	d := &draft{m: m, next: m.state, users: map[string]bool{}, roles: map[string]bool{}, shards: map[byte]bool{}}
	d.next.users, d.next.roles = maps.Clone(m.state.users), maps.Clone(m.state.roles)
	if err := edit(d); err != nil {
		return err
	}
	before := m.Table()
	t := &auth.Table{Enabled: d.next.enabled, Users: before.Users} // a change of tokens, which any user may make, compiles nothing
	if len(d.roles)+len(d.users) > 0 {
		t = m.compile(&d.next, 0, before, d.changes)
	}
	if t.Enabled && !hasAdministrator(t) && hasAdministrator(before) { // else damage hides the last one
		return ErrLastAdministrator
	}
	t.Tokens = before.Tokens
	for shard := range d.shards {
		t.Tokens[shard] = liveTokens(d.next.tokens[shard])
	}
	d.set(settingsKey, encodeSettings(d.next.enabled))
	epoch, err := m.commit(ctx, &d.write)
	if err != nil {
		return err
	}
	m.adopt(d.next)
	t.Revision = epoch
	m.state.setLimits(t, before)
	m.publish(t)
	return m.store.AwaitCommitPause(ctx) // a bulk load in it was permitted by an earlier table
}

// adopt makes a state the newest. The caller has the turn.
func (m *Manager) adopt(s state) {
	m.state = s
	m.newest.Store(&s)
}

// changesMax is how many changes of one client wait for their turn: each takes a sync of the device, and those of others come after them.
const changesMax = 32

// line counts the changes of each client that wait for their turn.
type line struct {
	mu      sync.Mutex // a leaf
	waiting map[string]int
}

// add counts n more, or reports false if the client would have too many.
func (l *line) add(client string, n int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch n += l.waiting[client]; {
	case n > changesMax:
		return false
	case n == 0:
		delete(l.waiting, client)
	default:
		l.waiting[client] = n
	}
	return true
}

func (m *Manager) takeTurn(ctx context.Context) error {
	if client := m.hasher.client(ctx); client != "" { // else it is one of the server itself
		if !m.line.add(client, 1) {
			return &auth.LimitError{What: "changes of users that wait for their turn", Limit: changesMax, Retry: retryHash}
		}
		defer m.line.add(client, -1)
	}
	select {
	case m.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m *Manager) endTurn() { <-m.turn }

// commit commits the records of a change, and returns when they are visible and durable: once they are installed, the end of
// the context does not keep the table from being published.
func (m *Manager) commit(ctx context.Context, w *mvcc.Write) (keys.Epoch, error) {
	w.Durability = mvcc.DurabilitySync
	w.SetOwn()
	epoch, err := m.session.Commit(ctx, w)
	if err != nil {
		return 0, err
	}
	return epoch, m.store.WaitWritten(context.WithoutCancel(ctx), epoch, mvcc.DurabilitySync)
}

func (d *draft) set(key, value []byte) { d.write.Batch.SetRecord(keys.SpaceSystem, key, value) }

func (d *draft) remove(key []byte) { d.write.Batch.DeleteRecord(keys.SpaceSystem, key) }

// setToken adds or, with nil, removes a token.
func (d *draft) setToken(h auth.TokenHash, k *token) {
	if !d.shards[h[0]] {
		d.shards[h[0]] = true
		d.next.tokens[h[0]] = maps.Clone(d.next.tokens[h[0]])
	}
	if k == nil {
		delete(d.next.tokens[h[0]], h)
		d.next.count--
		d.remove(tokenKey(h))
		return
	}
	d.next.enterToken(h, k)
	d.set(tokenKey(h), k.encode())
}

// removeTokens removes the tokens of a user that match.
func (d *draft) removeTokens(name string, match func(*token) bool) {
	for _, shard := range d.next.tokens {
		for h, k := range shard {
			if k.live.User == name && match(k) {
				d.setToken(h, nil)
			}
		}
	}
}

func (d *draft) createUser(name string, u User) error {
	if err := checkName(name); err != nil {
		return err
	}
	if d.next.users[name] != nil {
		return &ExistsError{Kind: "user", Name: name}
	}
	if other := d.sameRequests(name); other != "" {
		return &InvalidError{Field: "name", Text: fmt.Sprintf("has the checksum of the name %q, by which records of requests tell users apart; choose another one", other)}
	}
	if len(d.next.users) >= UsersMax {
		return &auth.LimitError{What: "users of the store", Limit: UsersMax}
	}
	u.Name, u.Created = name, d.m.options.Now()
	return d.setUser(&u)
}

// sameRequests is a user that records of requests cannot tell from one with a name; empty if there is none.
func (d *draft) sameRequests(name string) string {
	id := auth.RequestIdentity(name)
	for other := range d.next.users {
		if auth.RequestIdentity(other) == id {
			return other
		}
	}
	return ""
}

func (d *draft) setUser(u *User) error {
	if len(u.Roles) > RolesPerUserMax {
		return &InvalidError{Field: "roles", Text: fmt.Sprintf("more than %d", RolesPerUserMax)}
	}
	slices.Sort(u.Roles)
	u.Roles = slices.Compact(u.Roles)
	before := d.next.users[u.Name]
	for _, role := range u.Roles {
		kept := before != nil && slices.Contains(before.Roles, role) // one that damage hides does not prevent other changes
		if d.next.role(role) == nil && !kept {
			return &NotFoundError{Kind: "role", Name: role}
		}
	}
	d.next.users[u.Name] = u
	d.users[u.Name] = true
	d.set(userKey(u.Name), u.encode())
	return nil
}

// setRole adds or changes a role.
func (d *draft) setRole(x *Role) error {
	if err := checkName(x.Name); err != nil {
		return err
	}
	if x.Name == RoleRoot {
		return &InvalidError{Field: "name", Text: "the role root has all rights, and cannot be changed"}
	}
	if x.Actions&^auth.ActionsAll != 0 {
		return &InvalidError{Field: "actions", Text: "has one that is not known"}
	}
	for i := range x.Grants {
		g := &x.Grants[i]
		switch {
		case len(g.Upper) > 0 && bytes.Compare(g.Lower, g.Upper) >= 0:
			return &InvalidError{Field: "grants", Text: fmt.Sprintf("the range from %q to %q has no key", g.Lower, g.Upper)}
		case !g.Read && !g.Write && !g.Lease:
			return &InvalidError{Field: "grants", Text: fmt.Sprintf("the range from %q has no right", g.Lower)}
		case len(g.Lower) > d.m.store.KeyBytesMax() || len(g.Upper) > d.m.store.KeyBytesMax():
			return &InvalidError{Field: "grants", Text: "a bound is longer than a key may be"}
		}
	}
	value := x.encode()
	if len(value) > RoleBytesMax {
		return &InvalidError{Field: "grants", Text: fmt.Sprintf("take more than %d bytes; divide the role", RoleBytesMax)}
	}
	if len(d.next.roles) >= RolesMax && d.next.roles[x.Name] == nil {
		return &auth.LimitError{What: "roles of the store", Limit: RolesMax}
	}
	d.next.roles[x.Name] = x
	d.roles[x.Name] = true
	d.set(roleKey(x.Name), value)
	return nil
}

// checkName checks the name of a user or role. Names of certificates, which may be URIs, are names.
func checkName(name string) error {
	switch {
	case name == "" || len(name) > NameBytesMax:
		return &InvalidError{Field: "name", Text: fmt.Sprintf("must have 1 to %d bytes", NameBytesMax)}
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsGraphic(r) || unicode.IsSpace(r) }):
		return &InvalidError{Field: "name", Text: "must be UTF-8 text of visible characters, without spaces"}
	}
	return nil
}

func checkLabel(label string) error {
	if len(label) > LabelBytesMax || !utf8.ValidString(label) || strings.ContainsFunc(label, unicode.IsControl) {
		return &InvalidError{Field: "label", Text: fmt.Sprintf("must be UTF-8 text of at most %d bytes, without control characters", LabelBytesMax)}
	}
	return nil
}

// sorted are the values of a map in the order of their keys.
func sorted[K cmp.Ordered, V any](m map[K]V) (all []V) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		all = append(all, m[k])
	}
	return all
}
