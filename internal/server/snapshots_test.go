package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// fillLarge writes so much that the windows of startScan take little of a scan of it.
func (h *harness) fillLarge(t testing.TB) {
	t.Helper()
	for i := range 64 {
		h.put(t, fmt.Sprintf("%03d", i), strings.Repeat("v", 100<<10))
	}
}

// startScan begins a scan, on a connection of its own, and reads its first page. The client's windows
// are fixed: otherwise they grow with what it measures of the network, up to 16 MiB, so that on a
// busy machine a scan that nothing reads could run to its end.
func (h *harness) startScan(t testing.TB, r *pb.ScanRequest) grpc.ServerStreamingClient[pb.ScanResponse] {
	t.Helper()
	const windowBytes = 64 << 10
	conn := h.dial(t, grpc.WithStaticStreamWindowSize(windowBytes), grpc.WithStaticConnWindowSize(windowBytes))
	stream, err := pb.NewKVServiceClient(conn).Scan(testContext(t), r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	return stream
}

func (h *harness) snapshotList(t testing.TB) []*pb.SnapshotInfo {
	t.Helper()
	list, err := h.admin.ListSnapshots(testContext(t), new(pb.ListSnapshotsRequest))
	if err != nil {
		t.Fatal(err)
	}
	return list.Snapshots
}

func every(*pb.SnapshotInfo) bool { return true }

// theSnapshot waits until there is one snapshot of a kind, and returns it.
func (h *harness) theSnapshot(t testing.TB, kind pb.SnapshotInfo_Kind, holds func(*pb.SnapshotInfo) bool) (found *pb.SnapshotInfo) {
	t.Helper()
	eventually(t, "a snapshot of kind "+kind.Name(), func() bool {
		for _, s := range h.snapshotList(t) {
			if s.Kind == kind && holds(s) {
				found = s
				return true
			}
		}
		return false
	})
	return found
}

// waitingSince is when a request began to wait for its client, if it does.
func (o *openSnapshot) waitingSince() (since time.Duration, waits bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.since, o.waiting
}

// stuckScan is a scan that waits for its client, with its row. A scan also waits for a moment while the
// transport takes a page, and then goes on.
func (h *harness) stuckScan(t testing.TB, r *pb.ScanRequest) (grpc.ServerStreamingClient[pb.ScanResponse], *openSnapshot) {
	t.Helper()
	stream := h.startScan(t, r)
	const stuck = 50 * time.Millisecond
	info := h.theSnapshot(t, pb.SnapshotInfo_KIND_SCAN, func(s *pb.SnapshotInfo) bool { return s.Idle != nil && s.Idle.AsDuration() >= stuck })
	return stream, h.snapshots.find(info.Id)
}

func (h *harness) endSnapshot(t testing.TB, id uint64) {
	t.Helper()
	if _, err := h.admin.EndSnapshot(testContext(t), &pb.EndSnapshotRequest{Id: id}); err != nil {
		t.Fatal(err)
	}
}

// untilError reads a stream to its error.
func untilError(stream grpc.ServerStreamingClient[pb.ScanResponse]) error {
	for {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
}

// wantGone checks that a request lost its snapshot for a cause.
func wantGone(t testing.TB, err error, cause string, epoch uint64) {
	t.Helper()
	f := failureOf(t, err)
	f.want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "cause", "epoch", "oldest")
	if f.metadata["cause"] != cause || f.metadata["epoch"] != fmt.Sprint(epoch) {
		t.Errorf("metadata %v", f.metadata)
	}
}

// TestScanOfAStuckClientLosesItsSnapshot: a client that reads a page and then no more keeps
// versions for --snapshot-timeout, and not for as long as it stays connected.
func TestScanOfAStuckClientLosesItsSnapshot(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.SnapshotTimeout = 100 * time.Millisecond })
	h.fillLarge(t)
	stream := h.startScan(t, &pb.ScanRequest{Tokens: pb.ResumeTokens_RESUME_TOKENS_INNER})
	at := uint64(h.store.Visible())
	h.put(t, "000", "newer")
	eventually(t, "min-visible moves on", func() bool { return h.store.MinVisible() > 64 })
	eventually(t, "the scan gives back what it holds of the store", func() bool {
		stats := h.store.Stats()
		return stats.SessionsOpen == 0 && stats.Snapshots.Leases == 0
	})
	wantGone(t, untilError(stream), "timeout", at)
	eventually(t, "its pages have been sent", func() bool {
		requests, bytes, _ := h.admission.inflight()
		return requests == 0 && bytes == 0
	})
	if log := h.log.String(); !strings.Contains(log, "a snapshot is ended because its client takes nothing") {
		t.Errorf("the log does not tell:\n%s", log)
	}
	_, metrics := httpGet(t, h, "/metrics")
	if !strings.Contains(metrics, `kvserver_snapshots_ended_total{cause="timeout"} 1`) {
		t.Error("not counted")
	}
	if list := h.snapshotList(t); len(list) != 0 {
		t.Errorf("still listed: %v", list)
	}
}

