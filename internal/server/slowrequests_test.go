package server

import (
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/vfs"
)

const slowThreshold = 20 * time.Millisecond

func withSlow(c *config.Config) {
	c.SlowRequests.Threshold = slowThreshold
	c.SlowRequests.KeyBytes = 4
}

// slow returns the slow requests by method. They are reported after their answer has been sent.
func (h *harness) slow(t *testing.T, methods ...string) map[string]*pb.SlowRequest {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		out, err := h.admin.SlowRequests(testContext(t), &pb.SlowRequestsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		all, missing := map[string]*pb.SlowRequest{}, ""
		for _, r := range out.GetRequests() {
			all[r.GetMethod()] = r
		}
		for _, m := range methods {
			if all[m] == nil {
				missing = m
			}
		}
		if missing == "" {
			return all
		}
		if time.Now().After(deadline) {
			t.Fatalf("no slow %s in %v", missing, out)
		}
	}
}

// mustSpend fails unless most of the time of a request was spent in one part, and nothing beyond it was counted.
func mustSpend(t *testing.T, r *pb.SlowRequest, part string) {
	t.Helper()
	parts := map[string]time.Duration{
		"queue": r.GetQueue().AsDuration(), "latch": r.GetLatch().AsDuration(), "memory": r.GetMemory().AsDuration(),
		"sync": r.GetSync().AsDuration(), "pages": r.GetPages().AsDuration(), "client": r.GetClient().AsDuration(),
	}
	var sum time.Duration
	for _, d := range parts {
		sum += d
	}
	if took := r.GetTook().AsDuration(); parts[part] < slowThreshold || sum > took {
		t.Errorf("%s took %v: %v; expected most of it in %s", r.GetMethod(), took, parts, part)
	}
	if r.GetPeer() == "" || time.Since(r.GetEnded().AsTime()).Abs() > time.Minute {
		t.Errorf("%s: peer %q, ended %v", r.GetMethod(), r.GetPeer(), r.GetEnded().AsTime())
	}
}

// TestSlowRequestsNameTheSync: whatever way a write comes, the wait for its sync is known.
func TestSlowRequestsNameTheSync(t *testing.T) {
	h := mustStart(t, withSlow)
	ctx := testContext(t)
	txns := pb.NewTransactionServiceClient(h.conn)
	h.slowSyncs(3 * slowThreshold)
	id := newRequestID(t)
	if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("some key"), Value: []byte("v"), RequestId: id}); err != nil {
		t.Fatal(err)
	}
	pipe := h.pipeline(t, ctx)
	if err := pipe.Send(&pb.PipelineRequest{Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: []byte("piped")}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := pipe.Recv(); err != nil {
		t.Fatal(err)
	}
	put := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte("executed")}
	if _, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: put}}}}); err != nil {
		t.Fatal(err)
	}
	stream, err := txns.Transact(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, req := range []*pb.TransactRequest{
		{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}},
		{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{put}}}},
		{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}},
	} {
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		if out, err := stream.Recv(); err != nil || out.GetError() != nil {
			t.Fatal(out, err)
		}
	}
	all := h.slow(t, "Put", "Delete", "Execute", "Commit")
	for _, m := range []string{"Put", "Delete", "Execute", "Commit"} {
		mustSpend(t, all[m], "sync")
	}
	if p := all["Put"]; string(p.GetKeyPrefix()) != "some" || string(p.GetRequestId()) != string(id) || p.GetRequestBytes() == 0 || p.GetCode() != "OK" {
		t.Errorf("put: %v", p)
	}
	if text := h.log.String(); !strings.Contains(text, "a request was slow") || strings.Contains(text, "some") {
		t.Errorf("the log: %s", text)
	}
}

