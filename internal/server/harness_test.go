package server

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// harness is a server on a file system in memory, and a client of it.
type harness struct {
	*Server
	disk   *vfs.Mem
	faults *vfs.Faulty
	conn   *grpc.ClientConn
	kv     pb.KVServiceClient
	admin  pb.AdminServiceClient
	log    *logBuffer
	stop   func() error // drains and returns what Run returned; may be called twice

	bearerOnce sync.Once // see setUsers
	checked    bool      // users are checked from the beginning, and clients have a token

	mayStick bool // stop may return *mvcc.StuckError
}

type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

var transportFlag = flag.String("transport", string(config.Default().Transport), "the transport that the tests of this package use")

var usersFlag = flag.Bool("users", false, "check users in all tests of this package, whose clients then have a token")

// testUser is the user of clients with -users.
const testUser = "tests"

// testCredentials is the token of testUser, for requests without one.
type testCredentials struct{}

func (testCredentials) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	if md, ok := metadata.FromOutgoingContext(ctx); ok && len(md["authorization"]) > 0 {
		return nil, nil //nolint:nilnil // as the interface has it
	}
	return map[string]string{"authorization": "Bearer " + testUser}, nil
}

func (testCredentials) RequireTransportSecurity() bool { return false }

// testConfig is small, listens on free ports, and drains quickly.
func testConfig() config.Config {
	c := config.Default()
	c.DataDir, c.Listen, c.HTTP = "data", "127.0.0.1:0", "127.0.0.1:0"
	c.Memory, c.MemtableSize, c.SegmentSize = 256*config.MiB, 2*config.MiB, config.MiB // small: each test starts a server
	c.DrainTimeout = 5 * time.Second
	c.ProbeInterval = 0 // tests count epochs
	c.Transport = config.Transport(*transportFlag)
	return c
}

func mustStart(t testing.TB, adjust ...func(*config.Config)) *harness {
	t.Helper()
	return mustStartOn(t, vfs.NewMem(), adjust...)
}

// mustStartOn opens and runs a server, and at the end of the test drains it and looks at what it
// left over.
func mustStartOn(t testing.TB, disk *vfs.Mem, adjust ...func(*config.Config)) *harness {
	t.Helper()
	return mustRun(t, disk, *usersFlag, adjust...)
}

// mustStartUnchecked starts a server for a test that makes its users itself: with -users, too, it begins without any.
func mustStartUnchecked(t testing.TB, disk *vfs.Mem, adjust ...func(*config.Config)) *harness {
	t.Helper()
	return mustRun(t, disk, false, adjust...)
}