// TestABulkLoadWhoseClientSendsNothingEnds, so that another one can begin. One whose client sends something now and then goes on.
func TestABulkLoadWhoseClientSendsNothingEnds(t *testing.T) {
	const timeout = 2 * time.Second // a busy machine may take a part of it between two messages
	h := mustStart(t, func(c *config.Config) { c.SnapshotTimeout = timeout })
	entry := func(key string) *pb.BulkLoadRequest {
		return &pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte(key)}}}
	}
	stuck, err := h.kv.BulkLoad(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := stuck.Send(entry("stuck")); err != nil {
		t.Fatal(err)
	}
	at := h.theSnapshot(t, pb.SnapshotInfo_KIND_BULK_LOAD, every).Epoch
	wantGone(t, stuck.RecvMsg(new(pb.BulkLoadResponse)), "timeout", at)

	slow, err := h.kv.BulkLoad(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		if err := slow.Send(entry(fmt.Sprint("slow", i))); err != nil {
			t.Fatal(err)
		}
		time.Sleep(timeout / 5)
	}
	if err := slow.Send(&pb.BulkLoadRequest{Commit: true}); err != nil {
		t.Fatal(err)
	}
	if loaded, err := slow.CloseAndRecv(); err != nil || loaded.Keys != 6 {
		t.Errorf("%v, %v", loaded, err)
	}
}

// TestSnapshotOfAScanIsGivenUpWhileItWaits: at the moment at which the time is over, and for the
// scan that is stuck only.
func TestSnapshotOfAScanIsGivenUpWhileItWaits(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.SnapshotTimeout = time.Hour })
	h.fillLarge(t)
	stuck, row := h.stuckScan(t, &pb.ScanRequest{})
	proceeding := h.startScan(t, &pb.ScanRequest{PageBytes: 64 << 10})
	pages := 1
	stuckSince, _ := row.waitingSince()
	eventually(t, "the other scan waits later than the stuck one", func() bool {
		for _, o := range h.snapshots.list() {
			if since, waits := o.waitingSince(); o.id != row.id && waits && since > stuckSince {
				return true
			}
		}
		return false
	})
	h.expireSnapshots(stuckSince + time.Hour - 1)
	if n := len(h.snapshots.list()); n != 2 {
		t.Fatalf("%d snapshots a nanosecond before the time, want 2", n)
	}
	h.expireSnapshots(stuckSince + time.Hour)
	if n := h.store.Stats().Snapshots.Snapshots; n != 1 {
		t.Errorf("%d snapshots are held after the time, want 1", n)
	}
	wantGone(t, untilError(stuck), "timeout", 64)
	for {
		if _, err := proceeding.Recv(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the scan that proceeds: %v", err)
		}
		pages++
	}
	if pages < 32 {
		t.Errorf("the scan that proceeds got %d pages", pages)
	}
}

