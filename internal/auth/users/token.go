package users

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"slices"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
)

// Tokens begin with a prefix, so that scanners of repositories recognise them. 32 random bytes follow, in base64 for URLs.
const (
	tokenPrefix     = "epochkv_"
	bootstrapPrefix = "epochkv_once_"
	secretBytes     = 32
)

func newSecret(prefix string) string {
	var secret [secretBytes]byte
	_, _ = rand.Read(secret[:]) // it never fails
	return prefix + base64.RawURLEncoding.EncodeToString(secret[:])
}

func hashToken(secret string) auth.TokenHash { return sha256.Sum256([]byte(secret)) }

// TokenID names a token in lists: it does not let anybody use it.
func TokenID(h auth.TokenHash) string { return hex.EncodeToString(h[:8]) }

// TokenInfo describes a token.
type TokenInfo struct {
	ID       string
	User     string
	Label    string
	Session  bool // a login has made it
	Created  time.Time
	Expires  time.Time // zero if it does not
	LastUsed time.Time // to the hour; zero if it was not used
}

// NewToken says what a token is for.
type NewToken struct {
	User    string
	Label   string
	Expires time.Time // zero: never
	// Maker is the token that a user makes it with, nil for an administrator and for a password. A token that expires, but that of
	// a login, makes none that outlives it.
	Maker *auth.TokenHash

	session bool
	hash    string // of the password that the login had, with session
}

// CreateToken makes a token, and returns it: it is not stored, and cannot be shown again.
func (m *Manager) CreateToken(ctx context.Context, n NewToken) (secret string, info TokenInfo, err error) {
	if err := checkLabel(n.Label); err != nil {
		return "", info, err
	}
	now := m.options.Now()
	if !n.Expires.IsZero() && !n.Expires.After(now) {
		return "", info, &InvalidError{Field: "expires", Text: "is in the past"}
	}
	secret = newSecret(tokenPrefix)
	h := hashToken(secret)
	k := &token{live: &auth.Token{User: n.User, Expires: n.Expires}, label: n.Label, session: n.session, created: now}
	err = m.change(ctx, func(d *draft) error {
		if n.session { // first: a user that is unknown since has the answer of one that was
			if err := d.stillHas(n.User, n.hash); err != nil {
				return err
			}
		}
		if d.next.users[n.User] == nil {
			return &NotFoundError{Kind: "user", Name: n.User}
		}
		if err := d.limitBy(n.Maker, k); err != nil {
			return err
		}
		if err := d.makeRoom(n.User, now); err != nil {
			return err
		}
		d.setToken(h, k)
		return nil
	})
	if err != nil {
		return "", info, err
	}
	return secret, k.info(h), nil
}

// limitBy refuses a token that would be valid for longer than the one that makes it. Without a time of its own it gets that one's.
func (d *draft) limitBy(maker *auth.TokenHash, k *token) error {
	if maker == nil {
		return nil
	}
	m := d.next.token(*maker)
	switch {
	case m == nil: // revoked since
		return auth.ErrUnauthenticated
	case m.session || m.live.Expires.IsZero():
	case k.live.Expires.IsZero():
		k.live.Expires = m.live.Expires
	case k.live.Expires.After(m.live.Expires):
		return &InvalidError{Field: "lifetime", Text: "is longer than that of the token that makes it; log in with a password for a longer one"}
	}
	return nil
}

// makeRoom refuses a token beyond the limits. The user's expired tokens do not count: they are removed. So are its oldest
// session tokens, so that logins cannot lock a user out.
func (d *draft) makeRoom(name string, now time.Time) error {
	d.removeTokens(name, func(k *token) bool { return k.expired(now) })
	var oldest auth.TokenHash
	var session *token
	count := 0
	for _, shard := range d.next.tokens {
		for h, k := range shard {
			if k.live.User != name {
				continue
			}
			count++
			if k.session && (session == nil || k.created.Before(session.created)) {
				oldest, session = h, k
			}
		}
	}
	switch {
	case count >= TokensPerUserMax && session != nil:
		d.setToken(oldest, nil)
	case count >= TokensPerUserMax:
		return &auth.LimitError{What: "tokens of a user", Limit: TokensPerUserMax}
	}
	if d.next.count >= TokensMax {
		return &auth.LimitError{What: "tokens of the store", Limit: TokensMax}
	}
	return nil
}

func (k *token) expired(now time.Time) bool {
	return !k.live.Expires.IsZero() && !now.Before(k.live.Expires)
}

func (k *token) info(h auth.TokenHash) TokenInfo {
	info := TokenInfo{ID: TokenID(h), User: k.live.User, Label: k.label, Session: k.session, Created: k.created, Expires: k.live.Expires}
	if used := k.live.LastUsed.Load(); used != 0 {
		info.LastUsed = time.Unix(used, 0)
	}
	return info
}

