package server

import (
	"bytes"
	"context"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// claims are the keys that a request has named: its footprint, by the function of its row. Builds with the tag `invariants`
// compare them with every key that is touched for the request, whatever its caller may do and whether users are checked or not.
// So a footprint function that leaves a key out is found by every test that sends such a request.
//
//	request ─► footprint function ─┬► rights of the caller: refused, or not
//	   │                           └► claims ◄─ compared ─┐
//	   └► execution ─► session: reads, writes, compares ──┘
//
// The operations of a transaction are claimed together, until the next transaction begins: its commit writes them all.
type claims struct {
	grants []auth.Grant // what was named; nil: no request was checked
	rights *auth.Rights // the same, merged at the first touch
	made   bool

	unnamed func(*mvcc.Touch) // of tests: is told of what was not named, which is no failure then
}

// claim notes what a request names, in builds with assertions.
func (a *access) claim(row *rpcRow, request any) {
	c := &a.claims
	if !continuesTransaction(request) {
		c.grants = nil
	}
	c.rights, c.made = nil, true
	if row == nil || row.footprint == nil || request == nil {
		return
	}
	f := footprint{collect: func(right auth.Right, r auth.Range) {
		g := auth.Grant{
			Lower: bytes.Clone(r.Lower), Upper: bytes.Clone(r.Upper),
			Read: right == auth.RightRead, Write: right == auth.RightWrite, Lease: right == auth.RightLease,
		}
		if r.Single {
			g.Upper = append(append(g.Upper, r.Lower...), 0)
		}
		c.grants = append(c.grants, g)
	}}
	row.footprint(&f, request)
}

// continuesTransaction reports whether what was named before belongs to the transaction of the request, too.
func continuesTransaction(request any) bool {
	m, ok := request.(*pb.TransactRequest)
	return ok && m.GetBegin() == nil
}

// hasNamed reports whether the request of an access has named what is touched for it.
func (a *access) hasNamed(t *mvcc.Touch) bool {
	if a == nil || !a.claims.made {
		return true // a test, or the server itself, executes something without a request
	}
	c := &a.claims
	if c.rights == nil {
		c.rights = auth.Compile(c.grants)
	}
	right := auth.RightRead
	if t.Write {
		right = auth.RightWrite
	}
	var f auth.Footprint
	f.Add(right, auth.Range{Lower: t.Lower, Upper: t.Upper, Single: t.Single})
	named := c.rights.Check(&f) == nil
	if !named && c.unnamed != nil {
		c.unnamed(t)
		return true
	}
	return named
}

// assertNamed: the request reads the key. It is for keys that are shown without a session.
func (a *access) assertNamed(key []byte) {
	if !a.hasNamed(&mvcc.Touch{Lower: key, Single: true}) {
		invariants.Fail("a request is shown the key %q, which it has not named", key)
	}
}

// gates reports whether requests that handlers serve get an access, which checks and notes them.
func (s *Server) gates() bool {
	return s.gate.table.Load() != nil || s.observer.audit.log != nil || invariants.Enabled
}

// withAccess is a context with an access for what the handler executes, which commits check again.
func withAccess(ctx context.Context, a *access) context.Context {
	return mvcc.WithPermit(context.WithValue(ctx, accessKey{}, a), a.again)
}
