package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Requests that wait in a server with `--audit-full block`: those of the direct transport keep no room of others, and a commit that waits for room ends.

// smallAudit is a queue of few lines.
func smallAudit(c *config.Config) { c.Audit.QueueSize = 64 * config.KiB }

// waitingReads is how many reads wait: no more than a connection may have sessions for.
const waitingReads = 50

// largeKey is a key of a value that is read alone.
func largeKey(i int) string {
	return fmt.Sprintf("cold/%04d/", i) + strings.Repeat("k", 240)
}

// startWaitingReads starts a server with large values that are not cached. Reads of the data file are held until release is called.
func startWaitingReads(t *testing.T) (h *harness, lines func() []auditLine, release func()) {
	t.Helper()
	disk := vfs.NewMem()
	first := mustStartUnchecked(t, disk)
	for i := range waitingReads {
		first.put(t, "before "+largeKey(i), "v") // Open may read the first leaf
		first.putValue(t, largeKey(i), 70_000)
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	h, lines = startAuditedOn(t, disk, withDirect, withBlockingAudit, smallAudit, func(c *config.Config) { c.Audit.Classes = "write,read" })
	until := make(chan struct{})
	release = sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	h.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow, Until: until})
	return h, lines, release
}

// leavesRoom waits until all requests are in flight and none has room for its line. Others then find some.
func (h *harness) leavesRoom(t *testing.T, requests int) {
	t.Helper()
	eventually(t, "all wait", func() bool { n, _, _ := h.admission.inflight(); return n == requests })
	eventually(t, "nothing has room for its line", func() bool { return h.observer.audit.stats().QueueBytes == 0 })
}

// bytesOfPipelines is what the answers of pipelines count that wait.
func (h *harness) bytesOfPipelines() (all int) {
	h.direct.streams.mu.Lock()
	defer h.direct.streams.mu.Unlock()
	for _, s := range h.direct.streams.all {
		if p, ok := s.(*directPipeline); ok {
			p.mu.Lock()
			all += p.bytes
			p.mu.Unlock()
		}
	}
	return all
}

// wantOneLineOfReads expects one line for each read.
func wantOneLineOfReads(t *testing.T, all []auditLine) {
	t.Helper()
	for i := range waitingReads {
		n := 0
		for _, l := range all {
			if slices.Equal(l.Reads, []string{largeKey(i)}) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("read %d has %d lines", i, n)
		}
	}
}

