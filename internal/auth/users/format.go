package users

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/keys"
)

// The records, little endian. A text has its length before it. docs/formats.md describes them.
//
//	settings   flags (1), 0 (3)                      flag 1: users are checked
//	user       flags (1), 0 (3), created (8), requests (4), streams (4), watches (4), transactions (4), bytes in (8),
//	           bytes out (8), password hash (text, 2), count of roles (2), roles (texts, 1)        flag 1: disabled
//	role       actions (4), count of ranges (2), ranges: rights (1), lower (text, 2), upper (text, 2)
//	token      flags (1), 0 (3), created (8), expires (8), last used (8), user (text, 1), label (the rest)
//	                                                 flag 1: of a login
//
// Times are milliseconds since 1970; zero is none.

const (
	flagEnabled  = 1
	flagDisabled = 1
	flagSession  = 1

	rangeRead, rangeWrite, rangeLease = 1, 2, 4

	settingsBytes = 4
)

var errMalformed = errors.New("malformed record")

// settingsKey is the key of the settings, without the keyspace, and the prefix of those of users.
var settingsKey = []byte{keys.SystemUser}

func userKey(name string) []byte { return append([]byte{keys.SystemUser}, name...) }
func roleKey(name string) []byte { return append([]byte{keys.SystemRole}, name...) }

func tokenKey(h auth.TokenHash) []byte { return append([]byte{keys.SystemToken}, h[:]...) }

func appendText16(dst []byte, text []byte) []byte {
	return append(binary.LittleEndian.AppendUint16(dst, uint16(len(text))), text...)
}

func appendText8(dst []byte, text string) []byte {
	return append(append(dst, byte(len(text))), text...)
}

func appendTime(dst []byte, t time.Time) []byte {
	if t.IsZero() {
		return binary.LittleEndian.AppendUint64(dst, 0)
	}
	return binary.LittleEndian.AppendUint64(dst, uint64(max(t.UnixMilli(), 1)))
}

func encodeSettings(enabled bool) []byte {
	v := make([]byte, settingsBytes)
	if enabled {
		v[0] = flagEnabled
	}
	return v
}

// decodeSettings reports whether users are checked. A record of another form is of a store that checks them.
func decodeSettings(value []byte) (enabled bool, err error) {
	r := reader{rest: value}
	flags := r.flags(flagEnabled)
	if err := r.end(); err != nil {
		return true, err
	}
	return flags&flagEnabled != 0, nil
}

func (u *User) encode() []byte {
	v := make([]byte, 4, 128)
	if u.Disabled {
		v[0] = flagDisabled
	}
	v = appendTime(v, u.Created)
	for _, n := range []uint32{u.Limits.Requests, u.Limits.Streams, u.Limits.Watches, u.Limits.Transactions} {
		v = binary.LittleEndian.AppendUint32(v, n)
	}
	v = binary.LittleEndian.AppendUint64(v, u.Limits.BytesIn)
	v = binary.LittleEndian.AppendUint64(v, u.Limits.BytesOut)
	v = appendText16(v, []byte(u.hash))
	v = binary.LittleEndian.AppendUint16(v, uint16(len(u.Roles)))
	for _, role := range u.Roles {
		v = appendText8(v, role)
	}
	return v
}

func decodeUser(value []byte) (*User, error) {
	r := reader{rest: value}
	u := &User{Disabled: r.flags(flagDisabled)&flagDisabled != 0, Created: r.time()}
	u.Limits = auth.Limits{Requests: r.u32(), Streams: r.u32(), Watches: r.u32(), Transactions: r.u32(), BytesIn: r.u64(), BytesOut: r.u64()}
	u.hash = string(r.take(int(r.u16())))
	for range r.u16() {
		u.Roles = append(u.Roles, string(r.take(int(r.u8()))))
		if r.failed {
			break
		}
	}
	return u, r.end()
}

func (x *Role) encode() []byte {
	v := binary.LittleEndian.AppendUint32(nil, uint32(x.Actions))
	v = binary.LittleEndian.AppendUint16(v, uint16(len(x.Grants)))
	for i := range x.Grants {
		g := &x.Grants[i]
		rights := byte(0)
		for _, one := range []struct {
			given bool
			bit   byte
		}{{g.Read, rangeRead}, {g.Write, rangeWrite}, {g.Lease, rangeLease}} {
			if one.given {
				rights |= one.bit
			}
		}
		v = appendText16(appendText16(append(v, rights), g.Lower), g.Upper)
	}
	return v
}

func decodeRole(value []byte) (*Role, error) {
	r := reader{rest: value}
	x := &Role{Actions: auth.Actions(r.u32())}
	for range r.u16() {
		rights := r.u8()
		g := auth.Grant{Read: rights&rangeRead != 0, Write: rights&rangeWrite != 0, Lease: rights&rangeLease != 0}
		g.Lower, g.Upper = r.take(int(r.u16())), r.take(int(r.u16()))
		if r.failed = r.failed || rights&^(rangeRead|rangeWrite|rangeLease) != 0; r.failed {
			break
		}
		x.Grants = append(x.Grants, g)
	}
	return x, r.end()
}

func (k *token) encode() []byte {
	v := make([]byte, 4, 64)
	if k.session {
		v[0] = flagSession
	}
	v = appendTime(appendTime(appendTime(v, k.created), k.live.Expires), k.lastUsed)
	return append(appendText8(v, k.live.User), k.label...)
}

func decodeToken(value []byte) (*token, error) {
	r := reader{rest: value}
	k := &token{live: new(auth.Token), session: r.flags(flagSession)&flagSession != 0, created: r.time()}
	k.live.Expires, k.lastUsed = r.time(), r.time()
	k.live.User = string(r.take(int(r.u8())))
	k.label = string(r.rest)
	r.rest = nil
	if !k.lastUsed.IsZero() {
		k.live.LastUsed.Store(k.lastUsed.Unix())
	}
	return k, r.end()
}

// reader takes fields from a record. After a field that is not there it has failed, and returns zeros.
type reader struct {
	rest   []byte
	failed bool
}

func (r *reader) take(n int) []byte {
	if r.failed = r.failed || n > len(r.rest); r.failed {
		return nil
	}
	taken := r.rest[:n:n]
	r.rest = r.rest[n:]
	return append([]byte(nil), taken...)
}

func (r *reader) number(bytes int) (n uint64) {
	for i, b := range r.take(bytes) {
		n |= uint64(b) << (8 * i)
	}
	return n
}

func (r *reader) u8() byte    { return byte(r.number(1)) }
func (r *reader) u16() uint16 { return uint16(r.number(2)) }
func (r *reader) u32() uint32 { return uint32(r.number(4)) }
func (r *reader) u64() uint64 { return r.number(8) }

// flags takes flags and the zeros after them. A flag that is not known means something that this program would not do.
func (r *reader) flags(known byte) byte {
	f := r.u32()
	r.failed = r.failed || f&^uint32(known) != 0
	return byte(f)
}

func (r *reader) time() time.Time {
	ms := r.u64()
	if r.failed = r.failed || ms > math.MaxInt64; ms == 0 || r.failed {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms))
}

func (r *reader) end() error {
	if r.failed || len(r.rest) > 0 {
		return errMalformed
	}
	return nil
}
