package server

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestConnectionsPastTheLimitGetTheReason(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.Connections = 2 })
	ctx := testContext(t)
	h.get(t, "k")
	second, third := h.dial(t), h.dial(t)
	if _, err := pb.NewKVServiceClient(second).Get(ctx, &pb.GetRequest{Key: []byte("k")}); err != nil {
		t.Fatalf("at the limit: %v", err)
	}
	_, err := pb.NewKVServiceClient(third).Get(ctx, &pb.GetRequest{Key: []byte("k")})
	failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
	stream, err := pb.NewKVServiceClient(third).Pipeline(ctx)
	if err == nil {
		_, err = stream.Recv()
	}
	failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
	if _, err := pb.NewAdminServiceClient(third).Status(ctx, &pb.StatusRequest{}); err != nil {
		t.Errorf("an operator cannot look at a full server: %v", err)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a place is free", func() bool { return h.connections.open.Load() <= 2 })
	if _, err := pb.NewKVServiceClient(third).Get(ctx, &pb.GetRequest{Key: []byte("k")}); err != nil {
		t.Errorf("a connection that was refused, after another has left: %v", err)
	}
	if err := third.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "places are free", func() bool { return h.connections.open.Load() == 1 && h.connections.served.Load() == 1 })
	if _, err := pb.NewKVServiceClient(h.dial(t)).Get(ctx, &pb.GetRequest{Key: []byte("k")}); err != nil {
		t.Errorf("after others left: %v", err)
	}
}

func TestConnectionsFarPastTheLimitAreClosed(t *testing.T) {
	c := connections{max: 1, requests: new(telemetry.Requests)}
	for range 1 + refusedConnectionsMax {
		if c.admit(nil) == nil {
			t.Fatal("closed too early")
		}
	}
	if c.admit(nil) != nil {
		t.Error("kept open beyond every bound")
	}
	if n := c.open.Load(); n != 1+refusedConnectionsMax {
		t.Errorf("%d are counted", n)
	}
}

func TestAdmissionIsExact(t *testing.T) {
	var a admission
	a.init(3, 1600) // 100 bytes of small reads
	one, other := new(connection), new(connection)
	if !a.enter(one, shareSmallReads, 60) || !a.enter(other, shareSmallReads, 25) || !a.enter(other, shareSmallReads, 15) {
		t.Fatal("refused at the limit")
	}
	if a.enter(one, shareSmallReads, 0) || a.enter(one, shareSmallReads, 1000) {
		t.Error("a fourth request was admitted")
	}
	if !a.enter(one, shareSmallWrites, 100) {
		t.Error("reads starve writes")
	}
	a.leave(one, shareSmallWrites, 100)
	a.leave(other, shareSmallReads, 25)
	if a.enter(one, shareSmallReads, 25) && a.enter(one, shareSmallReads, 1) {
		t.Error("101 bytes were admitted")
	}
	a.leave(one, shareSmallReads, 25)
	if !a.enter(one, shareSmallReads, 1000) {
		t.Error("what is larger than its share was refused")
	}
	a.leave(other, shareSmallReads, 15)
	if a.enter(other, shareSmallReads, 1000) {
		t.Error("two are larger than their share")
	}
	if requests, bytes, _ := a.inflight(); requests != 2 || bytes != 1060 {
		t.Errorf("%d requests, %d bytes", requests, bytes)
	}
	a.leave(one, shareSmallReads, 1000)
	a.leave(one, shareSmallReads, 60)
	if requests, bytes, _ := a.inflight(); requests != 0 || bytes != 0 || a.refused.Load() != 4 {
		t.Errorf("%d requests, %d bytes, %d refused", requests, bytes, a.refused.Load())
	}
}