// TestReadsOfAPipelineThatWaitLeaveRoomInTheAuditLog: they wait for the device, and when their values are large, for the client to take those before.
func TestReadsOfAPipelineThatWaitLeaveRoomInTheAuditLog(t *testing.T) {
	h, lines, release := startWaitingReads(t)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	stream, err := pb.NewKVServiceClient(h.dialDeaf(t)).Pipeline(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for i := range waitingReads {
		mustSend(t, stream, getRequest(uint64(i), largeKey(i)))
	}
	h.leavesRoom(t, waitingReads)
	bytes := waitingReads * len(largeKey(0))
	eventually(t, "what the audit log says of them is counted", func() bool { return h.bytesOfPipelines() == bytes })
	release()
	eventually(t, "the first is answered", func() bool { return h.linesOf(t, "Get") == 1 })
	h.leavesRoom(t, waitingReads-1)
	eventually(t, "the answer is not counted any more", func() bool { return h.bytesOfPipelines() == bytes-len(largeKey(0)) })
	h.put(t, "of another client", "v")
	cancel()
	eventually(t, "all have ended", func() bool { return h.holdsNothing() && h.linesOf(t, "Get") == waitingReads })
	wantOneLineOfReads(t, lines())
}

// TestReadsThatWaitForTheDeviceLeaveRoomInTheAuditLog: requests of their own, of which each has its line.
func TestReadsThatWaitForTheDeviceLeaveRoomInTheAuditLog(t *testing.T) {
	h, lines, release := startWaitingReads(t)
	var all sync.WaitGroup
	for i := range waitingReads {
		all.Go(func() { h.get(t, largeKey(i)) })
	}
	h.leavesRoom(t, waitingReads)
	h.put(t, "of another client", "v")
	release()
	all.Wait()
	wantOneLineOfReads(t, lines())
}

// TestWritesThatWaitForTheDiskLeaveRoomInTheAuditLog: writes of a pipeline, and requests of their own.
func TestWritesThatWaitForTheDiskLeaveRoomInTheAuditLog(t *testing.T) {
	h, lines := startAudited(t, withDirect, withBlockingAudit, smallAudit)
	release := h.holdSyncs(t)
	const each = 50 // of both kinds; the lines of all need more room than there is
	var keys []string
	stream, err := h.kv.Pipeline(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range each {
		one, two := largeKey(i), largeKey(each+i)
		keys = append(keys, one, two)
		mustSend(t, stream, putRequest(uint64(i), one, "v", pb.Durability_DURABILITY_SYNC))
		all.Go(func() {
			if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte(two), Value: []byte("v"), Durability: pb.Durability_DURABILITY_SYNC}); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "all are written", func() bool { return h.store.Visible() >= 2*each })
	h.leavesRoom(t, each) // requests of pipelines are in flight only while they are executed
	h.put(t, "of another client", "v")
	release()
	for range each {
		mustRecv(t, stream)
	}
	all.Wait()
	wantOneLineEach(t, lines(), append(keys, "of another client")...)
}

// endsInside opens a transaction, has its commit wait and the transaction be ended, and expects that the wait ends with the reason.
func (h *harness) endsInside(t *testing.T, end func(*openTxn), reason pb.ErrorReason, counted telemetry.AbortReason) {
	t.Helper()
	k := h.talk(t)
	id := k.begin().Id
	k.must(txnPutRequest("of the transaction", "v"))
	row := h.Server.transactions.find(id)
	if err := k.stream.Send(commitRequest); err != nil {
		t.Fatal(err)
	}
	if end != nil {
		eventually(t, "the commit has come", func() bool { n, _, _ := h.admission.inflight(); return n == 1 })
		end(row)
	}
	_, err := k.hear()
	if f := failureOf(t, err); f.code != codes.Aborted || f.reason != reason.Reason() {
		t.Errorf("it ended with %v", err)
	}
	eventually(t, "it has ended", func() bool { return h.Server.transactions.stats().Open == 0 && h.counters.streams.Load() == 0 })
	if n := h.Server.transactions.stats().Aborted[counted]; n != 1 {
		t.Errorf("%d transactions are counted as ended so", n)
	}
	if h.get(t, "of the transaction").Found {
		t.Error("it was committed")
	}
}

// ofOperator ends a transaction as an operator does.
func (h *harness) ofOperator(row *openTxn) { (&adminService{Server: h.Server}).endTransaction(row) }

// TestACommitThatWaitsForTheAuditLogEndsWithItsTransaction: with the reason, also if the transaction may be idle for less than it may be open.
func TestACommitThatWaitsForTheAuditLogEndsWithItsTransaction(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		start := func(t *testing.T, adjust ...func(*config.Config)) *harness {
			t.Helper()
			h, _ := startAudited(t, append(adjust, with, withBlockingAudit, smallAudit)...)
			if err := h.observer.audit.log.Admit(t.Context(), nil, int(h.config.Audit.QueueSize)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { h.observer.audit.log.Release(int(h.config.Audit.QueueSize)) })
			return h
		}
		for _, idle := range []time.Duration{200 * time.Millisecond, time.Second} {
			t.Run(fmt.Sprint("time, idle ", idle), func(t *testing.T) {
				h := start(t, func(c *config.Config) { c.TxnIdleTimeout, c.TxnTimeout = idle, time.Second })
				h.endsInside(t, nil, pb.ErrorReason_ERROR_REASON_TXN_TIMEOUT, telemetry.AbortTimeout)
			})
		}
		t.Run("operator", func(t *testing.T) {
			h := start(t)
			h.endsInside(t, h.ofOperator, pb.ErrorReason_ERROR_REASON_TXN_ENDED, telemetry.AbortOperator)
		})
	})
}

// TestACommitThatWaitsForTheLogEndsWithItsTransaction: no segment of the log comes.
func TestACommitThatWaitsForTheLogEndsWithItsTransaction(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with)
		until := make(chan struct{})
		release := sync.OnceFunc(func() { close(until) })
		t.Cleanup(release)
		h.faults.Inject(vfs.Rule{Op: vfs.OpCreate, Name: "*.log", Sticky: true, Fault: vfs.Slow, Until: until})
		for full := false; !full; {
			ctx, cancel := context.WithTimeout(testContext(t), 200*time.Millisecond)
			_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 200_000), Durability: pb.Durability_DURABILITY_ASYNC})
			cancel()
			full = err != nil
		}
		eventually(t, "nothing is executed", h.holdsNothing)
		h.endsInside(t, h.ofOperator, pb.ErrorReason_ERROR_REASON_TXN_ENDED, telemetry.AbortOperator)
		release()
	})
}
