package main

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

// kvctl runs a command line against a server and returns the exit code and both outputs.
func kvctl(ctx context.Context, server *clienttest.Server, args ...string) (code int, out, errs string) {
	var stdout, stderr bytes.Buffer
	a := &app{
		in: strings.NewReader(""), out: &stdout, err: &stderr,
		getenv: func(name string) string { return map[string]string{endpointEnv: server.Endpoint}[name] },
	}
	code = a.run(ctx, args)
	return code, stdout.String(), stderr.String()
}

func dial(t *testing.T, server *clienttest.Server) *client.Client {
	t.Helper()
	c, err := client.Dial(server.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// mustHoldOnly fails unless the server's only key is one.
func mustHoldOnly(t *testing.T, c *client.Client, key string) {
	t.Helper()
	for e, err := range c.Scan(t.Context(), client.Range{}, client.ScanOptions{KeysOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if string(e.Key) != key {
			t.Fatalf("%q is left behind", e.Key)
		}
	}
	if v, err := c.Get(t.Context(), []byte(key)); err != nil || !v.Found {
		t.Fatalf("%q is gone (%v)", key, err)
	}
}

const neighbour = "kvctl-bench/mine" // begins as the benchmark's keys do

func serverWithNeighbour(t *testing.T) (*clienttest.Server, *client.Client) {
	server := clienttest.Start(t)
	c := dial(t, server)
	if _, err := c.Put(t.Context(), []byte(neighbour), []byte("v")); err != nil {
		t.Fatal(err)
	}
	return server, c
}

func TestBenchReportsEachWorkloadAndRemovesItsKeys(t *testing.T) {
	server, c := serverWithNeighbour(t)
	perRequest := map[string]int64{benchPut: 1, benchGet: 1, benchMixed: 1, benchBatch: 7, benchScan: 0}
	for workload, keys := range perRequest {
		r := benchUntil(t, server, func(r *benchReport) bool { return r.Requests > 0 }, 60*time.Millisecond,
			workload, "--callers", "3", "--keys", "100", "--batch", "7", "--scan", "5")
		if r.Workload != workload || r.Loop != "closed" || r.Requests == 0 || r.Rate <= 0 || r.Latency.P50 <= 0 || r.Latency.Max < r.Latency.P50 {
			t.Errorf("%s: %+v", workload, r)
		}
		if keys > 0 && r.Keys != keys*r.Requests {
			t.Errorf("%s: %d keys in %d requests", workload, r.Keys, r.Requests)
		}
		mustHoldOnly(t, c, neighbour)
	}
}

// benchUntil runs a benchmark until its report is as expected, each time ten times longer, up to ten seconds: a machine that is busy
// with other things may send nothing in a moment.
func benchUntil(t *testing.T, server *clienttest.Server, enough func(*benchReport) bool, duration time.Duration, args ...string) benchReport {
	t.Helper()
	for {
		code, out, errs := kvctl(t.Context(), server, append([]string{"bench", "-o", "json", "--duration", duration.String()}, args...)...)
		var r benchReport
		if err := json.Unmarshal([]byte(out), &r); code != 0 || err != nil {
			t.Fatalf("%s: exit %d, %v: %s", args[0], code, err, errs)
		}
		if duration *= 10; enough(&r) || duration > 10*time.Second {
			return r
		}
	}
}

func TestAnOpenLoopSendsAtItsRate(t *testing.T) {
	server, _ := serverWithNeighbour(t)
	const rate = 100
	r := benchUntil(t, server, func(r *benchReport) bool { return r.Rate > rate/2 }, 400*time.Millisecond, "put", "--callers", "4", "--rate", strconv.Itoa(rate))
	// A machine that is slow to wake sends late, not more.
	if most := int64(rate*r.Seconds) + 1; r.Loop != "open" || r.Asked != rate || r.Rate <= rate/2 || r.Requests > most {
		t.Errorf("%+v: want at most %d requests, and at least half of them", r, most)
	}
}

func TestBenchCleansUpAfterAnErrorAndAnInterrupt(t *testing.T) {
	server, c := serverWithNeighbour(t)
	server.FailNext(nil, nil, clienttest.NewError(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "the test says so"))
	if code, _, errs := kvctl(t.Context(), server, "bench", "put", "--callers", "1"); code != exitLimit {
		t.Errorf("exit %d: %s", code, errs)
	}
	mustHoldOnly(t, c, neighbour)

	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, _, errs := kvctl(ctx, server, "bench", "mixed", "--duration", "1m", "--keys", "50")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it went on for %v: %s", took, errs)
	}
	mustHoldOnly(t, c, neighbour)
}

// TestBenchSaysWhatItLeaves, also if it was interrupted.
func TestBenchSaysWhatItLeaves(t *testing.T) {
	server := clienttest.Start(t)
	server.FailNext(clienttest.NewError(codes.PermissionDenied, kvpb.ErrorReason_ERROR_REASON_PERMISSION_DENIED, "the test says so"))
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	if code, _, errs := kvctl(ctx, server, "bench", "put"); code != exitDenied || !strings.Contains(errs, "kvctl del --prefix kvctl-bench/") {
		t.Errorf("exit %d: %s", code, errs)
	}
}

func TestBenchRefusesWhatMakesNoSense(t *testing.T) {
	server := clienttest.Start(t)
	for _, args := range []string{
		"bench", "bench fly", "bench put --callers 0", "bench put --duration 0s", "bench put --duration 2h", "bench put --keys 0",
		"bench batch --keys 10 --batch 11", "bench mixed --read-percent 101", "bench put --prefix=", "bench put --rate -1",
	} {
		if code, _, _ := kvctl(t.Context(), server, strings.Fields(args)...); code != exitUsage {
			t.Errorf("%s: exit %d, want %d", args, code, exitUsage)
		}
	}
}
