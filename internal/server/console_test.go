package server

import (
	"encoding/base64"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
)

func consoleCall(t *testing.T, h *harness, method, message string, cookies ...string) (code int, body string) {
	t.Helper()
	r, err := http.NewRequestWithContext(testContext(t), http.MethodPost, "http://"+h.HTTPAddress()+"/console/api/call/epochkv.v1."+method, strings.NewReader(message))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Epochkv-Console", "1")
	if len(cookies) == 0 {
		h.authorize(r)
	}
	for _, token := range cookies {
		r.AddCookie(&http.Cookie{Name: "epochkv-console", Value: token})
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, strings.ReplaceAll(string(text), " ", "")
}

func TestTheConsoleCallsTheAPI(t *testing.T) {
	h := mustStart(t)
	h.put(t, "key", "value")
	large := strings.Repeat("x", 1<<20)
	h.put(t, "large", large)
	for _, c := range []struct {
		method, message string
		code            int
		want            string
	}{
		{"AdminService/Status", `{}`, http.StatusOK, `"state":"STATE_SERVING"`},
		{"AdminService/ListTransactions", `{}`, http.StatusOK, `"transactions":[]`},
		{"KVService/Get", `{"key":"a2V5"}`, http.StatusOK, `"value":"dmFsdWU="`},
		{"KVService/Get", `{"key":"bGFyZ2U="}`, http.StatusOK, `"found":true`}, // an answer that the server counts until it is sent
		{"KVService/Scan", `{"limit":"1","keysOnly":true}`, http.StatusOK, `{"messages":[{"entries":[{"key":"a2V5"`},
		{"KVService/Get", `{"key":""}`, http.StatusBadRequest, `"reason":"KEY_EMPTY"`},
		{"KVService/Get", `{"nothing":1}`, http.StatusBadRequest, `"code":"InvalidArgument"`},
		{"AdminService/EndTransaction", `{"id":"1"}`, http.StatusForbidden, `--console=full`},
		{"KVService/Put", `{"key":"a2V5"}`, http.StatusNotFound, `doesnotcall`},
	} {
		if code, body := consoleCall(t, h, c.method, c.message); code != c.code || !strings.Contains(body, c.want) {
			t.Errorf("%s %s: %d %.300s, want %d and %s", c.method, c.message, code, body, c.code, c.want)
		}
	}
	if n := h.connections.open.Load(); n != 1 {
		t.Errorf("%d connections are open, want 1, which is that of the test", n)
	}
	if got := h.observer.requests.Totals(consoleReads...); got.Count != 3 || got.Failed != 1 {
		t.Errorf("%d reads were counted, %d failed; want 3 and 1", got.Count, got.Failed)
	}
}

func TestAFullConsoleEndsTransactions(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Console = config.ConsoleFull })
	stream, err := pb.NewTransactionServiceClient(h.conn).Transact(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	list, err := h.admin.ListTransactions(testContext(t), &pb.ListTransactionsRequest{})
	if err != nil || len(list.Transactions) != 1 {
		t.Fatal(list, err)
	}
	if code, body := consoleCall(t, h, "AdminService/EndTransaction", `{"id":"999999"}`); code != http.StatusNotFound && code != http.StatusBadRequest {
		t.Errorf("a transaction that does not exist: %d %s", code, body)
	}
	code, body := consoleCall(t, h, "AdminService/EndTransaction", `{"id":"`+strconv.FormatUint(list.Transactions[0].Id, 10)+`"}`)
	if code != http.StatusOK {
		t.Fatalf("%d %s", code, body)
	}
	if _, err := stream.Recv(); err == nil {
		t.Error("the transaction goes on")
	}
}

func TestTheConsoleHasTheRightsOfItsUser(t *testing.T) {
	h := mustStart(t)
	h.put(t, "ann/key", "value")
	h.put(t, "bob/key", "canary")
	h.setUsers(map[string][]auth.Grant{"ann": {grant("r", "ann/")}, "operator": {{Actions: auth.ActionObserve}}})
	encode := func(key string) string { return base64.StdEncoding.EncodeToString([]byte(key)) }
	for _, c := range []struct {
		method, message string
		cookies         []string
		code            int
	}{
		{"KVService/Get", `{"key":"` + encode("ann/key") + `"}`, []string{"ann"}, http.StatusOK},
		{"KVService/Scan", `{"range":{"prefix":"` + encode("ann/") + `"}}`, []string{"ann"}, http.StatusOK},
		{"FeedService/History", `{"key":"` + encode("ann/key") + `"}`, []string{"ann"}, http.StatusOK},
		{"KVService/Get", `{"key":"` + encode("bob/key") + `"}`, []string{"ann"}, http.StatusForbidden},
		{"KVService/Scan", `{}`, []string{"ann"}, http.StatusForbidden},
		{"FeedService/History", `{"key":"` + encode("bob/key") + `"}`, []string{"ann"}, http.StatusForbidden},
		{"AdminService/Status", `{}`, []string{"ann"}, http.StatusForbidden},
		{"AdminService/Status", `{}`, []string{"operator"}, http.StatusOK},
		{"KVService/Scan", `{}`, []string{"operator"}, http.StatusForbidden},
		{"KVService/Scan", `{}`, []string{"nobody"}, http.StatusUnauthorized},
		{"KVService/Scan", `{}`, nil, http.StatusUnauthorized},
		{"AdminService/Status", `{}`, nil, http.StatusUnauthorized},
	} {
		code, body := consoleCall(t, h, c.method, c.message, c.cookies...)
		if code != c.code || strings.Contains(body, encode("canary")) {
			t.Errorf("%s %s of %v: %d %s, want %d", c.method, c.message, c.cookies, code, body, c.code)
		}
	}
}

func TestNoConsoleWhenItIsOff(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Console = config.ConsoleOff })
	if code, _ := httpGet(t, h, "/console/"); code != http.StatusNotFound {
		t.Errorf("/console/: %d", code)
	}
	if h.endpoints.console.samples != nil {
		t.Error("samples are taken for nothing")
	}
}
