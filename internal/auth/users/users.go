// Package users keeps users, roles and tokens as records of the store, and authenticates clients.
//
//	name, password ─► hasher (one or two goroutines, bounded queue, clients in turn) ─► token, stored as its SHA-256
//	token ─► SHA-256 ─► auth.Table ─► auth.Identity             nothing is read or written
//	certificate ─► rule ─► name ─► auth.Table ─► auth.Identity
//
//	change ─► draft ─► one commit: records, and u ─► visible, durable ─► new auth.Table ─► observers ─► answer
//
//	record          value (format.go)
//	u               whether users are checked; its epoch is the auth revision
//	u | name        a user: hash of the password, roles, limits
//	r | role        a role: ranges with rights, and administrative actions
//	k | SHA-256     a token: its user, and its times
//
// Terms. A password hash is argon2id in PHC form, with its own parameters. A session token is one that a login has made. The
// bootstrap token makes the first administrator, once; it is made at each start of a server without an administrator, and
// never stored. An administrator is a user that is not disabled and has all rights. The role root has all rights; it is no
// record, and cannot be changed.
//
// Invariants:
//   - Every change is one commit with the record u, so that the epoch of u is that of the newest change. Only the times of
//     the last use of tokens are written without it.
//   - A table is published when its commit is visible and durable, in the order of the commits, and before the change is
//     answered.
//   - While users are checked there is an administrator, unless damage hides the last one. A store of which the record u cannot be read checks users.
//   - A wrong password, an unknown user and a disabled one have the same answer, after the same work.
//   - Neither passwords nor tokens are stored, logged, or part of an error.
//
// Locks: Manager.turn orders changes, and is held during their commits. Attempts, the line and the hasher have mutexes of their own, leaves.
package users

import (
	"context"
	"crypto/subtle"
	"errors"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Limits of what is stored.
const (
	UsersMax         = 10_000
	RolesMax         = 1_000
	TokensMax        = 100_000
	TokensPerUserMax = 1_000
	NameBytesMax     = 128
	LabelBytesMax    = 128
	PasswordBytesMin = 8
	PasswordBytesMax = 1024
	RoleBytesMax     = 64 << 10 // the record of a role
	RolesPerUserMax  = 100
	// TokenTimeMax is how long a session token may be valid at most.
	TokenTimeMax = 30 * 24 * time.Hour
	// TokenTimeDefault is how long a session token is valid if the login does not say.
	TokenTimeDefault = 12 * time.Hour
)

// RoleRoot is the role with all rights.
const RoleRoot = "root"

// Errors.
var (
	ErrNotEnabled        = errors.New("users are not checked on this server")
	ErrLastAdministrator = errors.New("no administrator would be left: another user needs all rights first")
	ErrBootstrapped      = errors.New("an administrator exists already")
	ErrNotAdministrator  = errors.New("users can be checked only by the wish of a user with all rights")
)

// NotFoundError says that a user, role or token does not exist.
type NotFoundError struct{ Kind, Name string }

func (e *NotFoundError) Error() string { return "there is no " + e.Kind + " " + e.Name }

// ExistsError says that a user or role exists.
type ExistsError struct{ Kind, Name string }

func (e *ExistsError) Error() string { return "the " + e.Kind + " " + e.Name + " exists already" }

// InvalidError is bad input.
type InvalidError struct{ Field, Text string }

func (e *InvalidError) Error() string { return e.Field + ": " + e.Text }

// Options configure a Manager. Zero fields take the default named beside them.
type Options struct {
	Hash     HashCost                   // of new passwords; 64 MiB, 2 passes
	Rule     CertificateRule            // none
	Now      func() time.Time           // time.Now
	Elapsed  func() time.Duration       // the monotonic clock; since Open
	Observe  func(*auth.Table)          // is called with each table, in order, before the change is answered; may be nil
	Report   func(what string, _ error) // is called with each record that cannot be read; may be nil
	LastUsed time.Duration              // how often times of the last use are written; 1 h

	Client func(context.Context) string // whose a password is that waits to be checked; nil: not known
}

// Manager has the users of a store.
type Manager struct {
	// Constant after Open.
	store     *mvcc.Store
	session   *mvcc.Session // of the change that has the turn
	options   Options
	hasher    *hasher
	attempts  attempts
	bootstrap string // the bootstrap token

	table atomic.Pointer[auth.Table]

	turn  chan struct{} // holds a token while a change is made
	line  line          // of the changes that wait for it
	state state         // of the holder of turn; its maps and records are never changed, but replaced

	newest atomic.Pointer[state] // that of the newest table: what reads see, which wait for no change
}

// Open reads the users of a store. The caller runs Run until the store closes.
func Open(ctx context.Context, store *mvcc.Store, o Options) (*Manager, error) {
	started := time.Now()
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Elapsed == nil {
		o.Elapsed = func() time.Duration { return time.Since(started) }
	}
	if o.Hash == (HashCost{}) {
		o.Hash = hashDefault
	}
	if o.LastUsed == 0 {
		o.LastUsed = time.Hour
	}
	m := &Manager{
		store: store, session: store.OwnSession(), options: o, turn: make(chan struct{}, 1), line: line{waiting: map[string]int{}},
		bootstrap: newSecret(bootstrapPrefix),
	}
	m.hasher = newHasher(o.Hash)
	if o.Client != nil {
		m.hasher.client = o.Client
	}
	m.attempts.elapsed = o.Elapsed
	if err := m.load(ctx); err != nil {
		return nil, err
	}
	return m, nil
}

// Run hashes passwords and writes when tokens were last used, until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	m.hasher.run(ctx, func() { m.maintain(ctx) })
}

