package server

import (
	"crypto/sha256"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
)

// TestRequestsThatLastEndWithWhateverTakesTheirRightAway, whether users were checked when they began or not. Changes that take nothing away from
// them, of which others can make as many as they like, do not wake them.
func TestRequestsThatLastEndWithWhateverTakesTheirRightAway(t *testing.T) {
	user := func(disabled bool, prefix string) func(*auth.Table) {
		u := &auth.User{Name: "alice", Disabled: disabled, Rights: auth.Compile([]auth.Grant{grant("rwl", prefix)})}
		return func(t *auth.Table) { t.Users["alice"] = u }
	}
	withoutToken := func(t *auth.Table) { h := hashOf("alice"); delete(t.Tokens[h[0]], h) }
	rows := map[string]struct {
		change func(*auth.Table)
		code   codes.Code
	}{
		"a role":     {user(false, "x"), codes.PermissionDenied},
		"disabled":   {user(true, "l"), codes.Unauthenticated},
		"deleted":    {func(t *auth.Table) { delete(t.Users, "alice"); withoutToken(t) }, codes.Unauthenticated},
		"logged out": {withoutToken, codes.Unauthenticated},
		"expired":    {func(t *auth.Table) { addToken(t, "alice", time.Now().Add(-time.Second)) }, codes.Unauthenticated},
	}
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		count := compared(t, rpcRows[pb.LockService_ObserveLock_FullMethodName])
		h := mustStart(t, with)
		c := clientsOf(h.conn)
		for name, row := range rows {
			for _, began := range []string{"checked", "not checked", "checked, then not for a while"} {
				table := h.setUsers(only(grant("rwl", "l")))
				if began == "not checked" {
					h.gate.publish(nil)
				}
				stream, err := c.lock.ObserveLock(as(testContext(t), "alice"), &pb.ObserveLockRequest{Name: []byte("lock")})
				if err == nil {
					_, err = stream.Recv()
				}
				must(t, err)
				before := count.Load()
				if began != "checked" {
					h.gate.publish(nil)
					h.gate.publish(table)
				}
				for i := range 20 {
					table = nextTable(table, func(t *auth.Table) {
						addToken(t, "eve", time.Now().Add(time.Duration(i)*time.Hour))
						t.Users["eve"] = &auth.User{Name: "eve", Rights: auth.Compile(nil)}
					})
					h.gate.publish(table)
					_, err := c.kv.Get(as(testContext(t), "root"), &pb.GetRequest{Key: []byte("k")}) // others can run meanwhile
					must(t, err)
				}
				if got, most := count.Load()-before, int64(4); got > most { // before it follows; and when users are checked again
					t.Errorf("%s, %s: it was compared %d times", name, began, got)
				}
				table = nextTable(table, row.change)
				h.gate.publish(table)
				if _, err := stream.Recv(); status.Code(err) != row.code {
					t.Errorf("%s, %s: %v", name, began, err)
				}
			}
		}
	})
}

func hashOf(token string) auth.TokenHash { return sha256.Sum256([]byte(token)) }
