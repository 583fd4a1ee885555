package server

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/tracing"
	"github.com/epochkv/epochkv/internal/config"
	receiver "github.com/epochkv/epochkv/internal/tracing/tracetest"
)

const syncDelay = 20 * time.Millisecond

// What spans must not have.
const secretKey, secretValue = "a-key-that-is-secret", "a-value-that-is-secret"

func withTraces(r *receiver.Receiver, ratio float64) func(*config.Config) {
	return func(c *config.Config) {
		c.Traces.Endpoint, c.Traces.Ratio = r.GRPC, ratio
		if c.Transport == config.TransportGRPC {
			c.Traces.Endpoint = r.HTTP // each once
		}
	}
}

func onTransport(name config.Transport) func(*config.Config) {
	return func(c *config.Config) { c.Transport = name }
}

var bothTransports = []config.Transport{config.TransportDirect, config.TransportGRPC}

func clientOptions() (all []client.Option) {
	if *usersFlag {
		all = append(all, client.WithToken(testUser))
	}
	return all
}

// tracingClient is a client whose spans are kept, and the span that its calls are under.
func (h *harness) tracingClient(t *testing.T) (c *client.Client, under context.Context, spans *tracetest.InMemoryExporter) {
	t.Helper()
	spans = tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	c, err := client.Dial(h.Address(), append(clientOptions(), tracing.With(provider))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	under, _ = provider.Tracer("test").Start(testContext(t), "application")
	return c, under, spans
}

// TestTraceReachesFromTheClientToTheSync: whatever way a write comes, each span is under the one that has caused it, on both transports.
func TestTraceReachesFromTheClientToTheSync(t *testing.T) {
	for _, transport := range bothTransports {
		t.Run(string(transport), func(t *testing.T) {
			r := receiver.NewReceiver(t)
			h := mustStart(t, onTransport(transport), withTraces(r, 0))
			h.slowSyncs(syncDelay)
			c, ctx, clients := h.tracingClient(t)
			writeEveryWay(ctx, t, c)
			application := trace.SpanContextFromContext(ctx)
			if err := h.stop(); err != nil { // which sends what is left
				t.Fatal(err)
			}
			all := r.Spans()
			const kv, txn = "epochkv.v1.KVService/", "epochkv.v1.TransactionService/"
			for _, path := range []string{
				kv + "Put commit sync", kv + "Delete commit sync", kv + "BatchWrite commit sync", kv + "DeleteRange commit sync", kv + "Invoke commit sync",
				kv + "BulkLoad commit sync",
				kv + "Pipeline " + kv + "Put commit sync",
				kv + "Pipeline " + kv + "Get",
				txn + "Execute commit sync",
				txn + "Transact " + txn + "Transact.Commit commit sync",
				txn + "Transact " + txn + "Transact.Begin",
				txn + "Transact " + txn + "Transact.Get",
				kv + "Get", kv + "Scan",
			} {
				mustHavePath(t, all, clients, application, strings.Fields(path))
			}
			for _, s := range all {
				if put := s.Name == "epochkv.v1.KVService/Put"; put && receiver.Under(all, receiver.Under(all, s, "commit"), "sync").Took() < syncDelay {
					t.Errorf("the sync of a put took less than %v", syncDelay)
				}
				if s.EndTimeUnixNano < s.StartTimeUnixNano {
					t.Errorf("%s ends before it begins", s.Name)
				}
				text, err := proto.Marshal(s.Span)
				if err != nil || bytes.Contains(text, []byte("secret")) {
					t.Errorf("%v: %q", err, text)
				}
			}
			if t.Failed() {
				t.Log(receiver.Tree(all))
			}
			for _, s := range clients.GetSpans() {
				if text := fmt.Sprint(s); strings.Contains(text, "secret") {
					t.Error(text)
				}
			}
		})
	}
}

// writeEveryWay sends requests of every kind.
func writeEveryWay(ctx context.Context, t *testing.T, c *client.Client) {
	t.Helper()
	key, value := []byte(secretKey), []byte(secretValue)
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.Put(ctx, key, value))
	must(c.Get(ctx, key))
	must(c.Increment(ctx, []byte("n"), 1))
	must(c.Execute(ctx, client.When().Then(client.OpPut(key, value))))
	var b client.Batch
	b.Put(key, value)
	must(c.Write(ctx, &b))
	must(c.Delete(ctx, key))
	must(nil, c.Update(ctx, func(tx *client.Txn) error {
		if _, err := tx.Get(key); err != nil {
			return err
		}
		return tx.Put(key, value)
	}))
	for _, err := range c.Scan(ctx, client.Range{}, client.ScanOptions{}) {
		must(nil, err)
	}
	must(c.DeleteRange(ctx, client.Range{}, 0))
	p, err := c.Pipeline(ctx, client.PipelineOptions{})
	must(nil, err)
	must(nil, p.Put(key, value, nil))
	must(nil, p.Get(key, nil))
	must(nil, p.Close())
	load, err := c.BulkLoad(ctx)
	must(nil, err)
	must(nil, load.Put(key, value))
	must(load.Commit())
}

