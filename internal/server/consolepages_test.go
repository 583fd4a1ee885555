package server

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/console"
	"github.com/epochkv/epochkv/internal/vfs"
)

func withFullConsole(c *config.Config) { c.Console = config.ConsoleFull }

func base64Of(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

// mustCall calls a method through the console and decodes the answer.
func mustCall(t *testing.T, h *harness, out any, method, message string, cookies ...string) {
	t.Helper()
	code, body := consoleCall(t, h, method, message, cookies...)
	if code != http.StatusOK {
		t.Fatalf("%s %s: %d %s", method, message, code, body)
	}
	if err := json.Unmarshal([]byte(body), out); err != nil {
		t.Fatal(err)
	}
}

// TestEachMethodOfTheConsoleNeedsItsRight: no method answers a caller without a token, a user without rights gets what is open to every
// user only, and a user with all rights is not refused.
func TestEachMethodOfTheConsoleNeedsItsRight(t *testing.T) {
	h, client, ann, _ := startWithUsers(t, vfs.NewMem(), withFullConsole)
	must(t, errOf(client.CreateUser(with(t, ann), &pb.CreateUserRequest{Name: "carl", Password: "carl's secret"})))
	carl, err := client.Login(with(t, ann), &pb.LoginRequest{User: "carl", Password: "carl's secret"})
	must(t, err)
	annsToken, err := client.ListTokens(with(t, ann), &pb.ListTokensRequest{})
	must(t, err)
	must(t, errOf(client.Enable(with(t, ann), &pb.EnableRequest{})))

	messages := map[string]string{ // what names something; other methods take an empty message
		"KVService/Get": `{"key":"` + base64Of("a") + `"}`, "FeedService/History": `{"key":"` + base64Of("a") + `"}`,
		"LockService/GetLock": `{"name":"` + base64Of("a") + `"}`, "LockService/ReleaseLock": `{"name":"` + base64Of("a") + `","token":"1"}`,
		"LeaseService/GetLease": `{"id":"1"}`, "LeaseService/RevokeLease": `{"id":"1"}`,
		"AuthService/UpdateUser": `{"name":"bob","disabled":true}`, "AuthService/RevokeToken": `{"id":"` + annsToken.GetTokens()[0].GetId() + `"}`,
	}
	ofEveryUser := []string{"AuthService/WhoAmI", "AuthService/ListTokens"} // of the user itself
	unchanging, changing := console.Methods()
	if len(unchanging) < 20 || len(changing) < 8 {
		t.Fatal(unchanging, changing)
	}
	for _, method := range slices.Concat(unchanging, changing) {
		method = strings.TrimPrefix(method, "epochkv.v1.")
		message := messages[method]
		if message == "" {
			message = "{}"
		}
		if code, body := consoleCall(t, h, method, message, "no-such-token"); (code != http.StatusUnauthorized) && method != "AuthService/WhoAmI" {
			t.Errorf("%s of an unknown caller: %d %s", method, code, body)
		}
		code, body := consoleCall(t, h, method, message, carl.GetToken())
		switch {
		case slices.Contains(ofEveryUser, method):
			if code != http.StatusOK || strings.Contains(body, `"ann"`) || strings.Contains(body, `"bob"`) {
				t.Errorf("%s of a user without rights: %d %s", method, code, body)
			}
		case method == "AuthService/RevokeToken": // does not tell that a token of another user exists
			if code != http.StatusForbidden && code != http.StatusNotFound {
				t.Errorf("%s of a user without rights: %d %s", method, code, body)
			}
		case code != http.StatusForbidden:
			t.Errorf("%s of a user without rights: %d %s", method, code, body)
		}
		if method == "AuthService/RevokeToken" {
			continue // the token of the next calls
		}
		if code, body := consoleCall(t, h, method, message, ann); code == http.StatusUnauthorized || code == http.StatusForbidden {
			t.Errorf("%s of a user with all rights: %d %s", method, code, body)
		}
	}
}

// errOf is the error of a call of which the answer does not matter.
func errOf[T any](_ T, err error) error { return err }

// TestTheConsoleShowsAndEndsLeasesAndLocks: the list with owner and remaining time, the keys of a lease, the holder of a lock; each with
// the right that it needs.
func TestTheConsoleShowsAndEndsLeasesAndLocks(t *testing.T) {
	h := mustStart(t, withFullConsole)
	leases, ctx := pb.NewLeaseServiceClient(h.conn), testContext(t)
	mustGrantLease(t, leases, 7, time.Hour)
	mustGrantLease(t, leases, 8, time.Hour)
	must(t, errOf(h.kv.Put(ctx, &pb.PutRequest{Key: []byte("ann/key"), LeaseId: 7})))
	token := mustLock(t, h, "ann/lock", 7)
	h.setUsers(map[string][]auth.Grant{
		"ann": {grant("rwl", "ann/")}, "reader": {grant("r", "ann/")}, "bob": {grant("rwl", "bob/")}, "operator": {action(auth.ActionObserve)},
	})

	var list struct {
		Leases []struct{ ID, TTL, Remaining string }
	}
	mustCall(t, h, &list, "LeaseService/ListLeases", `{"limit":10}`, "operator")
	if len(list.Leases) != 2 || list.Leases[0].ID != "7" || list.Leases[0].TTL != "3600s" || !strings.HasPrefix(list.Leases[0].Remaining, "3") {
		t.Errorf("%+v", list)
	}
	lock := fmt.Sprintf(`{"name":"%s"}`, base64Of("ann/lock"))
	inside := fmt.Sprintf(`{"start":"%s","end":"%s"}`, base64Of("ann/"), base64Of("ann0"))
	release := fmt.Sprintf(`{"name":"%s","token":"%d"}`, base64Of("ann/lock"), token)
	holder := fmt.Sprintf(`"leaseId":"7","token":"%d"`, token)
	for _, c := range []struct {
		user, method, message string
		code                  int
		want                  string
	}{
		{"ann", "LeaseService/ListLeases", `{}`, http.StatusForbidden, ""},
		{"ann", "LeaseService/GetLease", `{"id":"7","keys":10}`, http.StatusOK, base64Of("ann/key")},
		{"bob", "LeaseService/GetLease", `{"id":"7","keys":10}`, http.StatusNotFound, ""},
		{"operator", "LeaseService/GetLease", `{"id":"7","keys":10}`, http.StatusForbidden, ""},
		{"ann", "LockService/GetLock", lock, http.StatusOK, holder},
		{"reader", "LockService/GetLock", lock, http.StatusOK, holder},
		{"bob", "LockService/GetLock", lock, http.StatusForbidden, ""},
		{"ann", "LockService/ListLocks", inside, http.StatusOK, holder},
		{"reader", "LockService/ListLocks", inside, http.StatusOK, `"waiters":0`},
		{"bob", "LockService/ListLocks", inside, http.StatusForbidden, ""},
		{"operator", "LockService/ListLocks", inside, http.StatusForbidden, ""},
		{"ann", "LockService/ListLocks", `{}`, http.StatusForbidden, ""},
		{"reader", "LockService/ReleaseLock", release, http.StatusForbidden, ""},
		{"bob", "LockService/ReleaseLock", release, http.StatusForbidden, ""},
		{"ann", "LockService/ReleaseLock", release, http.StatusOK, `"released":true`},
		{"ann", "LockService/GetLock", lock, http.StatusOK, `"leaseId":"0"`},
		{"operator", "LeaseService/RevokeLease", `{"id":"7"}`, http.StatusForbidden, ""},
		{"bob", "LeaseService/RevokeLease", `{"id":"7"}`, http.StatusNotFound, ""},
		{"ann", "KVService/Get", `{"key":"` + base64Of("ann/key") + `"}`, http.StatusOK, `"found":true`},
		{"ann", "LeaseService/RevokeLease", `{"id":"7"}`, http.StatusOK, ""},
		{"ann", "KVService/Get", `{"key":"` + base64Of("ann/key") + `"}`, http.StatusOK, `"found":false`},
	} {
		if code, body := consoleCall(t, h, c.method, c.message, c.user); code != c.code || !strings.Contains(body, c.want) {
			t.Errorf("%s %s of %s: %d %s, want %d and %s", c.method, c.message, c.user, code, body, c.code, c.want)
		}
	}
}

// TestAReadOnlyConsoleChangesNothing, also for a user with all rights.
func TestAReadOnlyConsoleChangesNothing(t *testing.T) {
	h, client, ann, bob := startWithUsers(t, vfs.NewMem())
	must(t, errOf(client.Enable(with(t, ann), &pb.EnableRequest{})))
	_, changing := console.Methods()
	for _, method := range changing {
		method = strings.TrimPrefix(method, "epochkv.v1.")
		if code, body := consoleCall(t, h, method, `{}`, ann); code != http.StatusForbidden || !strings.Contains(body, "--console=full") {
			t.Errorf("%s: %d %s", method, code, body)
		}
	}
	var who struct{ User string }
	if mustCall(t, h, &who, "AuthService/WhoAmI", `{}`, bob); who.User != "bob" {
		t.Errorf("%+v", who)
	}
}

// TestTheConsoleShowsUsersRolesAndTokens: with the action users all of them, without it the tokens of the caller; never a secret.
func TestTheConsoleShowsUsersRolesAndTokens(t *testing.T) {
	h, client, ann, bob := startWithUsers(t, vfs.NewMem(), withFullConsole)
	// Also while users are not checked, they are shown to callers that are known only.
	if code, body := consoleCall(t, h, "AuthService/ListUsers", `{}`); code != http.StatusUnauthorized {
		t.Errorf("without a token, users not checked: %d %s", code, body)
	}
	must(t, errOf(client.Enable(with(t, ann), &pb.EnableRequest{})))
	var users struct {
		Users []struct {
			Name     string
			Roles    []string
			Disabled bool
		}
	}
	mustCall(t, h, &users, "AuthService/ListUsers", `{}`, ann)
	if len(users.Users) != 2 || users.Users[1].Name != "bob" || !slices.Equal(users.Users[1].Roles, []string{"reader"}) {
		t.Errorf("%+v", users)
	}
	type role struct {
		Name   string
		Grants []struct {
			Start, End  string
			Read, Write bool
		}
	}
	var roles struct{ Roles []role }
	mustCall(t, h, &roles, "AuthService/ListRoles", `{}`, ann)
	if i := slices.IndexFunc(roles.Roles, func(r role) bool { return r.Name == "reader" }); i < 0 || len(roles.Roles[i].Grants) != 1 ||
		roles.Roles[i].Grants[0].Start != base64Of("a") || !roles.Roles[i].Grants[0].Read || roles.Roles[i].Grants[0].Write {
		t.Errorf("%+v", roles)
	}
	var tokens struct {
		Tokens []struct{ ID, User, Expires string }
	}
	mustCall(t, h, &tokens, "AuthService/ListTokens", `{"all":true}`, ann)
	if len(tokens.Tokens) != 2 || tokens.Tokens[1].User != "bob" || tokens.Tokens[1].Expires == "" {
		t.Fatalf("%+v", tokens)
	}
	if _, body := consoleCall(t, h, "AuthService/ListTokens", `{"all":true}`, ann); strings.Contains(body, ann) || strings.Contains(body, bob) {
		t.Error("a secret is shown")
	}
	if code, body := consoleCall(t, h, "AuthService/ListTokens", `{"all":true}`, bob); code != http.StatusForbidden {
		t.Errorf("all tokens for a user without the action users: %d %s", code, body)
	}
	mustCall(t, h, new(struct{}), "AuthService/UpdateUser", `{"name":"bob","disabled":true}`, ann)
	if code, body := consoleCall(t, h, "AuthService/ListTokens", `{}`, bob); code != http.StatusUnauthorized {
		t.Errorf("a disabled user: %d %s", code, body)
	}
	mustCall(t, h, new(struct{}), "AuthService/UpdateUser", `{"name":"bob","disabled":false}`, ann)
	mustCall(t, h, new(struct{}), "AuthService/ListTokens", `{}`, bob)
	mustCall(t, h, new(struct{}), "AuthService/RevokeToken", `{"id":"`+tokens.Tokens[1].ID+`"}`, ann)
	if code, body := consoleCall(t, h, "AuthService/ListTokens", `{}`, bob); code != http.StatusUnauthorized {
		t.Errorf("a revoked token: %d %s", code, body)
	}
}

// TestTheConsoleShowsTheLogArchive: to callers that may observe the server.
func TestTheConsoleShowsTheLogArchive(t *testing.T) {
	dir := t.TempDir()
	h := mustStart(t, func(c *config.Config) { c.Archive.URL, c.Archive.Interval = dir, 100*time.Millisecond })
	put, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("a"), Value: []byte("b")})
	must(t, err)
	awaitArchive(t, h, func(s *pb.ArchiveStatusResponse) bool { return s.GetArchivedEpoch() >= put.GetEpoch() })
	h.setUsers(map[string][]auth.Grant{"ann": {grant("rwl", "")}, "operator": {action(auth.ActionObserve)}})
	var status struct {
		Enabled                     bool
		Target, Lag, Error, Lineage string
		Intervals                   []struct{ FirstEpoch, LastEpoch string }
	}
	mustCall(t, h, &status, "AdminService/ArchiveStatus", `{}`, "operator")
	if !status.Enabled || !strings.Contains(status.Target, dir) || status.Lag == "" || status.Lineage == "" || status.Error != "" || len(status.Intervals) != 1 {
		t.Errorf("%+v", status)
	}
	if code, body := consoleCall(t, h, "AdminService/ArchiveStatus", `{}`, "ann"); code != http.StatusForbidden {
		t.Errorf("a user that may not observe: %d %s", code, body)
	}
}

func TestTheConsoleTellsTheTraceOfASlowRequest(t *testing.T) {
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	h := mustStart(t, withSlow)
	h.slowSyncs(3 * slowThreshold)
	ctx := metadata.AppendToOutgoingContext(testContext(t), "traceparent", "00-"+trace+"-00f067aa0ba902b7-00")
	must(t, errOf(h.kv.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte("b")})))
	h.slow(t, "Put") // it is reported after its answer
	var slow struct {
		Requests []struct{ Method, TraceID string }
	}
	mustCall(t, h, &slow, "AdminService/SlowRequests", `{"limit":100}`)
	if !slices.Contains(slow.Requests, struct{ Method, TraceID string }{"Put", trace}) {
		t.Errorf("%+v", slow)
	}
}
