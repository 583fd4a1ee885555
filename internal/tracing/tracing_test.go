package tracing

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/epochkv/epochkv/internal/certs"
	"github.com/epochkv/epochkv/internal/tracing/tracetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	traceOfClient = "4bf92f3577b34da6a3ce929d0e0e4736"
	spanOfClient  = "00f067aa0ba902b7"
	sampled       = "00-" + traceOfClient + "-" + spanOfClient + "-01"
	unsampled     = "00-" + traceOfClient + "-" + spanOfClient + "-00"
)

func mustOpen(t testing.TB, endpoint string, ratio float64) (tracer *Tracer, failures *atomic.Int64) {
	t.Helper()
	failures = new(atomic.Int64)
	tracer, err := Open(Options{Endpoint: endpoint, Ratio: ratio, Version: "1", Instance: "i", Failed: func(error) { failures.Add(1) }})
	if err != nil {
		t.Fatal(err)
	}
	return tracer, failures
}

// put is a write with everything that a request can have.
func put(parent Parent) *Request {
	end := time.Now()
	start := end.Add(-10 * time.Millisecond)
	return &Request{
		Parent: parent, Method: "epochkv.v1.KVService/Put", Peer: strings.Repeat("p", 64), Code: "Internal", Failed: true, RequestID: strings.Repeat("r", 36),
		Bytes: 100, Epoch: 7, Start: start, End: end,
		Work: Work{Name: "commit", Start: start.Add(time.Millisecond)},
		Sync: Sync{Start: start.Add(5 * time.Millisecond), End: end},
		Waits: Waits{
			Queue: time.Millisecond, Latch: time.Millisecond, Memory: time.Millisecond, Pages: time.Millisecond, PagesRead: 3, Client: time.Millisecond,
		},
	}
}

func mustClose(t testing.TB, tracer *Tracer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := tracer.Close(ctx); err != nil {
		t.Error(err)
	}
}

// TestSpansArriveUnderTheirParents: over both protocols, with the times that were measured, and at the latest when the tracer is closed.
func TestSpansArriveUnderTheirParents(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment=test")
	r := tracetest.NewReceiver(t)
	for i, endpoint := range []string{r.GRPC, r.HTTP, r.HTTP + "/v1/traces"} {
		tracer, failures := mustOpen(t, endpoint, 0)
		parent := ParseParent(sampled)
		if !tracer.Samples(parent) {
			t.Fatal("a sampled parent is not sampled")
		}
		if id := tracer.Request(put(parent)); id.String() != traceOfClient {
			t.Errorf("trace %v", id)
		}
		mustClose(t, tracer)
		all := r.Spans()[4*i:]
		if len(all) != 4 {
			t.Fatalf("%d spans:\n%s", len(all), tracetest.Tree(all))
		}
		request := tracetest.Named(all, "epochkv.v1.KVService/Put")
		commit := tracetest.Under(all, request, "commit")
		sync, queue := tracetest.Under(all, commit, "sync"), tracetest.Under(all, request, "queue")
		if request.Parent() != spanOfClient || request.Trace() != traceOfClient || sync == nil || queue == nil {
			t.Fatal(tracetest.Tree(all))
		}
		if request.Took() != 10*time.Millisecond || commit.Took() != 9*time.Millisecond || sync.Took() != 5*time.Millisecond || queue.Took() != time.Millisecond {
			t.Error(tracetest.Tree(all))
		}
		want := map[string]string{
			"rpc.system.name": "grpc", "rpc.method": "epochkv.v1.KVService/Put", "rpc.response.status_code": "Internal", "network.peer.address": strings.Repeat("p", 64),
			"epochkv.request_id": strings.Repeat("r", 36), "rpc.request.size": "100", "epochkv.epoch": "7", "epochkv.wait.client_us": "1000",
		}
		if fmt.Sprint(request.Attributes) != fmt.Sprint(want) || len(want) > attributesMax {
			t.Errorf("%v", request.Attributes)
		}
		if got := fmt.Sprint(commit.Attributes); got != "map[epochkv.pages_read:3 epochkv.wait.latch_us:1000 epochkv.wait.memory_us:1000 epochkv.wait.pages_us:1000]" {
			t.Error(got)
		}
		if s := tracer.Stats(); s != (Stats{Sent: 4}) || failures.Load() != 0 {
			t.Errorf("%+v", s)
		}
	}
	if got := r.Resource(); got["service.name"] != "epochkv" || got["service.version"] != "1" || got["service.instance.id"] != "i" || got["deployment"] != "test" {
		t.Error(got)
	}
	if got := fmt.Sprint(r.Tokens()); got != "[secret secret secret]" {
		t.Error(got)
	}
}

