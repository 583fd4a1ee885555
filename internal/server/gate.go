package server

import (
	"context"
	"crypto/tls"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/auth/users"
	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/storage"
)

// gate compares what requests ask for with the rights of their callers, before anything is executed.
//
//	header or certificate ─► caller (kept by the connection) ─┐
//	RPC ─► its row ─► footprint of the request ───────────────┴► rights ─► execute ─► latches held: has the table changed?
//
// Both transports, and every form in which a request can come, check through access: unary requests, messages of pipelines and
// of other streams, operations of transactions. While users are not checked, a check is one atomic load and a branch.
type gate struct {
	table   atomic.Pointer[numberedTable] // nil while users are not checked
	enabled atomic.Pointer[chan struct{}] // closed while users are checked; see access.follow

	publishing sync.Mutex  // guards the next two
	published  uint64      // number of the newest table
	newest     *auth.Table // the newest one, whether users are checked or not

	users *users.Manager // what publishes tables; constant after Open

	// Each finds the identity of a caller: by the header "authorization", by the certificate of a connection, or by a password.
	bearer      func(header string) (auth.Identity, error)
	certificate func(*tls.ConnectionState) (auth.Identity, error)
	password    func(ctx context.Context, user, password string) (auth.Identity, error) // takes a tenth of a second
	passwords   passwordCache
}

// authenticateWith makes the users of the store those that are authenticated.
func (g *gate) authenticateWith(m *users.Manager) {
	g.bearer, g.password = m.Bearer, m.Password
	g.certificate = func(state *tls.ConnectionState) (auth.Identity, error) {
		return m.Certificate(state.PeerCertificates[0])
	}
}

func (g *gate) init() {
	g.openEnabled()
	g.bearer = func(string) (auth.Identity, error) { return auth.Identity{}, auth.ErrUnauthenticated }
	g.certificate = func(*tls.ConnectionState) (auth.Identity, error) { return auth.Identity{}, auth.ErrUnauthenticated }
}

// numberedTable is a table that was published. No two have the same number, which is not 0. Connections and streams, which may be idle for
// ever, keep the number of the table that they were checked with, and not the table: each change of users makes another one.
type numberedTable struct {
	*auth.Table
	number uint64
}

// numberOf is the number of a table, or 0 without one.
func numberOf(t *numberedTable) uint64 {
	if t == nil {
		return 0
	}
	return t.number
}

// publish makes a table the one that requests are checked with. Then it wakes those that wait or are idle and whose rights it may have changed:
// see access.follow.
func (g *gate) publish(t *auth.Table) {
	g.publishing.Lock()
	defer g.publishing.Unlock()
	checked := g.table.Load() != nil
	if t == nil || !t.Enabled {
		if checked {
			g.openEnabled()
		}
		g.table.Store(nil)
	} else {
		g.published++
		g.table.Store(&numberedTable{Table: t, number: g.published})
		if !checked {
			close(*g.enabled.Load())
		}
	}
	if t == nil {
		return
	}
	if g.newest != nil {
		g.newest.Retire(t)
	}
	g.newest = t
}

// openEnabled makes the channel anew: users are not checked from now on.
func (g *gate) openEnabled() {
	c := make(chan struct{})
	g.enabled.Store(&c)
}

// caller is the sender of requests on a connection, as of one table. It is not changed.
type caller struct {
	header   string
	table    uint64 // number of it, for a connection
	identity auth.Identity
	user     *auth.User
	token    *auth.Token // of MethodToken
	expires  time.Time   // of the token; zero: it does not
	err      error       // why the caller is not known
}

func (c *caller) expired() bool { return !c.expires.IsZero() && !time.Now().Before(c.expires) }

// callerOf is the caller of a request. A connection keeps the last one: the same header costs a comparison.
func (g *gate) callerOf(conn *connection, header string, t *numberedTable) *caller {
	if conn == nil {
		return g.authenticate(nil, header, t.Table)
	}
	c := conn.caller.Load()
	if c == nil || c.table != t.number || c.header != header || c.expired() {
		c = g.authenticate(conn.tls, header, t.Table)
		c.table = t.number
		conn.caller.Store(c)
	}
	return c
}

// authenticate finds the identity of a caller. A header is used rather than a certificate.
func (g *gate) authenticate(state *tls.ConnectionState, header string, t *auth.Table) *caller {
	c := &caller{header: header, err: auth.ErrUnauthenticated}
	switch {
	case header != "":
		c.identity, c.err = g.bearer(header)
	case state != nil && len(state.PeerCertificates) > 0:
		c.identity, c.err = g.certificate(state)
	}
	if c.err == nil {
		c.user, c.err = t.Verify(&c.identity, time.Now())
	}
	if c.err == nil && c.identity.Method == auth.MethodToken {
		c.token = t.Token(c.identity.Token)
		c.expires = c.token.Expires
	}
	return c
}

