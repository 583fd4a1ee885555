package server

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

func copyBody(w io.Writer, res *http.Response) (int64, error) { return io.Copy(w, res.Body) }

func TestOperatorPagesAreThere(t *testing.T) {
	h := mustStart(t)
	h.put(t, "k", "v")
	for path, want := range map[string]string{
		"/healthz":                       "ok",
		"/readyz":                        "ok",
		"/metrics":                       `kvserver_requests_total{code="OK",method="Put"} 1`,
		"/debug/pprof/":                  "goroutine",
		"/debug/pprof/goroutine?debug=1": "goroutine profile",
	} {
		if code, body := httpGet(t, h, path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d without %q", path, code, want)
		}
	}
	if code, _ := httpGet(t, h, "/nothing"); code != http.StatusNotFound {
		t.Errorf("/nothing: %d", code)
	}
}

func TestHealthAndReflectionAnswer(t *testing.T) {
	h := mustStart(t)
	ctx := testContext(t)
	for _, service := range []string{"", "epochkv.v1.KVService", "epochkv.v1.AdminService"} {
		got, err := healthpb.NewHealthClient(h.conn).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
		if err != nil || got.Status != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("health of %q: %v, %v", service, got, err)
		}
	}
	stream, err := reflectionpb.NewServerReflectionClient(h.conn).ServerReflectionInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	got, err := stream.Recv()
	if err != nil || !strings.Contains(got.String(), "epochkv.v1.KVService") {
		t.Errorf("reflection: %v, %v", got, err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
}

// TestReflectionHoldsLittle: every client may ask, and no right, limit or share bounds the answers. So requests are small, of which an answer
// repeats everything, and few streams are open at once.
func TestReflectionHoldsLittle(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		client := reflectionpb.NewServerReflectionClient(h.conn)
		ask := func(host string) (reflectionpb.ServerReflection_ServerReflectionInfoClient, error) {
			stream, err := client.ServerReflectionInfo(testContext(t))
			if err != nil {
				return nil, err
			}
			_ = stream.Send(&reflectionpb.ServerReflectionRequest{Host: host, MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}})
			_, err = stream.Recv()
			return stream, err
		}
		large := codes.InvalidArgument
		if h.config.Transport == config.TransportGRPC {
			large = codes.Internal // of the library
		}
		if _, err := ask(strings.Repeat("h", openMessageMax)); status.Code(err) != large {
			t.Errorf("a large request: %v", err)
		}
		if _, err := healthpb.NewHealthClient(h.conn).Check(testContext(t), &healthpb.HealthCheckRequest{Service: strings.Repeat("s", openMessageMax)}); status.Code(err) != large {
			t.Errorf("a large name of a service: %v", err)
		}
		eventually(t, "none is open", func() bool { return h.reflections.Load() == 0 })
		var open []reflectionpb.ServerReflection_ServerReflectionInfoClient
		for i := range reflectionsMax {
			if i%openStreamsMax == 0 { // while users are checked, a connection has no more
				client = reflectionpb.NewServerReflectionClient(h.dial(t))
			}
			stream, err := ask("host")
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, stream)
		}
		client = reflectionpb.NewServerReflectionClient(h.conn)
		_, err := ask("host")
		failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
		for _, stream := range open {
			_ = stream.CloseSend()
		}
		eventually(t, "there is room again", func() bool { return h.reflections.Load() == 0 })
		if _, err := ask("host"); err != nil {
			t.Error(err)
		}
	})
}

func TestNoHTTPWithoutAnAddress(t *testing.T) {
	h := mustStart(t, withoutHTTP)
	if a := h.HTTPAddress(); a != "" {
		t.Errorf("served on %s", a)
	}
	h.put(t, "k", "v")
}

// TestIdleServerHasFewSeries: what was never used is not sent. An idle server probes its log, and makes a checkpoint of that.
func TestIdleServerHasFewSeries(t *testing.T) {
	h := mustStart(t)
	h.probeOnce(t.Context())
	if err := h.store.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, metrics := httpGet(t, h, "/metrics")
	series := 0
	for line := range strings.Lines(metrics) {
		if !strings.HasPrefix(line, "#") {
			series++
		}
	}
	t.Logf("%d series", series)
	// A device has two ways in which it is read and written, each with a histogram of 12 series and a counter; files in memory have none.
	if series += 2 * 13; series > 150 {
		t.Errorf("an idle server has %d series", series)
	}
}