// Tokens lists the tokens of a user, or of all users for an empty name, the oldest first.
func (m *Manager) Tokens(ctx context.Context, user string) (all []TokenInfo, err error) {
	err = m.read(ctx, func(s *state) {
		for _, shard := range s.tokens {
			for h, k := range shard {
				if user == "" || k.live.User == user {
					all = append(all, k.info(h))
				}
			}
		}
	})
	slices.SortFunc(all, func(a, b TokenInfo) int {
		return cmp.Or(cmp.Compare(a.User, b.User), a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID))
	})
	return all, err
}

// RevokeToken removes a token by its id. With a user it must be one of its own.
func (m *Manager) RevokeToken(ctx context.Context, id, user string) error {
	return m.change(ctx, func(d *draft) error {
		for _, shard := range d.next.tokens {
			for h, k := range shard {
				if TokenID(h) == id && (user == "" || k.live.User == user) {
					d.setToken(h, nil)
					return nil
				}
			}
		}
		return &NotFoundError{Kind: "token", Name: id}
	})
}

// Logout removes the token of an identity.
func (m *Manager) Logout(ctx context.Context, id *auth.Identity) error {
	return m.RevokeToken(ctx, TokenID(id.Token), id.User)
}

// Bearer authenticates the value of a request's header "authorization". It neither waits nor reads the store. The error is
// auth.ErrUnauthenticated or auth.ErrTokenExpired.
func (m *Manager) Bearer(header string) (auth.Identity, error) {
	scheme, secret, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "bearer") || !strings.HasPrefix(secret, tokenPrefix) {
		return auth.Identity{}, auth.ErrUnauthenticated
	}
	h := hashToken(secret)
	t, now := m.Table(), m.options.Now()
	k := t.Token(h)
	if k == nil {
		return auth.Identity{}, auth.ErrUnauthenticated
	}
	id := auth.Identity{User: k.User, Method: auth.MethodToken, Token: h}
	if _, err := t.Verify(&id, now); err != nil {
		return auth.Identity{}, err
	}
	if seconds := now.Unix(); seconds-k.LastUsed.Load() >= int64(m.options.LastUsed/time.Second)/2 {
		k.LastUsed.Store(seconds)
	}
	return id, nil
}

// expiredKept is how long a token is kept after it has expired, so that its use is told from that of a wrong one.
const expiredKept = 24 * time.Hour

// maintain writes times of the last use, and removes tokens that have expired, every hour.
func (m *Manager) maintain(ctx context.Context) {
	ticker := time.NewTicker(m.options.LastUsed)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			_ = m.tidyTokens(ctx) // the next turn tries again
		}
	}
}

// tidyStep bounds what one commit changes.
const tidyStep = 1000

func (m *Manager) tidyTokens(ctx context.Context) error {
	if err := m.recordUses(ctx); err != nil {
		return err
	}
	if err := m.renew(ctx); err != nil {
		return err
	}
	now, expired := m.options.Now(), []auth.TokenHash(nil)
	err := m.read(ctx, func(s *state) {
		for _, shard := range s.tokens {
			for h, k := range shard {
				if k.expired(now.Add(-expiredKept)) && len(expired) < tidyStep {
					expired = append(expired, h)
				}
			}
		}
	})
	if err != nil || len(expired) == 0 {
		return err
	}
	return m.change(ctx, func(d *draft) error {
		for _, h := range expired {
			if d.next.token(h) != nil {
				d.setToken(h, nil)
			}
		}
		return nil
	})
}

// renew publishes the same table once more. Connections keep their caller as long as the table is the same: a token that one connection
// sends for weeks would have been used last when that began.
func (m *Manager) renew(ctx context.Context) error {
	if err := m.takeTurn(ctx); err != nil {
		return err
	}
	defer m.endTurn()
	same := *m.Table()
	m.publish(&same)
	return nil
}

// recordUses writes the times of the last use that have changed. It is no change of rights: the revision stays.
func (m *Manager) recordUses(ctx context.Context) error {
	if err := m.takeTurn(ctx); err != nil {
		return err
	}
	defer m.endTurn()
	d := &draft{m: m, next: m.state, shards: map[byte]bool{}}
	changed := 0
	for _, shard := range m.state.tokens {
		for h, k := range shard {
			used := k.live.LastUsed.Load()
			if used == 0 || !k.lastUsed.IsZero() && used == k.lastUsed.Unix() || changed == tidyStep {
				continue
			}
			changed++
			next := *k
			next.lastUsed = time.Unix(used, 0)
			d.next.count-- // setToken counts it again
			d.setToken(h, &next)
		}
	}
	if changed == 0 {
		return nil
	}
	if _, err := m.commit(ctx, &d.write); err != nil {
		return err
	}
	m.adopt(d.next)
	return nil
}