// access is the permission of a request, or of the messages of a stream, and what is needed to check it again. One goroutine
// at a time uses it.
type access struct {
	gate   *gate
	conn   *connection
	header string // "authorization" of the request's metadata

	row       *rpcRow
	request   any
	table     uint64 // number of the one with which it was checked; 0: users were not checked
	caller    *caller
	footprint footprint
	invoked   *invocations // in place of those of the request, once their messages are dropped; nil: they are not
	claims    claims       // in builds with assertions

	note *auditNote // of the audit log, for what handlers serve
}

// check is nil if the caller may do what a request asks for. Otherwise the request must not be executed.
func (a *access) check(row *rpcRow, request any) error {
	a.row, a.request, a.invoked = row, request, nil
	if invariants.Enabled {
		a.claim(row, request)
	}
	t := a.gate.table.Load()
	if a.table = numberOf(t); t == nil {
		a.caller = nil
		return nil
	}
	return a.compare(t)
}

// again checks the request again if the users have changed since, or the token has expired.
func (a *access) again() error {
	t := a.gate.table.Load()
	if numberOf(t) == a.table && (t == nil || !a.caller.expired()) {
		return nil
	}
	if a.table = numberOf(t); t == nil {
		return nil
	}
	return a.compare(t)
}

// checkAgain is again for a request that has no access if users were not checked when it began.
func (g *gate) checkAgain(a *access) error {
	if a != nil {
		return a.again()
	}
	if g.table.Load() != nil { // users are checked since a moment
		return auth.ErrUnauthenticated
	}
	return nil
}

// apart is the same access for another goroutine, which checks the request by itself.
func (a *access) apart() *access {
	return &access{gate: a.gate, conn: a.conn, header: a.header, row: a.row, request: a.request, invoked: a.invoked, table: a.table, caller: a.caller}
}

// admit is nil if the caller of a method is known, or need not be. It precedes the check of the request, which costs more.
func (g *gate) admit(conn *connection, path, header string) error {
	t := g.table.Load()
	if t == nil {
		return nil
	}
	switch row := rpcRows[path]; {
	case row == nil:
		return nil // the method is not known, or its request is refused
	case row.open:
		return nil
	}
	return g.callerOf(conn, header, t).err
}

func (a *access) identify(t *numberedTable) error {
	a.caller = a.gate.callerOf(a.conn, a.header, t)
	return a.caller.err
}

func (a *access) compare(t *numberedTable) error {
	if a.row == nil {
		return errNoRow
	}
	switch {
	case a.row.sender: // before its message is received; its handler checks the rest
		return a.identify(t)
	case a.row.open:
		a.caller = &openCaller
		return nil
	}
	if err := a.identify(t); err != nil {
		return err
	}
	return a.compareWith(a.row, a.request)
}

// compareWith compares what a request asks for with the rights of the caller, which is identified.
func (a *access) compareWith(row *rpcRow, request any) error {
	f := &a.footprint
	f.begin(a.caller.user)
	f.parts.Action(row.actions)
	if row.footprint != nil && request != nil {
		row.footprint(f, request)
	}
	if a.invoked != nil {
		f.invoked(a.invoked.ops)
	}
	return f.end()
}

// untilDenied is untilDrain for a request that may wait, or work, for hours. The context ends also when the caller may no longer do what the access
// of the request has permitted, and mended makes that the error of the work. Thousands of requests may wait: each has one goroutine for both.
func (s *Server) untilDenied(ctx context.Context) (_ context.Context, mended func(error) error, stop func()) {
	a := accessOf(ctx)
	if a == nil { // users were not checked when a unary request began
		ctx, cancel := s.untilDrain(ctx)
		return ctx, func(err error) error { return err }, cancel
	}
	ctx, cancel := context.WithCancelCause(ctx)
	ended, watched := make(chan struct{}), a.apart() // commits of the request use its own
	go func() {
		defer close(ended)
		if err := watched.untilDenied(ctx, s.drain.begun); err != nil {
			cancel(err)
		}
	}()
	mended = func(err error) error {
		if cause := context.Cause(ctx); err != nil && isDenial(cause) {
			return cause
		}
		return err
	}
	return ctx, mended, func() {
		cancel(nil)
		<-ended // it reads the request
	}
}