// TestNoConnectionTakesAWholeShare: a connection alone gets half of its bytes, of requests and of
// answers; its answers leave the count with it.
func TestNoConnectionTakesAWholeShare(t *testing.T) {
	var a admission
	a.init(100, 16<<20) // 4 MiB of large writes, and 3 MiB of answers
	one, other := new(connection), new(connection)
	const parts, part, answer = 16, 128 << 10, 96 << 10
	for i := range parts + 1 {
		if got := a.enter(one, shareLargeWrites, part); got != (i < parts) {
			t.Errorf("request %d of one connection was admitted: %v", i, got)
		}
		if _, err := a.charge(one, answer, false); (err == nil) != (i < parts) {
			t.Errorf("answer %d of one connection: %v", i, err)
		}
	}
	if !a.enter(other, shareLargeWrites, part) {
		t.Error("one connection starves another")
	}
	held, err := a.charge(other, answer/2, false)
	if err != nil || held == nil {
		t.Fatal("one connection's answers starve another's")
	}
	if !a.answersFull(one) || a.answersFull(other) {
		t.Error("the wrong connection is full")
	}
	if _, err := a.charge(one, answer, true); err != nil {
		t.Error("the answer to a write was refused")
	}
	one.end(&a)
	held.release()
	held.release()
	for range parts {
		a.leave(one, shareLargeWrites, part)
	}
	a.leave(other, shareLargeWrites, part)
	if requests, bytes, answers := a.inflight(); requests != 0 || bytes != 0 || answers != 0 {
		t.Errorf("%d requests, %d bytes, answers of %d", requests, bytes, answers)
	}
}

// TestGreedyConnectionsLeaveRoomForOthers: each of several connections takes all that it gets, and
// a further one still finds room.
func TestGreedyConnectionsLeaveRoomForOthers(t *testing.T) {
	var a admission
	a.init(1000, 64<<20) // 16 MiB each of large writes and of answers
	const part = 64 << 10
	for i := range 12 {
		greedy := new(connection)
		requests, answers := 0, 0
		for a.enter(greedy, shareLargeWrites, part) {
			requests++
		}
		for {
			if _, err := a.charge(greedy, part, false); err != nil {
				break
			}
			answers++
		}
		if requests == 0 || answers == 0 || i == 0 && (requests < 100 || answers < 90) {
			t.Fatalf("connection %d got %d requests and %d answers", i, requests, answers)
		}
	}
	one := new(connection)
	if !a.enter(one, shareLargeWrites, part) {
		t.Error("a request of a connection that holds nothing was refused")
	}
	if _, err := a.charge(one, part, false); err != nil || a.answersFull(new(connection)) {
		t.Errorf("an answer for a connection that holds nothing: %v", err)
	}
}

// TestGreedyConnectionsLeaveRoomToReceive is the same for messages that are being received, which clients may leave half-sent, again and again.
func TestGreedyConnectionsLeaveRoomToReceive(t *testing.T) {
	var r receiving
	r.init(64<<20, 0, 0) // 16 MiB of large messages, and 32 MiB of small ones
	for name, s := range map[string]*receivingShare{"large": &r.large, "small": &r.small} {
		const part = 64 << 10
		for range 6 {
			greedy, messages := int64(0), 0
			for s.add(&greedy, owned{}, part) {
				messages++
			}
			if messages < 2 {
				t.Fatalf("%s: a connection sends %d messages", name, messages)
			}
		}
		one := int64(0)
		if !s.add(&one, owned{}, part) {
			t.Errorf("%s: a message of a connection that sends nothing else was refused", name)
		}
	}
}

func TestOverloadIsAnsweredAtOnceAndEnds(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightRequests = 2 })
	release := h.holdSyncs(t)
	ctx := testContext(t)
	done := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC})
			done <- err
		}()
	}
	eventually(t, "two are in flight", func() bool { n, _, _ := h.admission.inflight(); return n == 2 })
	_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k")}) // nothing that it could wait for ends
	f := failureOf(t, err)
	f.want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
	if f.retry == 0 {
		t.Error("no advice to retry")
	}
	if _, err := h.kv.Get(ctx, &pb.GetRequest{Key: []byte("other")}); err != nil {
		t.Errorf("writes starve reads: %v", err)
	}
	release()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	h.get(t, "k")
}

func TestExpiredRequestIsNotExecuted(t *testing.T) {
	h := mustStart(t)
	conn := h.connections.admit(nil)
	defer h.connections.release(conn)
	ctx, cancel := context.WithDeadline(peer.NewContext(context.Background(), &peer.Peer{AuthInfo: conn}), time.Now().Add(-time.Second))
	defer cancel()
	ran := false
	_, err := h.unary(ctx, &pb.PutRequest{Key: []byte("k")}, nil, func(context.Context, any) (any, error) {
		ran = true
		return nil, nil
	})
	failureOf(t, err).want(t, codes.DeadlineExceeded, pb.ErrorReason_ERROR_REASON_EXPIRED_BEFORE_START)
	if ran {
		t.Error("the request was executed")
	}
}