// TestSlowRequestsNameThePages: a get, a pipelined get and a scan that wait for the device.
func TestSlowRequestsNameThePages(t *testing.T) {
	h, reads, release := startCold(t, withSlow, func(c *config.Config) { c.Transport = config.Transport(*transportFlag) })
	reads.Remove()
	release()
	h.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow, Delay: 3 * slowThreshold})
	ctx := testContext(t)
	if _, err := h.kv.Get(ctx, &pb.GetRequest{Key: coldKey(10)}); err != nil {
		t.Fatal(err)
	}
	pipe := h.pipeline(t, ctx)
	if err := pipe.Send(&pb.PipelineRequest{Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{coldKey(20), coldKey(40)}}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := pipe.Recv(); err != nil {
		t.Fatal(err)
	}
	if _, err := h.scanOnce(t, &pb.ScanRequest{Range: &pb.KeyRange{Start: coldKey(50)}, Limit: 1}); err != nil {
		t.Fatal(err)
	}
	all := h.slow(t, "Get", "BatchGet", "Scan")
	for _, m := range []string{"Get", "BatchGet", "Scan"} {
		if mustSpend(t, all[m], "pages"); all[m].GetPagesRead() == 0 {
			t.Errorf("%s has read no page", m)
		}
	}
}

// TestStreamsAndFastRequestsAreNotSlow: a stream is open for as long as its client wants. On a busy machine any get may be slow.
func TestStreamsAndFastRequestsAreNotSlow(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.SlowRequests.Threshold = time.Hour })
	h.observer.reportFrom(slowThreshold)
	h.observer.slow.init(&h.config.SlowRequests)
	pipe := h.pipeline(t, testContext(t))
	time.Sleep(2 * slowThreshold)
	_ = pipe.CloseSend()
	if _, err := pipe.Recv(); err == nil {
		t.Fatal("the stream did not end")
	}
	for range 10 {
		h.get(t, "key")
	}
	all, _ := h.observer.slow.list(time.Now())
	for _, r := range all {
		if r.took < slowThreshold || r.method != telemetry.MethodGet {
			t.Errorf("%+v", r)
		}
	}
}

// TestSlowRequestsAreBounded: the slowest stay, old ones leave, and neither bound is exceeded.
func TestSlowRequestsAreBounded(t *testing.T) {
	for _, c := range []config.SlowRequests{{Entries: 4, Size: config.MiB}, {Entries: 1000, Size: 4 * slowRequestBytes}} {
		var r slowRequests
		r.init(&c)
		now := time.Now()
		for i := range 100 {
			r.add(&slowRequest{ended: now, took: time.Duration(i*37%100) * time.Second, peer: strings.Repeat("p", peerBytesMax)})
		}
		all, total := r.list(now)
		if got := fmt.Sprint(len(all), total, all[0].took, all[3].took); got != "4 100 1m39s 1m36s" {
			t.Errorf("%+v: %s", c, got)
		}
		later := now.Add(slowRequestAge + time.Second)
		r.add(&slowRequest{ended: later, took: time.Second})
		if all, _ := r.list(later); len(all) != 1 || all[0].took != time.Second {
			t.Errorf("an hour later: %+v", all)
		}
	}
	var off observer
	if off.init(&config.SlowRequests{}); off.from.Load() != math.MaxInt64 {
		t.Errorf("a threshold of 0 reports from %v", time.Duration(off.from.Load()))
	}
}

// TestASlowRequestKeepsNoNoteOfTheAuditLog: what that says of a request may be many times as large as what an entry takes at most.
func TestASlowRequestKeepsNoNoteOfTheAuditLog(t *testing.T) {
	s := &Server{clock: clock{started: time.Now()}}
	s.observer.slow.entriesMax, s.observer.slow.bytesMax = 1, slowRequestBytes
	s.log.init(slog.New(slog.DiscardHandler), s.clock.now)
	s.reportSlow(nil, &requestEnd{method: telemetry.MethodGet}, &details{note: new(auditNote), queue: time.Second}, time.Minute)
	list, _ := s.observer.slow.list(time.Now())
	if len(list) != 1 || list[0].details.queue != time.Second || list[0].details.note != nil {
		t.Errorf("%+v", list)
	}
}