// mustHavePath fails unless there are spans of these names, each under the one before, and the first one under the client's span of the
// same name, which is under the application's.
func mustHavePath(t *testing.T, all []*receiver.Span, clients *tracetest.InMemoryExporter, application trace.SpanContext, path []string) {
	t.Helper()
	for _, s := range all {
		if s.Name != path[0] || !isUnderClient(s, clients, application) {
			continue
		}
		for _, name := range path[1:] {
			s = receiver.Under(all, s, name)
		}
		if s != nil {
			return
		}
	}
	t.Errorf("no path %v", path)
}

func isUnderClient(s *receiver.Span, clients *tracetest.InMemoryExporter, application trace.SpanContext) bool {
	for _, c := range clients.GetSpans() {
		if c.SpanContext.SpanID().String() == s.Parent() && c.SpanContext.TraceID().String() == s.Trace() {
			return c.Name == s.Name && c.SpanKind == trace.SpanKindClient && c.Parent.SpanID() == application.SpanID() && c.SpanContext.TraceID() == application.TraceID()
		}
	}
	return false
}

// TestRequestsWithoutAParentAreTracedByTheRatio: all or none, and the requests of a pipeline each for itself, but those of a transaction
// together.
func TestRequestsWithoutAParentAreTracedByTheRatio(t *testing.T) {
	for _, transport := range bothTransports {
		r := receiver.NewReceiver(t)
		h := mustStart(t, onTransport(transport), withTraces(r, 1))
		plain, err := client.Dial(h.Address(), clientOptions()...)
		if err != nil {
			t.Fatal(err)
		}
		writeEveryWay(testContext(t), t, plain)
		_ = plain.Close()
		none := mustStart(t, onTransport(transport), withTraces(r, 0))
		none.put(t, "key", "value")
		unsampled := metadata.AppendToOutgoingContext(testContext(t), "traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")
		if _, err := h.kv.Get(unsampled, &pb.GetRequest{Key: []byte("key")}); err != nil {
			t.Fatal(err)
		}
		if err := h.stop(); err != nil {
			t.Fatal(err)
		}
		if err := none.stop(); err != nil {
			t.Fatal(err)
		}
		roots, traces := 0, map[string]int{}
		all := r.Spans()
		for _, s := range all {
			traces[s.Trace()]++
			if s.Parent() == "" {
				roots++
			}
			if strings.Contains(s.Name, "Transact.") && s.Parent() == "" {
				t.Errorf("%s is a root", s.Name)
			}
		}
		if traces["4bf92f3577b34da6a3ce929d0e0e4736"] != 0 {
			t.Error("a request is traced although its client does not trace it")
		}
		if piped := receiver.Named(all, "epochkv.v1.KVService/Pipeline"); roots != len(traces) || roots < 12 || piped == nil || traces[piped.Trace()] != 1 {
			t.Errorf("%s: %d roots of %d traces\n%s", transport, roots, len(traces), receiver.Tree(all))
		}
	}
}