func TestDeadlineEndsTheWaitForTheDisk(t *testing.T) {
	h := mustStart(t)
	release := h.holdSyncs(t)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC})
	if st := statusOf(err); st.Code() != codes.DeadlineExceeded || len(st.Details()) != 0 {
		t.Fatalf("got %v", st)
	}
	release() // of the one that syncs for all
	eventually(t, "the request is given back", func() bool { n, _, _ := h.admission.inflight(); return n == 0 })
}

func TestDrainFinishesRunningRequests(t *testing.T) {
	h := mustStart(t)
	release := h.holdSyncs(t)
	done := make(chan error, 1)
	go func() {
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Durability: pb.Durability_DURABILITY_SYNC})
		done <- err
	}()
	eventually(t, "it runs", func() bool { n, _, _ := h.admission.inflight(); return n == 1 })
	stopped := make(chan error, 1)
	go func() { stopped <- h.stop() }()
	eventually(t, "draining", h.drain.active.Load)
	if code, _ := httpGet(t, h, "/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz says %d while draining", code)
	}
	if code, _ := httpGet(t, h, "/healthz"); code != http.StatusOK {
		t.Errorf("/healthz says %d while draining", code)
	}
	release()
	if err := <-done; err != nil {
		t.Errorf("the running request was not finished: %v", err)
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if got := mustStartOn(t, h.disk).get(t, "k"); string(got.Value) != "v" {
		t.Errorf("acknowledged and lost: %v", got)
	}
}

func TestDrainTimeoutCutsOffWhatDoesNotEnd(t *testing.T) {
	stopBesideAStream(t, mustStart(t, func(c *config.Config) { c.DrainTimeout = 50 * time.Millisecond }))
}

// TestSecondSignalEndsTheDrain sends a second signal during the drain: nothing that was written is
// lost.
func TestSecondSignalEndsTheDrain(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.DrainTimeout = time.Minute })
	second := make(chan struct{})
	h.drain.cutOff = second
	h.put(t, "k", "v")
	time.AfterFunc(50*time.Millisecond, func() { close(second) })
	stopBesideAStream(t, h)
	if got := mustStartOn(t, h.disk).get(t, "k"); string(got.Value) != "v" {
		t.Errorf("lost: %v", got)
	}
}

// stopBesideAStream stops a server on which a stream goes on for as long as it is let, which is the time of testContext.
func stopBesideAStream(t *testing.T, h *harness) {
	t.Helper()
	h.mustOpenHealthStream(t)
	start := time.Now()
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("stopping took %v", took)
	}
}

