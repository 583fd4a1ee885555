package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// quick repeats without making the tests wait.
var quick = client.WithRetry(client.Retry{Attempts: 4, Base: time.Millisecond, Max: 4 * time.Millisecond})

func start(t *testing.T, options ...client.Option) (*clienttest.Server, *client.Client) {
	t.Helper()
	s := clienttest.Start(t)
	c, err := client.Dial(s.Endpoint, append([]client.Option{quick}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, c
}

// serveFake serves a fake until the test ends, and returns a client of it.
func serveFake(t *testing.T, register func(*grpc.Server), options ...client.Option) *client.Client {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	register(g)
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	c, err := client.Dial(listener.Addr().String(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.Stop()
		if err := errors.Join(c.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	return c
}

func mustPut(t *testing.T, c *client.Client, key, value string) client.Epoch {
	t.Helper()
	epoch, err := c.Put(t.Context(), []byte(key), []byte(value))
	if err != nil {
		t.Fatal(err)
	}
	return epoch
}

func TestReadsSeeWritesAtTheirEpochs(t *testing.T) {
	_, c := start(t)
	ctx := t.Context()
	first := mustPut(t, c, "k", "one")
	second := mustPut(t, c, "k", "two")
	if second != first+1 {
		t.Fatalf("epochs %d, %d are not dense", first, second)
	}
	newest, err := c.Get(ctx, []byte("k"))
	if err != nil || !newest.Found || string(newest.Data) != "two" || newest.Epoch != second || newest.ReadEpoch != second {
		t.Fatalf("newest: %+v, %v", newest, err)
	}
	old, err := c.Get(ctx, []byte("k"), client.At(first))
	if err != nil || string(old.Data) != "one" || old.ReadEpoch != first {
		t.Fatalf("at %d: %+v, %v", first, old, err)
	}
	if _, err := c.Delete(ctx, []byte("k")); err != nil {
		t.Fatal(err)
	}
	if gone, err := c.Get(ctx, []byte("k")); err != nil || gone.Found {
		t.Fatalf("a missing key is an answer, not an error: %+v, %v", gone, err)
	}
	values, err := c.BatchGet(ctx, [][]byte{[]byte("no"), []byte("k"), []byte("no")}, client.At(second))
	if err != nil || len(values) != 3 || values[0].Found || string(values[1].Data) != "two" || values[2].Found {
		t.Fatalf("BatchGet does not answer in the order of its keys: %+v, %v", values, err)
	}
}

func TestBatchIsOneEpoch(t *testing.T) {
	_, c := start(t)
	ctx := t.Context()
	mustPut(t, c, "gone", "x")
	var b client.Batch
	b.Put([]byte("a"), []byte("1"))
	b.Put([]byte("b"), []byte("2"))
	b.Delete([]byte("gone"))
	if b.Len() != 3 || b.Bytes() != 8 {
		t.Fatalf("batch of %d operations, %d bytes", b.Len(), b.Bytes())
	}
	epoch, err := c.Write(ctx, &b, client.Async())
	if err != nil {
		t.Fatal(err)
	}
	values, err := c.BatchGet(ctx, [][]byte{[]byte("a"), []byte("b"), []byte("gone")})
	if err != nil || values[0].Epoch != epoch || values[1].Epoch != epoch || values[2].Found {
		t.Fatalf("%+v, %v", values, err)
	}
	deleted, err := c.DeleteRange(ctx, client.Between([]byte("a"), []byte("c")), 1)
	if err != nil || deleted.Count != 1 || !deleted.More {
		t.Fatalf("limited DeleteRange: %+v, %v", deleted, err)
	}
}

func TestPreconditionsAreTypedErrors(t *testing.T) {
	_, c := start(t)
	ctx := t.Context()
	key := []byte("k\x00\xff")
	epoch, err := c.Put(ctx, key, []byte("v"), client.If(client.Absent(key)))
	if err != nil {
		t.Fatal(err)
	}
	for _, holds := range []client.Condition{client.Present(key), client.ValueIs(key, []byte("v"))} {
		if epoch, err = c.Put(ctx, key, []byte("v"), client.If(holds)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Put(ctx, key, []byte("v"), client.If(client.WrittenAt(key, epoch))); err != nil {
		t.Fatal(err)
	}
	for name, fails := range map[string]client.Condition{
		"absent":       client.Absent(key),
		"exists":       client.Present([]byte("no")),
		"value_equals": client.ValueIs(key, []byte("w")),
		"epoch_equals": client.WrittenAt(key, epoch),
	} {
		_, err := c.Put(ctx, key, []byte("w"), client.If(client.Present(key), fails))
		var e *client.Error
		if !errors.Is(err, client.ErrPreconditionFailed) || !errors.As(err, &e) {
			t.Fatalf("%s: %v", name, err)
		}
		if e.Metadata["condition"] != name || e.Metadata["index"] != "1" || e.OutcomeUnknown() || e.Retryable() {
			t.Errorf("%s: %+v", name, e)
		}
		if name == "absent" && string(e.Key) != string(key) {
			t.Errorf("the error names key %q, not %q", e.Key, key)
		}
	}
}

func unavailable(reason kvpb.ErrorReason) error {
	return clienttest.NewError(codes.Unavailable, reason, "not now")
}

func TestRepeatsOnlyWhatIsSafe(t *testing.T) {
	const (
		draining = kvpb.ErrorReason_ERROR_REASON_SHUTTING_DOWN
		readOnly = kvpb.ErrorReason_ERROR_REASON_READ_ONLY
		overload = kvpb.ErrorReason_ERROR_REASON_OVERLOADED
	)
	broken := status.Error(codes.Unavailable, "connection reset")
	overloaded := clienttest.NewRetryError(codes.ResourceExhausted, overload, "busy", time.Millisecond)
	put := func(options ...client.WriteOption) func(context.Context, *client.Client) error {
		return func(ctx context.Context, c *client.Client) error {
			_, err := c.Put(ctx, []byte("k"), nil, options...)
			return err
		}
	}
	get := func(ctx context.Context, c *client.Client) error {
		_, err := c.Get(ctx, []byte("k"))
		return err
	}
	for _, test := range []struct {
		name     string
		do       func(context.Context, *client.Client) error
		faults   []error
		method   string
		calls    int
		survives bool
	}{
		{"a read after a broken connection", get, []error{broken, broken}, "Get", 3, true},
		{"a read of an overloaded server", get, []error{overloaded}, "Get", 2, true},
		{"a read that stays broken", get, []error{broken, broken, broken, broken, nil}, "Get", 4, false},
		{"a write after a broken connection", put(), []error{broken}, "Put", 2, true},
		{"a write that was not executed", put(), []error{unavailable(draining), overloaded}, "Put", 3, true},
		{"a write to a server that stopped writing", put(), []error{unavailable(readOnly)}, "Put", 1, false},
		{
			"a conflict", put(),
			[]error{clienttest.NewError(codes.Aborted, kvpb.ErrorReason_ERROR_REASON_CONFLICT, "no")},
			"Put", 1, false,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, c := start(t)
			s.FailNext(test.faults...)
			err := test.do(t.Context(), c)
			if (err == nil) != test.survives || s.Calls(test.method) != test.calls {
				t.Errorf("%d calls, error %v; want %d calls, survives %v", s.Calls(test.method), err, test.calls, test.survives)
			}
		})
	}
}

func TestErrorsSayWhetherTheWriteMayHaveHappened(t *testing.T) {
	s, c := start(t, client.WithRetry(client.Retry{Attempts: 1}))
	for _, test := range []struct {
		fault   error
		unknown bool
	}{
		{status.Error(codes.Unavailable, "connection reset"), true},
		{status.Error(codes.DeadlineExceeded, "late"), true},
		{unavailable(kvpb.ErrorReason_ERROR_REASON_READ_ONLY), false},
		{clienttest.NewError(codes.Internal, kvpb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, "log failed"), true},
		{clienttest.NewError(codes.FailedPrecondition, kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED, "too old"), true},
		{clienttest.NewError(codes.FailedPrecondition, kvpb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED, "fenced"), false},
	} {
		s.FailNext(test.fault)
		_, err := c.Put(t.Context(), []byte("k"), nil)
		var e *client.Error
		if !errors.As(err, &e) || e.OutcomeUnknown() != test.unknown {
			t.Errorf("%v: outcome unknown should be %v", err, test.unknown)
		}
	}
}

func TestClientFollowsTheServersAdviceToWait(t *testing.T) {
	const advice = 40 * time.Millisecond
	s, c := start(t)
	s.FailNext(clienttest.NewRetryError(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_OVERLOADED, "busy", advice))
	began := time.Now()
	if _, err := c.Get(t.Context(), []byte("k")); err != nil {
		t.Fatal(err)
	}
	if waited := time.Since(began); waited < advice {
		t.Errorf("repeated after %v, the server asked for %v", waited, advice)
	}

	// Advice beyond the deadline ends the call at once, with the server's error rather than the
	// deadline's.
	s.FailNext(clienttest.NewRetryError(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_OVERLOADED, "busy", time.Hour))
	_, err := c.Get(t.Context(), []byte("k"))
	var e *client.Error
	if !errors.As(err, &e) || e.Reason != kvpb.ErrorReason_ERROR_REASON_OVERLOADED || e.RetryAfter != time.Hour {
		t.Errorf("got %v", err)
	}
}

func TestCallsEndByTheirDeadline(t *testing.T) {
	c, err := client.Dial("127.0.0.1:1", client.WithTimeout(50*time.Millisecond), quick)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	began := time.Now()
	if _, err := c.Get(t.Context(), []byte("k")); err == nil {
		t.Fatal("nobody listens there")
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("took %v", took)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Get(ctx, []byte("k")); !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled call ended with %v", err)
	}
}

func TestStatusAndHealth(t *testing.T) {
	s, c := start(t)
	mustPut(t, c, "k", "v")
	answer, err := c.Status(t.Context())
	if err != nil || answer.GetEpochs().GetVisible() != 1 {
		t.Errorf("%v, %v", answer, err)
	}
	if ok, err := c.Healthy(t.Context()); err != nil || !ok {
		t.Errorf("healthy: %v, %v", ok, err)
	}
	s.Health.Shutdown()
	if ok, err := c.Healthy(t.Context()); err != nil || ok {
		t.Errorf("healthy after shutdown: %v, %v", ok, err)
	}
}

func TestErrorTextHasTheReason(t *testing.T) {
	_, c := start(t)
	_, err := c.Put(t.Context(), []byte(strings.Repeat("k", 2049)), nil)
	if err == nil || !strings.Contains(err.Error(), "KEY_TOO_LARGE") {
		t.Errorf("got %v", err)
	}
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("the gRPC status is lost: %v", status.Code(err))
	}
}

func fill(t *testing.T, c *client.Client, count int) {
	t.Helper()
	var b client.Batch
	for i := range count {
		b.Put(fmt.Appendf(nil, "key-%04d", i), fmt.Appendf(nil, "value-%d", i))
	}
	if _, err := c.Write(t.Context(), &b); err != nil {
		t.Fatal(err)
	}
}