// TestReceiverOfTracesDelaysNoRequest: it is dead, silent or refuses.
func TestReceiverOfTracesDelaysNoRequest(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = dead.Close()
	silent, refusing := receiver.NewReceiver(t), receiver.NewReceiver(t)
	silent.Answer(receiver.Silent)
	refusing.Answer(receiver.Refusing)
	for name, endpoint := range map[string]string{"dead": "grpc://" + dead.Addr().String(), "silent": silent.GRPC, "refusing": refusing.HTTP} {
		t.Run(name, func(t *testing.T) {
			h, untraced := mustStart(t, func(c *config.Config) { c.Traces.Endpoint, c.Traces.Ratio = endpoint, 1 }), mustStart(t)
			slow, alsoSlow := 0, 0 // that of a server without traces, which tells how busy the machine is
			for range 1000 {
				if took(func() { h.get(t, "key") }) > time.Second {
					slow++
				}
				if took(func() { untraced.get(t, "key") }) > time.Second {
					alsoSlow++
				}
			}
			if slow > 5+3*alsoSlow {
				t.Errorf("%d gets took longer than a second, %d without traces", slow, alsoSlow)
			}
			end := func(h *harness) time.Duration {
				return took(func() {
					if err := h.stop(); err != nil {
						t.Error(err)
					}
				})
			}
			if traced, other := end(h), end(untraced); traced > traceFlushTimeout+5*time.Second+5*other {
				t.Errorf("the end took %v, without traces %v", traced, other)
			}
			if s := h.stats().Traces; s.Sent != 0 || s.Dropped+s.Failed < 1000 || s.Queued != 0 {
				t.Errorf("%+v", s)
			}
			if text := h.log.String(); !strings.Contains(text, "could not be sent and are lost") {
				t.Errorf("the log: %s", text)
			}
		})
	}
}

func took(do func()) time.Duration {
	start := time.Now()
	do()
	return time.Since(start)
}

// TestSlowRequestsNameTheirTrace: that of the client, also if the server traces nothing, and else the one that the server has begun.
func TestSlowRequestsNameTheirTrace(t *testing.T) {
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	for _, transport := range bothTransports {
		h := mustStart(t, onTransport(transport), withSlow)
		h.slowSyncs(3 * slowThreshold)
		ctx := metadata.AppendToOutgoingContext(testContext(t), "traceparent", "00-"+id+"-00f067aa0ba902b7-00")
		if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k")}); err != nil {
			t.Fatal(err)
		}
		pipe := h.pipeline(t, ctx)
		if err := pipe.Send(&pb.PipelineRequest{Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: []byte("k")}}}); err != nil {
			t.Fatal(err)
		}
		if _, err := pipe.Recv(); err != nil {
			t.Fatal(err)
		}
		if _, err := h.kv.BatchWrite(testContext(t), &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: []byte("k")}}}); err != nil {
			t.Fatal(err)
		}
		all := h.slow(t, "Put", "Delete", "BatchWrite")
		if all["Put"].GetTraceId() != id || all["Delete"].GetTraceId() != id || all["BatchWrite"].GetTraceId() != "" {
			t.Errorf("%s: %v", transport, all)
		}
		if text := h.log.String(); !strings.Contains(text, "trace_id="+id) {
			t.Errorf("%s: the log: %s", transport, text)
		}
	}
	r := receiver.NewReceiver(t)
	h := mustStart(t, withSlow, withTraces(r, 1))
	h.slowSyncs(3 * slowThreshold)
	if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k")}); err != nil {
		t.Fatal(err)
	}
	put := receiver.Named(r.Wait(t, "epochkv.v1.KVService/Put"), "epochkv.v1.KVService/Put")
	if got := h.slow(t, "Put")["Put"].GetTraceId(); got != put.Trace() {
		t.Errorf("trace %q, but the span has %q", got, put.Trace())
	}
}