// TestSamplingFollowsTheParentAndElseTheRatio, also for a field that is malformed, which counts as none.
func TestSamplingFollowsTheParentAndElseTheRatio(t *testing.T) {
	const n = 20_000
	for _, c := range []struct {
		traceparent string
		ratio       float64
		least, most int
	}{
		{sampled, 0, n, n},
		{unsampled, 1, 0, 0},
		{"", 0, 0, 0},
		{"", 1, n, n},
		{"", 0.1, n/10 - 400, n/10 + 400},
		{"00-00000000000000000000000000000000-00f067aa0ba902b7-01", 0, 0, 0},
		{"00-" + traceOfClient + "-" + spanOfClient, 0, 0, 0},
		{sampled + ", " + sampled, 0, 0, 0},
		{"ff-" + traceOfClient + "-" + spanOfClient + "-01", 0, 0, 0},
		{strings.ToUpper(sampled), 0, 0, 0},
		{strings.Repeat("x", 10_000), 1, n, n},
		{"01-" + traceOfClient + "-" + spanOfClient + "-01-what follows", 0, n, n}, // a later version
	} {
		tracer := new(Tracer)
		tracer.SetRatio(c.ratio)
		got, parent := 0, ParseParent(c.traceparent)
		for range n {
			if tracer.Samples(parent) {
				got++
			}
		}
		if got < c.least || got > c.most {
			t.Errorf("%.80q with ratio %v: %d of %d are sampled", c.traceparent, c.ratio, got, n)
		}
	}
	all := new(Tracer)
	if all.SetRatio(1); all.Samples(None) {
		t.Error("what is decided is decided again")
	}
}

// TestReceiverThatTakesNothingHoldsUpNothing: it is dead, silent or refuses. Requests go on as fast, what does not fit is dropped, every span
// is counted once, and the end is bounded.
func TestReceiverThatTakesNothingHoldsUpNothing(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = dead.Close()
	silent, refusing := tracetest.NewReceiver(t), tracetest.NewReceiver(t)
	silent.Answer(tracetest.Silent)
	refusing.Answer(tracetest.Refusing)
	for name, endpoint := range map[string]string{
		"dead over gRPC": "grpc://" + dead.Addr().String(), "dead over HTTP": "http://" + dead.Addr().String(),
		"silent over gRPC": silent.GRPC, "silent over HTTP": silent.HTTP,
		"refusing over gRPC": refusing.GRPC, "refusing over HTTP": refusing.HTTP,
	} {
		t.Run(name, func(t *testing.T) {
			tracer, failures := mustOpen(t, endpoint, 1)
			const requests = 10 * queueSpansMax / 4
			slow := 0
			for range requests {
				start := time.Now()
				if tracer.Request(put(Parent{})); time.Since(start) > time.Second {
					slow++
				}
			}
			if slow > 5 { // these few if the processors have other work
				t.Errorf("%d of %d requests took longer than a second", slow, requests)
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			start := time.Now()
			_ = tracer.Close(ctx)
			if took := time.Since(start); took > exportTimeout-2*time.Second {
				t.Errorf("the end took %v", took)
			}
			s := tracer.Stats()
			if s.Sent != 0 || s.Queued != 0 || s.Dropped+s.Failed != 4*requests || s.Dropped == 0 {
				t.Errorf("%+v of %d", s, 4*requests)
			}
			if failures.Load() == 0 {
				t.Error("no failure was reported")
			}
			tracer.Request(put(Parent{}))
			if again := tracer.Stats(); again.Dropped != s.Dropped+4 {
				t.Errorf("a request after the end: %+v", again)
			}
		})
	}
}

// TestReceiverThatComesBackGetsWhatIsNew.
func TestReceiverThatComesBackGetsWhatIsNew(t *testing.T) {
	r := tracetest.NewReceiver(t)
	r.Answer(tracetest.Refusing)
	tracer, failures := mustOpen(t, r.HTTP, 1)
	tracer.Request(put(Parent{}))
	for deadline := time.Now().Add(20 * time.Second); failures.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nothing was sent")
		}
	}
	r.Answer(nil)
	tracer.Request(put(Parent{}))
	r.Wait(t, "sync")
	mustClose(t, tracer)
	if s := tracer.Stats(); s != (Stats{Sent: 4, Failed: 4}) {
		t.Errorf("%+v", s)
	}
}

// TestBusyReceiverGetsTheBatchAgain, and one that rejects a part of it is not asked again.
func TestBusyReceiverGetsTheBatchAgain(t *testing.T) {
	for _, endpoint := range []func(*tracetest.Receiver) string{overGRPC, overHTTP} {
		r := tracetest.NewReceiver(t)
		var asked atomic.Int64
		r.Answer(func(ctx context.Context) error {
			if asked.Add(1) == 1 {
				return tracetest.Busy(ctx)
			}
			return nil
		})
		tracer, failures := mustOpen(t, endpoint(r), 1)
		tracer.Request(put(Parent{}))
		for deadline := time.Now().Add(20 * time.Second); tracer.Stats().Sent < 4; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%+v", tracer.Stats())
			}
		}
		before := asked.Load() // 2, or 3 if the spans went in two batches, because a second was over between them
		r.Reject(3)
		tracer.Request(put(Parent{}))
		mustClose(t, tracer)
		s, more := tracer.Stats(), asked.Load()-before
		one := more == 1 && failures.Load() == 1 && s == Stats{Sent: 5, Failed: 3}
		two := more == 2 && failures.Load() == 2 && s == Stats{Sent: 4, Failed: 4}
		if before > 3 || !one && !two {
			t.Errorf("%+v, asked %d and %d times, %d failures", s, before, more, failures.Load())
		}
	}
}

