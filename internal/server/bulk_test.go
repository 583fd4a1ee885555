package server

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/vfs"
)

// bulk loads n entries with values of a size, in messages of ten.
func (h *harness) bulk(t testing.TB, n, size int, commit bool) (*pb.BulkLoadResponse, error) {
	t.Helper()
	stream, err := h.kv.BulkLoad(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	value := []byte(strings.Repeat("v", size))
	for i := 0; i < n; i += 10 {
		req := &pb.BulkLoadRequest{Commit: commit && i+10 >= n}
		for j := i; j < min(n, i+10); j++ {
			req.Entries = append(req.Entries, &pb.BulkEntry{Key: fmt.Appendf(nil, "key-%05d", j), Value: value})
		}
		if err := stream.Send(req); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	return stream.CloseAndRecv()
}

// TestBulkLoadNeedsItsCommit: a stream that merely ends loads nothing.
func TestBulkLoadNeedsItsCommit(t *testing.T) {
	h := mustStart(t)
	_, err := h.bulk(t, 100, 10, false)
	f := failureOf(t, err)
	f.want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	if f.field != "commit" {
		t.Errorf("field %q", f.field)
	}
	if h.get(t, "key-00000").Found {
		t.Error("something was loaded")
	}
	loaded, err := h.bulk(t, 100, 10, true)
	if err != nil || loaded.Keys != 100 || loaded.Epoch == 0 {
		t.Fatalf("%v, %v", loaded, err)
	}
	if got := h.get(t, "key-00099"); !got.Found || got.Epoch != loaded.Epoch {
		t.Errorf("%v", got)
	}
}

// TestBulkLoadKeepsTheLimits and says which key broke them.
func TestBulkLoadKeepsTheLimits(t *testing.T) {
	h := mustStart(t)
	stream, err := h.kv.BulkLoad(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	_ = stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: make([]byte, 2049)}}, Commit: true})
	_, err = stream.CloseAndRecv()
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_TOO_LARGE, "limit", "size")
}

// TestDrainEndsABulkLoadThatIsBeingReceived at once, and nothing of it is left.
func TestDrainEndsABulkLoadThatIsBeingReceived(t *testing.T) {
	h := mustStart(t)
	stream, err := h.kv.BulkLoad(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("k")}}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the load is under way", func() bool { return h.counters.streams.Load() == 1 })
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	_, err = stream.CloseAndRecv()
	failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
	names, err := h.disk.List("data")
	for _, name := range names {
		if strings.HasSuffix(name, ".tmp") {
			t.Errorf("%s is left", name)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestAdminSeesTheDataFile: checkpoint, space, status and verify of a sound store agree.
func TestAdminSeesTheDataFile(t *testing.T) {
	h := mustStart(t)
	if _, err := h.bulk(t, 1000, 100, true); err != nil {
		t.Fatal(err)
	}
	newest := h.put(t, "other/1", strings.Repeat("L", 100_000))
	ctx := testContext(t)
	checkpoint, err := h.admin.Checkpoint(ctx, &pb.CheckpointRequest{})
	if err != nil || checkpoint.Epoch != newest {
		t.Fatalf("%v, %v", checkpoint, err)
	}
	space, err := h.admin.Space(ctx, &pb.SpaceRequest{ByPrefix: true})
	if err != nil {
		t.Fatal(err)
	}
	if space.LiveBytes+space.PendingBytes+space.FreeBytes != space.FileBytes {
		t.Errorf("%d live, %d garbage and %d free of %d", space.LiveBytes, space.PendingBytes, space.FreeBytes, space.FileBytes)
	}
	k := space.Pages
	if (k.Tree+k.Blobs+k.Overflow+k.IndirectionTable+k.AllocationMap)*uint64(space.PageBytes) != space.LiveBytes || k.Overflow < 12 {
		t.Errorf("pages: %v of %d bytes", k, space.LiveBytes)
	}
	if len(space.Prefixes) != 2 || string(space.Prefixes[1].Prefix) != "other/" && string(space.Prefixes[0].Prefix) != "other/" {
		t.Errorf("prefixes: %v", space.Prefixes)
	}
	status, err := h.admin.Status(ctx, &pb.StatusRequest{})
	if err != nil || status.Tree.Keys != 1001 || status.Tree.BulkLoads != 1 || status.Tree.Epoch != newest {
		t.Errorf("status: %v, %v", status.GetTree(), err)
	}
	report := h.verify(t)
	if report.DamageTotal != 0 || !report.Accounted || report.Keys != 1001 || report.Pages != k.Tree+k.Blobs+k.Overflow+k.IndirectionTable {
		t.Errorf("report: %v, pages %v", report, k)
	}
}

func (h *harness) verify(t testing.TB) *pb.VerifyReport {
	t.Helper()
	stream, err := h.admin.Verify(testContext(t), &pb.VerifyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if report := r.GetReport(); report != nil {
			return report
		}
	}
}

// mustStartDamaged starts a server with 3000 keys of which one leaf was damaged while it was down.
func mustStartDamaged(t *testing.T, adjust ...func(*config.Config)) *harness {
	t.Helper()
	disk := vfs.NewMem()
	h := mustStartOn(t, disk)
	if _, err := h.bulk(t, 3000, 100, true); err != nil {
		t.Fatal(err)
	}
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	flip(t, disk, "data/data.ekv", 10)
	return mustStartOn(t, disk, adjust...)
}

// TestDamagedPageIsServedAsDataLossAndCounted damages one leaf while the server runs on a cold
// cache.
func TestDamagedPageIsServedAsDataLossAndCounted(t *testing.T) {
	h := mustStartDamaged(t)
	lost := 0
	for i := range 3000 {
		got, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: fmt.Appendf(nil, "key-%05d", i)})
		if err == nil {
			if !got.Found {
				t.Fatalf("key %d is missing", i)
			}
			continue
		}
		lost++
		failureOf(t, err).want(t, codes.DataLoss, pb.ErrorReason_ERROR_REASON_CORRUPTION, h.damageFields()...)
	}
	if lost == 0 || lost > 200 {
		t.Errorf("%d keys are lost", lost)
	}
	if report := h.verify(t); report.DamageTotal != 1 || len(report.Damages[0].KeyLower) == 0 || report.Accounted {
		t.Errorf("report: %v", report)
	}
	if _, text := httpGet(t, h, "/metrics"); !strings.Contains(text, fmt.Sprintf("kvserver_damaged_reads_total %d\n", lost)) {
		t.Errorf("%d reads met damage, the metrics say otherwise", lost)
	}
}

// flip changes a byte of the nth leaf of a file.
func flip(t *testing.T, disk *vfs.Mem, name string, n int) {
	t.Helper()
	const pageSize, leaf = 8192, 1
	f, err := disk.Open(name, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	page := make([]byte, pageSize)
	for at := int64(2 * pageSize); n > 0; at += pageSize {
		if _, err := f.ReadAt(page, at); err != nil {
			t.Fatal(err)
		}
		if page[4] != leaf {
			continue
		}
		if n--; n == 0 {
			page[pageSize/2] ^= 1
			if _, err := f.WriteAt(page, at); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}
