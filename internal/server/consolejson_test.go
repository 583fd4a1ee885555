package server

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/console"
)

// TestCallsOfTheConsoleMakeJSONInTurn: with 20 browsers that scanned, JSON had two thirds of the processors, and a put took 50 ms. A call waits for
// its turn with the request in JSON, and with each message of the answer, no longer than its browser does, and what the server counts ends with it.
func TestCallsOfTheConsoleMakeJSONInTurn(t *testing.T) {
	h := mustStart(t)
	turns := &h.endpoints.console.turns
	ctx, leave := context.WithCancel(peer.NewContext(testContext(t), &peer.Peer{Addr: httpPeer(httptest.NewRequest(http.MethodPost, "/", nil))}))
	defer leave()
	for _, c := range []struct {
		name string
		do   func(call *inProcessCall, large any) error
	}{
		{"request", func(call *inProcessCall, _ any) error {
			return call.decode([]byte(`{"key":"a2V5"}`), new(pb.GetRequest))
		}},
		{"answer", func(call *inProcessCall, large any) error { _, err := call.marshal(large); return err }},
		{"message of a stream", func(call *inProcessCall, large any) error { return call.SendMsg(large) }},
	} {
		conn := new(connection)
		answer := &pb.GetResponse{Value: make([]byte, 1<<20)}
		charge, err := h.admission.charge(conn, answer.SizeVT(), false)
		if err != nil || charge == nil {
			t.Fatal(charge, err)
		}
		turns.turn <- struct{}{}
		begun, end := context.WithCancel(ctx)
		call := &inProcessCall{server: h.Server, ctx: begun, answer: new(pb.GetResponse)}
		done := make(chan error, 1)
		go func() { done <- c.do(call, charge.of(answer)) }()
		eventually(t, c.name+" waits", func() bool { return turns.waiting() == 1 || len(done) == 1 })
		if len(done) == 1 {
			t.Errorf("no turn for: %s: %v", c.name, <-done)
		} else if end(); <-done == nil {
			t.Errorf("%s: it waits for a browser that has gone", c.name)
		}
		if _, _, held := h.admission.inflight(); held != 0 && c.name != "request" {
			t.Errorf("%s: %d bytes are counted that were not sent", c.name, held)
		}
		charge.release()
		end()
		<-turns.turn
		call = &inProcessCall{server: h.Server, ctx: ctx, answer: new(pb.GetResponse)}
		if err := c.do(call, answer); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		call.held.release()
		if turns.waiting() != 0 || len(turns.turn) != 0 {
			t.Errorf("%s: the turn is kept", c.name)
		}
	}
}

// TestAChangeThatTheConsoleMadeIsAnswered: its answer waits for nothing that may be refused, and every answer to a change is so small.
func TestAChangeThatTheConsoleMadeIsAnswered(t *testing.T) {
	h := mustStart(t)
	ctx, end := context.WithCancel(peer.NewContext(testContext(t), &peer.Peer{Addr: httpPeer(httptest.NewRequest(http.MethodPost, "/", nil))}))
	end()
	h.endpoints.console.turns.turn <- struct{}{}
	unary := func(any, context.Context, func(any) error, grpc.UnaryServerInterceptor) (any, error) {
		return &pb.ReleaseLockResponse{Released: true}, nil
	}
	call := &inProcessCall{server: h.Server, ctx: ctx, answer: new(pb.ReleaseLockResponse)}
	if text, err := call.execute(inProcessMethod{unary: unary}); err != nil || !strings.Contains(string(text), "true") || call.held != nil {
		t.Errorf("%q, %v; counted %v", text, err, call.held != nil)
	}
	<-h.endpoints.console.turns.turn
	_, changes := console.Methods()
	for _, method := range changes {
		_, answer, err := messagesOf(method)
		if err != nil {
			t.Fatal(err)
		}
		fields := answer.ProtoReflect().Descriptor().Fields()
		for i := range fields.Len() {
			if f := fields.Get(i); f.Kind() != protoreflect.BoolKind || f.IsList() {
				t.Errorf("an answer of %s may be large: %s", method, f.Name())
			}
		}
	}
}

// TestCallsOfTheConsoleThatWaitHaveNoTurn: neither for a latch, nor for a browser.
func TestCallsOfTheConsoleThatWaitHaveNoTurn(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Console = config.ConsoleFull })
	others := func(what string) {
		ctx, stop := context.WithTimeout(testContext(t), patience/2)
		defer stop()
		if code := tryConsoleCall(ctx, h, "AdminService/ListTransactions", `{}`); code != http.StatusOK {
			t.Errorf("beside a call that waits for %s: %d", what, code)
		}
	}
	release, answered := h.callThatWaitsForALatch(t)
	others("a latch")
	release()
	if code := <-answered; code != http.StatusOK {
		t.Errorf("the call is answered with %d", code)
	}
	browser := slowBrowser{httptest.NewRecorder(), make(chan struct{}), make(chan struct{})}
	served := make(chan struct{})
	go func() {
		defer close(served)
		r := h.authorize(httptest.NewRequest(http.MethodPost, "http://127.0.0.1/console/api/call/epochkv.v1.KVService/Scan", strings.NewReader("{}")))
		r.Header.Set("X-Epochkv-Console", "1")
		h.endpoints.http.Handler.ServeHTTP(browser, r)
	}()
	<-browser.asked
	others("a browser")
	close(browser.released)
	<-served
}

// slowBrowser takes an answer when it is released.
type slowBrowser struct {
	http.ResponseWriter
	asked    chan struct{} // closed by the first write
	released chan struct{}
}

func (b slowBrowser) Write(p []byte) (int, error) {
	close(b.asked)
	<-b.released
	return len(p), nil
}