func mustRun(t testing.TB, disk *vfs.Mem, checked bool, adjust ...func(*config.Config)) *harness {
	t.Helper()
	c := testConfig()
	for _, f := range adjust {
		f(&c)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	h := &harness{disk: disk, faults: vfs.NewFaulty(disk), log: new(logBuffer), checked: checked}
	s, err := open(context.Background(), c, slog.New(slog.NewTextHandler(h.log, &slog.HandlerOptions{Level: c.LogLevel})), h.faults)
	if err != nil {
		t.Fatal(err)
	}
	h.Server = s
	if checked {
		h.setUsers(map[string][]auth.Grant{testUser: {{Read: true, Write: true, Lease: true, Actions: auth.ActionsAll}}})
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	h.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	h.conn = h.dial(t)
	h.kv, h.admin = pb.NewKVServiceClient(h.conn), pb.NewAdminServiceClient(h.conn)
	t.Cleanup(func() {
		err := h.stop()
		if h.mayStick && errors.As(err, new(*mvcc.StuckError)) {
			err = nil
		}
		if s.store.Err() == nil && !h.disk.Crashed() && err != nil {
			t.Errorf("the server ended with %v", err)
		}
		if requests, bytes, answers := s.admission.inflight(); requests != 0 || bytes != 0 || answers != 0 {
			t.Errorf("%d requests of %d bytes and answers of %d bytes were never given back", requests, bytes, answers)
		}
		if n := s.store.Stats().SessionsOpen; n != 0 {
			t.Errorf("%d sessions were never closed", n)
		}
		if n := s.counters.streams.Load(); n != 0 {
			t.Errorf("%d streams never ended", n)
		}
		held := &s.admission.sessions
		if reads, walks, writes := held.reads.held.Load(), held.walks.held.Load(), held.writes.held.Load(); reads != 0 || walks != 0 || writes != 0 {
			t.Errorf("sessions of %d reads, %d walks and %d writes are counted for ever", reads, walks, writes)
		}
		if small, large := s.receiving.small.reserved.Load(), s.receiving.large.reserved.Load(); small != 0 || large != 0 {
			t.Errorf("%d bytes of small and %d of large messages are counted for ever", small, large)
		}
		if s.receiving.beside.bytes() != 0 {
			t.Error("the place for a large message is taken for ever")
		}
		if n := s.admission.waiting.held.Load(); n != 0 {
			t.Errorf("%d bytes of answers that wait are counted for ever", n)
		}
		if n := s.feed.units.used.Load(); n != 0 {
			t.Errorf("%d watches are counted for ever", n)
		}
		if n := s.feed.units.clients(); n != 0 {
			t.Errorf("watches of %d clients are counted for ever", n)
		}
		if n := s.feed.responses.taken(); n != 0 {
			t.Errorf("%d bytes of responses of watches are counted for ever", n)
		}
	})
	return h
}

// token gives the clients of a connection a token, with -users.
func (h *harness) token() grpc.DialOption {
	if !h.checked {
		return grpc.EmptyDialOption{}
	}
	return grpc.WithPerRPCCredentials(testCredentials{})
}

// clientOptions gives a client of the Go package a token, with -users.
func (h *harness) clientOptions(options ...client.Option) []client.Option {
	if h.checked {
		options = append(options, client.WithToken(testUser))
	}
	return options
}

// authorize gives an HTTP request a token, with -users.
func (h *harness) authorize(r *http.Request) *http.Request {
	if h.checked {
		r.Header.Set("Authorization", "Bearer "+testUser)
	}
	return r
}

// authorized is the access of a request that a test executes itself, with -users.
func (h *harness) authorized(t testing.TB, method string) *access {
	t.Helper()
	if !h.checked {
		return nil
	}
	a := &access{gate: &h.gate, header: "Bearer " + testUser}
	if err := a.check(rpcRows[method], nil); err != nil {
		t.Fatal(err)
	}
	a.claims = claims{} // the test names keys without a message
	return a
}

// damageFields are what errors about damage name: while users are checked, no keys.
func (h *harness) damageFields() []string {
	if h.checked {
		return []string{"file", "offset"}
	}
	return []string{"file", "offset", "key_lower", "key_upper"}
}

func (h *harness) dial(t testing.TB, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()), h.token(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30), grpc.MaxCallSendMsgSize(1<<30)))
	conn, err := grpc.NewClient("passthrough:///"+h.Address(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // some tests close it themselves
	return conn
}

// patience is how long a test waits for what must come. It is no bound of what a test measures: the race detector on a busy machine makes
// some of them a hundred times slower.
const patience = 3 * time.Minute

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func (h *harness) put(t testing.TB, key, value string) uint64 {
	t.Helper()
	out, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte(key), Value: []byte(value), Durability: pb.Durability_DURABILITY_ASYNC})
	if err != nil {
		t.Fatalf("put %q: %v", key, err)
	}
	return out.Epoch
}

func (h *harness) get(t testing.TB, key string) *pb.GetResponse {
	t.Helper()
	out, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte(key)})
	if err != nil {
		t.Fatalf("get %q: %v", key, err)
	}
	return out
}

// failure is what a client can read from an error.
type failure struct {
	code     codes.Code
	reason   string
	metadata map[string]string
	field    string
	retry    time.Duration
	subject  string // of the PreconditionFailure
}

// failureOf takes an error apart and insists on exactly one ErrorInfo of our domain.
func failureOf(t testing.TB, err error) failure {
	t.Helper()
	st, ok := status.FromError(err)
	if err == nil || !ok {
		t.Fatalf("got %v, want a status", err)
	}
	f, infos := failure{code: st.Code()}, 0
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			infos++
			f.reason, f.metadata = d.Reason, d.Metadata
			if d.Domain != pb.ErrorDomain {
				t.Errorf("domain %q", d.Domain)
			}
		case *errdetails.BadRequest:
			f.field = d.FieldViolations[0].Field
		case *errdetails.RetryInfo:
			f.retry = d.RetryDelay.AsDuration()
		case *errdetails.PreconditionFailure:
			f.subject = d.Violations[0].Subject
		}
	}
	if infos != 1 {
		t.Fatalf("%v carries %d ErrorInfo, want one", err, infos)
	}
	return f
}

func (f failure) want(t testing.TB, code codes.Code, reason pb.ErrorReason, metadata ...string) {
	t.Helper()
	if f.code != code || f.reason != reason.Reason() {
		t.Errorf("got %v %s, want %v %s", f.code, f.reason, code, reason.Reason())
	}
	if keys := slices.Sorted(maps.Keys(f.metadata)); !slices.Equal(keys, slices.Sorted(slices.Values(metadata))) {
		t.Errorf("%s: metadata %v, want the keys %v", f.reason, f.metadata, metadata)
	}
}

func mustRecvAll(t testing.TB, stream grpc.ServerStreamingClient[pb.ScanResponse]) []*pb.ScanResponse {
	t.Helper()
	var pages []*pb.ScanResponse
	for {
		page, err := stream.Recv()
		if err == io.EOF {
			return pages
		}
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, page)
	}
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// clients is the number of clients that have watches.
func (u *watchUnits) clients() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.open)
}
