package server

import (
	"context"
	"crypto/sha256"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
)

// The tests of rights publish tables of users themselves, in which the token of a user is its name.

var tableRevisions atomic.Uint64

// makeTable makes a table from the grants of users.
func makeTable(users map[string][]auth.Grant) *auth.Table {
	t := &auth.Table{Revision: keys.Epoch(tableRevisions.Add(1)), Enabled: true, Users: map[string]*auth.User{}}
	for name, grants := range users {
		t.Users[name] = &auth.User{Name: name, Rights: auth.Compile(grants)}
		addToken(t, name, time.Time{})
	}
	return t
}

func addToken(t *auth.Table, user string, expires time.Time) {
	hash := auth.TokenHash(sha256.Sum256([]byte(user)))
	if t.Tokens[hash[0]] == nil {
		t.Tokens[hash[0]] = map[auth.TokenHash]*auth.Token{}
	}
	t.Tokens[hash[0]][hash] = &auth.Token{User: user, Expires: expires}
}

// bearerOfTests authenticates the tokens of makeTable, whether the table has them or not.
func bearerOfTests(header string) (auth.Identity, error) {
	name, ok := strings.CutPrefix(header, "Bearer ")
	if !ok {
		return auth.Identity{}, auth.ErrUnauthenticated
	}
	return auth.Identity{User: name, Method: auth.MethodToken, Token: sha256.Sum256([]byte(name))}, nil
}

// setUsers makes a server check users. The user root may do everything.
// The others change the table before requests, also those under way, can see it.
func (h *harness) setUsers(users map[string][]auth.Grant, change ...func(*auth.Table)) *auth.Table {
	users["root"] = []auth.Grant{{Read: true, Write: true, Lease: true, Actions: auth.ActionsAll}}
	t := makeTable(users)
	for _, f := range change {
		f(t)
	}
	h.bearerOnce.Do(func() { h.gate.bearer = bearerOfTests }) // before any request reads it
	h.gate.publish(t)
	return t
}

// grant is the right to the keys with a prefix: r, w and l. Without a prefix it is the right to all keys.
func grant(rights, prefix string) auth.Grant {
	g := auth.Grant{Lower: []byte(prefix), Read: strings.Contains(rights, "r"), Write: strings.Contains(rights, "w"), Lease: strings.Contains(rights, "l")}
	if prefix != "" {
		g.Upper, _ = keys.Successor(nil, []byte(prefix))
	}
	return g
}

func action(a auth.Actions) auth.Grant {
	return auth.Grant{Lower: []byte("-"), Upper: []byte("-"), Actions: a}
}

// as is a context of requests of a user.
func as(ctx context.Context, user string) context.Context {
	return metadata.NewOutgoingContext(ctx, metadata.Pairs("authorization", "Bearer "+user))
}

func denied(err error) bool { return status.Code(err) == codes.PermissionDenied }

// onBothTransports runs a test with a server on each transport.
func onBothTransports(t *testing.T, test func(t *testing.T, h *harness), adjust ...func(*config.Config)) {
	for _, kind := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(kind), func(t *testing.T) {
			test(t, mustStart(t, append(adjust, func(c *config.Config) { c.Transport = kind })...))
		})
	}
}

// TestPasswordsAndWatchesOfANetworkAreThoseOfOneClient: a host with IPv6 has 2^64 addresses.
func TestPasswordsAndWatchesOfANetworkAreThoseOfOneClient(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.1:4000": "192.0.2.1/32", "[2001:db8:1:2:3::4]:4000": "2001:db8:1:2::/64", "[2001:db8:1:2:ffff::]:1": "2001:db8:1:2::/64",
		"[::ffff:192.0.2.1]:4000": "192.0.2.1/32", "[fe80::1%eth0]:4000": "fe80::/64",
	} {
		ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address))})
		if got := networkOf(ctx); got != want {
			t.Errorf("%s is of %q, want %q", address, got, want)
		}
	}
}