// TestOperatorEndsEveryReaderThatKeepsVersions: by one id from one list.
func TestOperatorEndsEveryReaderThatKeepsVersions(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.SnapshotTimeout = 0 })
	h.fillLarge(t)
	ctx := testContext(t)
	leaves := new(pb.BatchWriteRequest) // so many that a count of keys has to keep to its rate
	for i := range 2000 {
		leaves.Mutations = append(leaves.Mutations, &pb.Mutation{
			Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "leaf-%04d", i), Value: []byte(strings.Repeat("v", 500)),
		})
	}
	if _, err := h.kv.BatchWrite(ctx, leaves); err != nil {
		t.Fatal(err)
	}
	at := uint64(h.store.Visible())
	var ended []uint64
	end := func(s *pb.SnapshotInfo) {
		t.Helper()
		if s.Kind != pb.SnapshotInfo_KIND_RESUME_TOKEN && s.Peer == "" || s.Age.AsDuration() <= 0 || s.Id == 0 || slices.Contains(ended, s.Id) {
			t.Errorf("listed %v", s)
		}
		h.endSnapshot(t, s.Id)
		_, err := h.admin.EndSnapshot(ctx, &pb.EndSnapshotRequest{Id: s.Id})
		failureOf(t, err).want(t, codes.NotFound, pb.ErrorReason_ERROR_REASON_SNAPSHOT_NOT_FOUND)
		ended = append(ended, s.Id)
	}

	stream, _ := h.stuckScan(t, &pb.ScanRequest{Tokens: pb.ResumeTokens_RESUME_TOKENS_INNER})
	s := h.theSnapshot(t, pb.SnapshotInfo_KIND_SCAN, every)
	if s.Epoch != at {
		t.Errorf("listed %v", s)
	}
	end(s)
	if n := h.store.Stats().Snapshots.Snapshots; n != 0 {
		t.Errorf("the scan still holds %d snapshots", n)
	}
	wantGone(t, untilError(stream), "operator", at)

	k := h.talk(t)
	k.begin()
	k.must(txnPutRequest("k", "v"))
	s = h.theSnapshot(t, pb.SnapshotInfo_KIND_TRANSACTION, every)
	end(s)
	_, err := k.hear()
	failureOf(t, err).want(t, codes.Aborted, pb.ErrorReason_ERROR_REASON_TXN_ENDED)

	stopped, cancel := context.WithCancel(ctx)
	tokens, err := h.kv.Scan(stopped, &pb.ScanRequest{Tokens: pb.ResumeTokens_RESUME_TOKENS_INNER})
	if err != nil {
		t.Fatal(err)
	}
	page, err := tokens.Recv()
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	h.put(t, "000", "newer")
	s = h.theSnapshot(t, pb.SnapshotInfo_KIND_RESUME_TOKEN, every)
	if s.Epoch != at || s.ExpiresIn.AsDuration() <= 0 {
		t.Errorf("listed %v", s)
	}
	end(s)
	eventually(t, "min-visible moves on", func() bool { return uint64(h.store.MinVisible()) > at })
	resumed, err := h.kv.Scan(ctx, &pb.ScanRequest{ResumeToken: page.ResumeToken})
	if err != nil {
		t.Fatal(err)
	}
	failureOf(t, untilError(resumed)).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "epoch", "oldest")

	load, err := h.kv.BulkLoad(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := load.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("loaded")}}}); err != nil {
		t.Fatal(err)
	}
	s = h.theSnapshot(t, pb.SnapshotInfo_KIND_BULK_LOAD, func(s *pb.SnapshotInfo) bool { return s.Idle != nil })
	end(s)
	_, err = load.CloseAndRecv()
	wantGone(t, err, "operator", s.Epoch)

	if _, err := h.admin.Checkpoint(ctx, new(pb.CheckpointRequest)); err != nil {
		t.Fatal(err)
	}
	verification, err := h.admin.Verify(ctx, &pb.VerifyRequest{PagesPerSecond: 1})
	if err != nil {
		t.Fatal(err)
	}
	s = h.theSnapshot(t, pb.SnapshotInfo_KIND_VERIFICATION, every)
	end(s)
	for err = error(nil); err == nil; {
		_, err = verification.Recv()
	}
	wantGone(t, err, "operator", s.Epoch)

	counted := make(chan error, 1)
	go func() {
		_, err := h.admin.Space(ctx, &pb.SpaceRequest{ByPrefix: true, PagesPerSecond: 1})
		counted <- err
	}()
	s = h.theSnapshot(t, pb.SnapshotInfo_KIND_SPACE, every)
	end(s)
	wantGone(t, <-counted, "operator", s.Epoch)

	if !slices.IsSorted(ended) {
		t.Errorf("ids %v are not ascending", ended)
	}
	if n := h.snapshots.stats(); n[0] != 0 || n[1] != uint64(len(ended)) {
		t.Errorf("counted %v, want %d by the operator", n, len(ended))
	}
	if list := h.snapshotList(t); len(list) != 0 {
		t.Errorf("still listed: %v", list)
	}
}

// TestEndingScansThatProceed ends scans at whatever they do. Each either returns its range or says
// that its snapshot is gone, and nothing is left of either.
func TestEndingScansThatProceed(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.SnapshotTimeout = time.Hour })
	h.fill(t, 500)
	want := numbered(0, 500)
	stop := make(chan struct{})
	var ending, scanning sync.WaitGroup
	ending.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			for _, o := range h.snapshots.list() {
				switch n % 8 {
				case 0:
					h.tryEndSnapshot(o.id)
				case 4:
					o.expire(h.clock.now() + 2*time.Hour)
				}
			}
			time.Sleep(20 * time.Microsecond)
		}
	})
	var mu sync.Mutex
	whole, gone := 0, 0
	for range 4 {
		scanning.Go(func() {
			for range 25 {
				stream, err := h.kv.Scan(testContext(t), &pb.ScanRequest{PageBytes: 1})
				if err != nil {
					t.Error(err)
					return
				}
				var got []string
				for err == nil {
					var page *pb.ScanResponse
					if page, err = stream.Recv(); err == nil {
						got = append(got, keysOf([]*pb.ScanResponse{page})...)
					}
				}
				mu.Lock()
				if errors.Is(err, io.EOF) {
					if whole++; !slices.Equal(got, want) {
						t.Errorf("a scan that ended in order returned %d keys", len(got))
					}
				} else {
					gone++
					failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "cause", "epoch", "oldest")
				}
				mu.Unlock()
			}
		})
	}
	scanning.Wait()
	close(stop)
	ending.Wait()
	t.Logf("%d scans were whole, %d lost their snapshot", whole, gone)
	eventually(t, "no snapshot is held", func() bool { return h.store.Stats().Snapshots.Snapshots == 0 })
}

// tryEndSnapshot ends a snapshot that may have ended already.
func (h *harness) tryEndSnapshot(id uint64) {
	_, _ = h.admin.EndSnapshot(context.Background(), &pb.EndSnapshotRequest{Id: id})
}