// HeapBytes is about what users, tokens, and passwords that are hashed take of the heap.
func (m *Manager) HeapBytes() int64 { return m.newest.Load().heapBytes() + m.hasher.heapBytes() }

// Table is the newest table: one atomic load.
func (m *Manager) Table() *auth.Table { return m.table.Load() }

// publish makes a table the newest.
func (m *Manager) publish(t *auth.Table) {
	m.table.Store(t)
	if m.options.Observe != nil {
		m.options.Observe(t)
	}
}

// BootstrapToken is the token that makes the first administrator, or empty if there is one.
func (m *Manager) BootstrapToken() string {
	if hasAdministrator(m.Table()) {
		return ""
	}
	return m.bootstrap
}

func hasAdministrator(t *auth.Table) bool {
	for _, u := range t.Users {
		if isAdministrator(u) {
			return true
		}
	}
	return false
}

func isAdministrator(u *auth.User) bool { return u != nil && !u.Disabled && u.Rights.Everything() }

// Bootstrap makes the first administrator, with the bootstrap token.
func (m *Manager) Bootstrap(ctx context.Context, token, name, password string) error {
	if subtle.ConstantTimeCompare([]byte(token), []byte(m.bootstrap)) != 1 {
		return auth.ErrUnauthenticated
	}
	hash, err := m.newHash(ctx, password)
	if err != nil {
		return err
	}
	return m.change(ctx, func(d *draft) error {
		if hasAdministrator(m.Table()) {
			return ErrBootstrapped
		}
		return d.createUser(name, User{Roles: []string{RoleRoot}, hash: hash})
	})
}

// Enable begins to check users. The identity is that of the client, which has to be an administrator: it cannot lock itself
// out.
func (m *Manager) Enable(ctx context.Context, by *auth.Identity) error {
	return m.change(ctx, func(d *draft) error {
		u, err := m.Table().Verify(by, m.options.Now())
		if err != nil {
			return err
		}
		if !isAdministrator(u) {
			return ErrNotAdministrator
		}
		d.next.enabled = true
		return nil
	})
}

// Disable ends that users are checked.
func (m *Manager) Disable(ctx context.Context) error {
	return m.change(ctx, func(d *draft) error {
		if !d.next.enabled {
			return ErrNotEnabled
		}
		d.next.enabled = false
		return nil
	})
}
