package auth

import (
	"hash/crc32"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// Method is how a client was authenticated.
type Method uint8

// Methods.
const (
	MethodNone        Method = iota // users are not checked
	MethodToken                     // a token, which a login may have made
	MethodCertificate               // the certificate of its connection
	MethodPassword                  // user and password
)

var methodNames = [...]string{MethodNone: "none", MethodToken: "token", MethodCertificate: "certificate", MethodPassword: "password"}

func (m Method) String() string { return methodNames[m] }

// TokenHash is the SHA-256 of a token: how it is stored.
type TokenHash [32]byte

// Identity is the user that sends a request, and how that is known. The zero Identity is a client that is not known. It can be compared.
type Identity struct {
	User   string
	Method Method
	Token  TokenHash // of MethodToken
}

// RequestIdentity distinguishes users in the records of requests. It is not 0. No two users of a store have the same.
func RequestIdentity(user string) uint32 { return max(crc32.Checksum([]byte(user), castagnoli), 1) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// User is a user of a table.
type User struct {
	Name     string
	Disabled bool
	Rights   *Rights
	Limiter  *Limiter // the same in all tables, as long as the user exists; nil without limits
	Ended    Ended
}

// Token is a token of a table.
type Token struct {
	User     string
	Expires  time.Time    // zero if it does not
	LastUsed atomic.Int64 // seconds since 1970, or zero
	Ended    Ended
}

// Table has the users of one auth revision.
type Table struct {
	Revision keys.Epoch
	Enabled  bool // otherwise every request is permitted
	Users    map[string]*User
	Tokens   [256]map[TokenHash]*Token // by the first byte: a change copies one of the maps
}

// Token is a token by its hash; nil if there is none.
func (t *Table) Token(h TokenHash) *Token { return t.Tokens[h[0]][h] }

// Verify is nil if the identity holds in this table: its user exists and is not disabled, and its token exists and has not
// expired. It is for requests that began with another table, and for streams.
func (t *Table) Verify(id *Identity, now time.Time) (*User, error) {
	u := t.Users[id.User]
	if u == nil || u.Disabled {
		return nil, ErrUnauthenticated
	}
	if id.Method == MethodToken {
		k := t.Token(id.Token)
		if k == nil || k.User != id.User {
			return nil, ErrUnauthenticated
		}
		if !k.Expires.IsZero() && !now.Before(k.Expires) {
			return nil, ErrTokenExpired
		}
	}
	return u, nil
}

// Authorize is nil if the user of an identity may do what a footprint says, or if users are not checked. Else it is
// ErrUnauthenticated, ErrTokenExpired or a *DeniedError.
func (t *Table) Authorize(id *Identity, now time.Time, f *Footprint) error {
	if !t.Enabled {
		return nil
	}
	u, err := t.Verify(id, now)
	if err != nil {
		return err
	}
	return u.Check(f)
}

// Check is Rights.Check, with the user in the error.
func (u *User) Check(f *Footprint) error {
	err := u.Rights.Check(f)
	if denied, ok := err.(*DeniedError); ok { //nolint:errorlint // Check wraps nothing
		denied.User = u.Name
	}
	return err
}