func overGRPC(r *tracetest.Receiver) string { return r.GRPC }
func overHTTP(r *tracetest.Receiver) string { return r.HTTP }

// TestReceiverIsCheckedAndMayCheck: with TLS, the receiver's certificate is that of the authority in the file, and the receiver may ask for one.
func TestReceiverIsCheckedAndMayCheck(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	subject := func(name string, hosts ...string) certs.Subject {
		return certs.Subject{Name: name, Hosts: hosts, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	}
	authority, err := certs.NewAuthority(subject("authority"))
	if err != nil {
		t.Fatal(err)
	}
	receivers, err := authority.Issue(subject("receiver", "127.0.0.1"))
	if err != nil {
		t.Fatal(err)
	}
	servers, err := authority.Issue(subject("server"))
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(receivers.Cert, receivers.Key)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority.PEM().Cert)
	r := tracetest.NewSecureReceiver(t, &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool, MinVersion: tls.VersionTLS13})
	files := TLSFiles{CA: write("ca.pem", authority.PEM().Cert), Cert: write("cert.pem", servers.Cert), Key: write("key.pem", servers.Key)}
	for _, endpoint := range []string{r.GRPC, r.HTTP} {
		for _, c := range []struct {
			files TLSFiles
			sent  uint64
		}{{files, 4}, {TLSFiles{CA: files.CA}, 0}, {TLSFiles{Cert: files.Cert, Key: files.Key}, 0}} {
			tracer, err := Open(Options{Endpoint: endpoint, TLSFiles: c.files, Ratio: 1, Failed: func(error) {}})
			if err != nil {
				t.Fatal(err)
			}
			tracer.Request(put(Parent{}))
			mustClose(t, tracer)
			if s := tracer.Stats(); s.Sent != c.sent || s.Sent+s.Failed+s.Dropped != 4 {
				t.Errorf("%s with %+v: %+v", endpoint, c.files, s)
			}
		}
	}
}

// TestMemoryOfTheQueueIsBounded fills the queue with the largest spans while a batch is stuck in the exporter.
func TestMemoryOfTheQueueIsBounded(t *testing.T) {
	r := tracetest.NewReceiver(t)
	r.Answer(tracetest.Silent)
	tracer, _ := mustOpen(t, r.GRPC, 1)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 2 * queueSpansMax {
		tracer.Request(put(Parent{}))
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) { // the exporter has taken a batch, and the rest is full
		if s := tracer.Stats(); s.Queued == queueSpansMax || time.Now().After(deadline) {
			break
		}
		tracer.Request(put(Parent{}))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if used := int64(after.HeapAlloc) - int64(before.HeapAlloc); used > MemoryMax || used < queueSpansMax*100 {
		t.Errorf("%d bytes for %+v; at most %d", used, tracer.Stats(), MemoryMax)
	} else {
		t.Logf("%d bytes, %d a span", used, used/queueSpansMax)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = tracer.Close(ctx)
}

// TestOpenNamesFilesThatCannotBeUsed, before a request is served.
func TestOpenNamesFilesThatCannotBeUsed(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, files := range []TLSFiles{{CA: empty}, {CA: "missing.pem"}, {Cert: "missing.pem", Key: empty}} {
		_, err := Open(Options{Endpoint: "grpcs://127.0.0.1:1", TLSFiles: files})
		if err == nil || !strings.Contains(err.Error(), ".pem") {
			t.Errorf("%+v: %v", files, err)
		}
	}
	if _, err := Open(Options{Endpoint: "ftp://127.0.0.1:1"}); err == nil || errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	for _, headers := range []string{"a-secret", "=a-secret", "x=a-secret%zz"} {
		t.Setenv(headersVariable, headers)
		if _, err := Open(Options{Endpoint: "grpc://127.0.0.1:1"}); err == nil || strings.Contains(err.Error(), "a-secret") || !strings.Contains(err.Error(), headersVariable) {
			t.Errorf("%q: %v", headers, err)
		}
	}
}

// BenchmarkRequest is a sampled write with four spans, and a request that is not sampled.
func BenchmarkRequest(b *testing.B) {
	r := tracetest.NewReceiver(b)
	tracer, _ := mustOpen(b, r.GRPC, 0.5)
	defer mustClose(b, tracer)
	b.Run("sampled", func(b *testing.B) {
		b.ReportAllocs()
		request := put(ParseParent(sampled))
		for b.Loop() {
			tracer.Request(request)
		}
	})
	b.Run("not sampled by its parent", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			tracer.Samples(ParseParent(unsampled))
		}
	})
	b.Run("by chance", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			tracer.Samples(Parent{})
		}
	})
}
