package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Every form of a request counts towards the limits of its user, and what is open is given back.
func TestLimitsOfAUserHoldForEveryForm(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		c, ctx := clientsOf(h.conn), as(testContext(t), "alice")
		get := &pb.GetRequest{Key: []byte("k")}
		limited := func(l auth.Limits) {
			started := time.Now()
			h.setUsers(only(grant("rw", "k")), func(table *auth.Table) {
				table.Users["alice"].Limiter = auth.NewLimiter(l, func() time.Duration { return time.Since(started) })
			})
		}
		forms := map[string]func() error{
			"unary": func() error { _, err := c.kv.Get(ctx, get); return err },
			"scan":  func() error { return scanned(&pb.ScanRequest{Range: prefixRange("k")})(ctx, c) },
			"pipeline": func() error {
				return inPipeline(&pb.PipelineRequest{Request: &pb.PipelineRequest_Get{Get: get}})(ctx, c)
			},
			"history": func() error { _, err := c.feed.History(ctx, &pb.HistoryRequest{Key: get.Key}); return err },
			"transaction": func() error {
				return transacted(&pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: get.Key}}})(ctx, c)
			},
			"watch": func() error { return watched(prefixRange("k"))(ctx, c) },
			"users": func() error {
				_, err := pb.NewAuthServiceClient(h.conn).ListTokens(ctx, &pb.ListTokensRequest{})
				if status.Code(err) == codes.Unauthenticated { // the users of the store are others
					return nil
				}
				return err
			},
		}
		transaction := forms["transaction"]
		for name, ask := range forms {
			limited(auth.Limits{Requests: 4})
			var err error
			for i := 0; i < 30 && err == nil; i++ {
				err = ask()
			}
			if status.Code(err) != codes.ResourceExhausted || failureOf(t, err).retry <= 0 {
				t.Errorf("%s: %v after 30 requests with 4 a second", name, err)
			}
		}
		delete(forms, "users") // its answers are not counted
		limited(auth.Limits{})
		if _, err := c.kv.Put(ctx, &pb.PutRequest{Key: get.Key, Value: make([]byte, 10<<10)}); err != nil {
			t.Error(err)
		}
		forms["get stream"] = func() error {
			stream, err := c.kv.GetStream(ctx, &pb.GetStreamRequest{Key: get.Key})
			for err == nil {
				_, err = stream.Recv()
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		forms["watch"] = func() error { // the changes of an open watch; the next request pays for them
			stream, err := c.feed.Watch(ctx)
			if err == nil {
				err = stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{prefixRange("k")}}}})
			}
			if err == nil {
				_, err = stream.Recv()
			}
			if err == nil {
				_, err = c.kv.Put(ctx, &pb.PutRequest{Key: get.Key, Value: make([]byte, 10<<10)})
			}
			if err == nil {
				_, err = stream.Recv()
			}
			if err == nil {
				_, err = c.kv.Delete(ctx, &pb.DeleteRequest{Key: []byte("k2")})
			}
			return err
		}
		for name, ask := range forms {
			limited(auth.Limits{BytesOut: 1 << 10})
			var err error
			for i := 0; i < 3 && err == nil; i++ {
				err = ask()
			}
			if status.Code(err) != codes.ResourceExhausted {
				t.Errorf("%s: %v after 30 KiB were sent with 1 KiB a second", name, err)
			}
		}
		limited(auth.Limits{Watches: 1, Transactions: 1})
		for range 5 { // one after the other
			if err := transaction(); err != nil {
				t.Errorf("a transaction after another: %v", err)
			}
		}
		begin := &pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}}
		open := func() error {
			stream, err := c.txn.Transact(ctx)
			if err == nil {
				err = stream.Send(begin)
			}
			if err != nil {
				return err
			}
			out, err := stream.Recv()
			if err == nil && out.GetError() != nil {
				err = status.ErrorProto(out.GetError())
			}
			return err
		}
		if err := open(); err != nil {
			t.Error(err)
		}
		if err := open(); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("two transactions at once: %v", err)
		}
		if err := watched(prefixRange("k"))(ctx, c); err != nil { // its stream stays open
			t.Error(err)
		}
		if err := watched(prefixRange("k"))(ctx, c); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("two watches at once: %v", err)
		}
	})
}