// mustOpenHealthStream opens a stream that no drain ends but by its timeout.
func (h *harness) mustOpenHealthStream(t *testing.T) {
	t.Helper()
	stream, err := h.conn.NewStream(testContext(t), &healthStreamDesc, healthpb.Health_Watch_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(&healthpb.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := stream.RecvMsg(new(healthpb.HealthCheckResponse)); err != nil { // the server has it
		t.Fatal(err)
	}
}

var healthStreamDesc = healthpb.Health_ServiceDesc.Streams[0]

func TestFailedLogShowsInEverythingAndReadsGoOn(t *testing.T) {
	h := mustStart(t)
	h.put(t, "before", "v")
	eventually(t, "durable", func() bool { return h.store.Durable() == h.store.Visible() })
	h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Sticky: true, Nth: 1})
	ctx := testContext(t)
	_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC})
	failureOf(t, err).want(t, codes.Internal, pb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, "epoch", "cause")
	_, err = h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_ASYNC})
	failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_READ_ONLY, "cause")
	if got := h.get(t, "before"); string(got.Value) != "v" {
		t.Errorf("reads do not go on: %v", got)
	}
	_, err = h.kv.Get(ctx, &pb.GetRequest{Key: []byte("k")}) // it would reveal what may be lost
	failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_READ_ONLY, "cause")

	stream := h.pipeline(t, ctx)
	mustSend(t, stream, getRequest(1, "before"), putRequest(2, "k", "v", 0), getRequest(3, "k"))
	for range 3 {
		if got := mustRecv(t, stream); (got.GetError() != nil) != (got.Id != 1) {
			t.Errorf("pipeline: %v", got)
		}
	}
	status, err := h.admin.Status(ctx, &pb.StatusRequest{})
	if err != nil || status.Health.State != pb.Health_STATE_READ_ONLY || status.Health.Cause == "" {
		t.Errorf("status: %v, %v", status.GetHealth(), err)
	}
	eventually(t, "grpc.health.v1 says so", func() bool {
		got, err := healthpb.NewHealthClient(h.conn).Check(ctx, &healthpb.HealthCheckRequest{Service: "epochkv.v1.KVService"})
		return err == nil && got.Status == healthpb.HealthCheckResponse_NOT_SERVING
	})
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := httpGet(t, h, path); code != http.StatusServiceUnavailable || body == "" {
			t.Errorf("%s says %d %q", path, code, body)
		}
	}
	if _, metrics := httpGet(t, h, "/metrics"); !strings.Contains(metrics, "\nkvserver_failed 1\n") {
		t.Error("metrics do not say so")
	}
	if !strings.Contains(h.log.String(), "accepts no more writes") {
		t.Error("the log does not say so")
	}
}

func TestPipelineAnswersEveryWriteThatAFailedLogHolds(t *testing.T) {
	h := mustStart(t)
	stream := h.pipeline(t, testContext(t))
	h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Sticky: true, Nth: 1, Delay: 50 * time.Millisecond})
	const n = 100
	for i := range uint64(n) {
		mustSend(t, stream, putRequest(i, "k", "v", pb.Durability_DURABILITY_SYNC))
	}
	seen := map[uint64]bool{}
	for range n {
		got := mustRecv(t, stream)
		if got.GetError() == nil || seen[got.Id] {
			t.Fatalf("got %v", got)
		}
		seen[got.Id] = true
	}
}

func TestFullDiskIsReportedWithAdviceAndReadsGoOn(t *testing.T) {
	disk := vfs.NewMem()
	h := mustStartOn(t, disk, func(c *config.Config) { c.SegmentSize, c.MemtableSize = config.MiB, 2*config.MiB })
	h.put(t, "k", "v")
	disk.SetCapacity(1)
	value := make([]byte, 32<<10)
	var err error
	for i := 0; i < 1000 && err == nil; i++ {
		_, err = h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte{byte(i), 1}, Value: value, Durability: pb.Durability_DURABILITY_ASYNC})
	}
	f := failureOf(t, err)
	if f.reason != pb.ErrorReason_ERROR_REASON_DISK_FULL.Reason() || f.retry == 0 {
		t.Errorf("got %+v", f)
	}
	if got := h.get(t, "k"); string(got.Value) != "v" {
		t.Errorf("got %v", got)
	}
	if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("k")}); err != nil {
		t.Errorf("a deletion: %v", err)
	}
	deleted, err := h.kv.DeleteRange(testContext(t), &pb.DeleteRangeRequest{Range: new(pb.KeyRange)})
	if err != nil || deleted.Deleted == 0 {
		t.Errorf("a range deletion: %v, %v", deleted, err)
	}
	status, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
	if err != nil || status.Health.State != pb.Health_STATE_SERVING || !strings.Contains(status.Health.Cause, "reads and deletions are served") {
		t.Errorf("status: %v, %v", status.GetHealth(), err)
	}
}

func httpGet(t *testing.T, h *harness, path string) (int, string) {
	t.Helper()
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://"+h.HTTPAddress()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := client.Do(h.authorize(r))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }() // all of it has been read
	var body strings.Builder
	if _, err := copyBody(&body, res); err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, body.String()
}

func TestPlaintextCredentialsAreWhatClientsUse(t *testing.T) {
	c := connections{max: 1, requests: new(telemetry.Requests)}
	if got, want := c.credentials(nil).Info().SecurityProtocol, insecure.NewCredentials().Info().SecurityProtocol; got != want {
		t.Errorf("security protocol %q, want %q", got, want)
	}
}