// untilDenied returns when the caller may no longer do what the access has permitted, with the reason; when the server begins to drain; or with
// nil when the context has ended.
func (a *access) untilDenied(ctx context.Context, drains <-chan struct{}) error {
	for {
		if err := a.again(); err != nil {
			return err
		}
		user, token := a.follow()
		expired, end := a.expiry()
		var err error
		select {
		case <-user:
		case <-token:
		case <-expired:
		case <-drains:
			err = errShuttingDown
		case <-ctx.Done():
			end()
			return nil
		}
		if end(); err != nil {
			return err
		}
	}
}

// follow returns channels, one of which is closed when the access, which was checked, must be checked again because of the users: the user of its
// caller has changed or is gone; its token is gone; users are checked, and were not. A change after the check is not missed: what has ended
// stays so.
func (a *access) follow() (user, token <-chan struct{}) {
	switch {
	case a.table == 0:
		return *a.gate.enabled.Load(), nil
	case a.caller.user == nil: // the method is open to all
		return nil, nil
	case a.caller.token != nil:
		token = a.caller.token.Ended.Done()
	}
	return a.caller.user.Ended.Done(), token
}

// expiry is a channel that tells when the token of the caller expires; nil if it does not.
func (a *access) expiry() (expired <-chan time.Time, stop func()) {
	at := a.expires()
	if at.IsZero() {
		return nil, func() {}
	}
	timer := time.NewTimer(time.Until(at))
	return timer.C, func() { timer.Stop() }
}

// expires is when the token of the caller does; zero: it does not, or users are not checked.
func (a *access) expires() time.Time {
	if a.table == 0 {
		return time.Time{}
	}
	return a.caller.expires
}

// openCaller sends requests that need no right. It never expires.
var openCaller caller

// errNoRow refuses a method that the table of rights does not have.
var errNoRow = &auth.DeniedError{Right: auth.RightAdmin, Action: auth.ActionsAll}

// user is the sender of the request; nil if users are not checked.
func (a *access) user() *auth.User {
	if a == nil || a.table == 0 || a.caller == nil {
		return nil
	}
	return a.caller.user
}

// userName is empty without a user.
func (a *access) userName() string {
	if u := a.user(); u != nil {
		return u.Name
	}
	return ""
}

// limiter has the limits of the user; nil is none.
func (a *access) limiter() *auth.Limiter {
	if u := a.user(); u != nil {
		return u.Limiter
	}
	return nil
}

// take counts a request of so many bytes among those of the user.
func (a *access) take(bytes int) error { return a.limiter().Request(bytes) }

// sent counts an answer among the bytes of the user.
func (a *access) sent(out interface{ SizeVT() int }) {
	if l := a.limiter(); l != nil {
		l.Sent(out.SizeVT())
	}
}

// mayRead reports whether the caller may read all keys of a range. While users are not checked, every caller may.
func (a *access) mayRead(lower, upper []byte) bool {
	u := a.user()
	if u == nil {
		return true
	}
	var f auth.Footprint
	f.Span(auth.RightRead, lower, upper)
	return u.Check(&f) == nil
}

// isAdministrator reports whether the caller may do everything. While users are not checked, every caller may.
func (a *access) isAdministrator() bool {
	u := a.user()
	return u == nil || u.Rights.Everything()
}

// conceal replaces a report of damage that may name keys of other users. The log and the answer to Verify have the whole report.
func (s *Server) conceal(err error) error {
	if s.gate.table.Load() == nil {
		return err
	}
	if damage, ok := errors.AsType[*storage.CorruptionError](err); ok {
		return &storage.CorruptionError{File: damage.File, Offset: damage.Offset, Reason: "a page that the request needs cannot be read", Remedy: damage.Remedy}
	}
	return err
}

// accessKey is the key of an access in a context.
type accessKey struct{}

// accessOf is the access of a request that a handler serves; nil if users were not checked when it began.
func accessOf(ctx context.Context) *access {
	a, _ := ctx.Value(accessKey{}).(*access)
	return a
}

// newAccess is an access for a request that a handler serves.
func (s *Server) newAccess(ctx context.Context) *access {
	return &access{gate: &s.gate, conn: connectionOf(ctx), header: authorizationOf(ctx)}
}

// authorizationOf is the header of a request that a handler serves. Several values are no credentials.
func authorizationOf(ctx context.Context) string {
	switch values := metadata.ValueFromIncomingContext(ctx, "authorization"); len(values) {
	case 0:
		return ""
	case 1:
		return values[0]
	}
	return "several"
}