// TestEachRequestHasALineAtLevelDebug, on both transports: its method, code, peer, request id and trace, once, and nothing of keys and values.
// At other levels there is none.
func TestEachRequestHasALineAtLevelDebug(t *testing.T) {
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	for _, transport := range bothTransports {
		for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo} {
			h := mustStart(t, onTransport(transport), func(c *config.Config) { c.LogLevel = level })
			requestID := newRequestID(t)
			ctx := metadata.AppendToOutgoingContext(testContext(t), "traceparent", "00-"+id+"-00f067aa0ba902b7-01")
			if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte(secretKey), Value: []byte(secretValue), RequestId: requestID}); err != nil {
				t.Fatal(err)
			}
			pipe := h.pipeline(t, testContext(t))
			if err := pipe.Send(&pb.PipelineRequest{Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte(secretKey)}}}); err != nil {
				t.Fatal(err)
			}
			if _, err := pipe.Recv(); err != nil {
				t.Fatal(err)
			}
			_ = pipe.CloseSend()
			if _, err := pipe.Recv(); !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			if _, err := h.kv.Get(testContext(t), &pb.GetRequest{}); err == nil {
				t.Fatal("a get without a key")
			}
			if err := h.stop(); err != nil {
				t.Fatal(err)
			}
			lines := map[string]int{}
			for line := range strings.Lines(h.log.String()) {
				if strings.Contains(line, "msg=request ") {
					lines[debugLine(t, line)]++
				}
				if strings.Contains(line, "secret") {
					t.Error(line)
				}
			}
			want := map[string]int{}
			if level == slog.LevelDebug {
				want = map[string]int{
					"Put OK " + uuid.UUID(requestID).String() + " " + id: 1, "Get OK  ": 1, "Get InvalidArgument  ": 1, "Pipeline OK  ": 1,
				}
			}
			if fmt.Sprint(lines) != fmt.Sprint(want) {
				t.Errorf("%s, level %v: %v\n%s", transport, level, lines, h.log.String())
			}
		}
	}
}

// debugLine is what a line says of its request: method, code, request id and trace.
func debugLine(t *testing.T, line string) string {
	t.Helper()
	fields := map[string]string{}
	for _, f := range strings.Fields(line) {
		name, value, _ := strings.Cut(f, "=")
		fields[name] = value
	}
	if took, err := time.ParseDuration(fields["took"]); err != nil || took < 0 || !strings.HasPrefix(fields["peer"], "127.0.0.1:") {
		t.Errorf("took or peer: %s", line)
	}
	return strings.Join([]string{fields["method"], fields["code"], fields["request_id"], fields["trace_id"]}, " ")
}

// TestTraceparentOfARequestIsNotThatOfAnother: the direct transport uses its streams again.
func TestTraceparentOfARequestIsNotThatOfAnother(t *testing.T) {
	r := receiver.NewReceiver(t)
	h := mustStart(t, withTraces(r, 0))
	const n = 200
	want := map[string]bool{}
	for i := range n {
		var trace [16]byte
		trace[0], trace[15] = 1, byte(i)
		ctx := testContext(t)
		if i%2 == 0 {
			want[hex.EncodeToString(trace[:])] = true
			ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", fmt.Sprintf("00-%x-00f067aa0ba902b7-01", trace))
		}
		if _, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte("key")}); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	for _, s := range r.Spans() {
		if !want[s.Trace()] {
			t.Errorf("a span of %s", s.Trace())
		}
		delete(want, s.Trace())
	}
	if len(want) > 0 {
		t.Errorf("%d traces have no span", len(want))
	}
}

// BenchmarkGetTraced is a get over a connection, as grpc-go's client sends it: without traces, with traces of none, and of each.
func BenchmarkGetTraced(b *testing.B) {
	for _, c := range []struct {
		name  string
		on    bool
		ratio float64
	}{{"off", false, 0}, {"none", true, 0}, {"all", true, 1}} {
		b.Run(c.name, func(b *testing.B) {
			h := mustStart(b, func(o *config.Config) {
				if c.on {
					withTraces(receiver.NewReceiver(b), c.ratio)(o)
				}
			})
			h.put(b, "key", "value")
			ctx, request := context.Background(), &pb.GetRequest{Key: []byte("key")}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := h.kv.Get(ctx, request); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