// Every stream counts among those that its user has open, until it ends, however it ends.
func TestOpenStreamsOfAUserAreLimited(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		c := clientsOf(h.conn)
		begins := map[string]func(context.Context) (grpc.ClientStream, error){
			"pipeline":    func(ctx context.Context) (grpc.ClientStream, error) { return c.kv.Pipeline(ctx) },
			"keep-alives": func(ctx context.Context) (grpc.ClientStream, error) { return c.lease.KeepAlive(ctx) },
			"transaction": func(ctx context.Context) (grpc.ClientStream, error) { return c.txn.Transact(ctx) },
			"watch":       func(ctx context.Context) (grpc.ClientStream, error) { return c.feed.Watch(ctx) },
		}
		limiter := auth.NewLimiter(auth.Limits{Streams: 2}, func() time.Duration { return 0 })
		h.setUsers(only(grant("rwl", "k")), func(table *auth.Table) { table.Users["alice"].Limiter = limiter })
		full := func() bool {
			err := limiter.Open(auth.Streams)
			if err == nil {
				limiter.Close(auth.Streams)
			}
			return err != nil
		}
		for name, begin := range begins {
			ctx, cancel := context.WithCancel(as(t.Context(), "alice")) // without a deadline, which would end the streams, too
			var open [2]grpc.ClientStream
			for i := range open {
				var err error
				if open[i], err = begin(ctx); err != nil {
					t.Fatal(name, err)
				}
			}
			eventually(t, name+": two streams are open", full)
			third, err := begin(ctx)
			if err == nil {
				err = third.RecvMsg(new(pb.PipelineResponse))
			}
			if status.Code(err) != codes.ResourceExhausted || failureOf(t, err).reason != "USER_LIMIT" {
				t.Errorf("%s: three streams at once: %v", name, err)
			}
			if err := open[0].CloseSend(); err != nil {
				t.Fatal(name, err)
			}
			eventually(t, name+": one stream is closed by its client", func() bool { return !full() })
			cancel()
			eventually(t, name+": the other one is cancelled", func() bool {
				if limiter.Open(auth.Streams) != nil {
					return false
				}
				defer limiter.Close(auth.Streams)
				return !full()
			})
		}
	})
}

func TestHTTPPathsNeedTheirRights(t *testing.T) {
	h := mustStartUnchecked(t, vfs.NewMem())
	ask := func(path string, set func(*http.Request)) int {
		r, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://"+h.HTTPAddress()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		set(r)
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = answer.Body.Close() }()
		return answer.StatusCode
	}
	nothing := func(*http.Request) {}
	bearer := func(token string) func(*http.Request) {
		return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
	}
	basic := func(user, password string) func(*http.Request) {
		return func(r *http.Request) { r.SetBasicAuth(user, password) }
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	if got := ask("/metrics", nothing); got != http.StatusOK {
		t.Errorf("while users are not checked: %d", got)
	}
	h.setUsers(map[string][]auth.Grant{"observer": {action(auth.ActionObserve)}, "debugger": {action(auth.ActionDebug)}})
	check, client := h.gate.password, "" // whose passwords wait to be checked
	h.gate.password = func(ctx context.Context, user, password string) (auth.Identity, error) {
		client = h.userOptions().Client(ctx)
		return check(ctx, user, password)
	}
	for _, row := range []struct {
		path string
		set  func(*http.Request)
		want int
	}{
		{"/healthz", nothing, 200},
		{"/readyz", nothing, 200},
		{"/metrics", nothing, 401},
		{"/metrics", bearer("wrong"), 401},
		{"/metrics", bearer("observer"), 200},
		{"/metrics", bearer("debugger"), 403},
		{"/metrics", basic("observer", "observer"), 200},
		{"/metrics", basic("debugger", "observer"), 401},
		{"/debug/pprof/cmdline", bearer("observer"), 403},
		{"/debug/pprof/cmdline", bearer("debugger"), 200},
		{"/debug/pprof/", nothing, 401},
	} {
		if got := ask(row.path, row.set); got != row.want {
			t.Errorf("%s: got %d, want %d", row.path, got, row.want)
		}
	}
	if client != "127.0.0.1/32" {
		t.Errorf("a password of the client %q was checked", client)
	}
}
