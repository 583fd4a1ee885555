package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Requests that wait in a server with `--audit-full block`: those of the direct transport keep no room of others.

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
	bytes := h.bytesOfPipelines()
	if bytes != waitingReads*len(largeKey(0)) {
		t.Errorf("%d bytes are counted of what the audit log says of them", bytes)
	}
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
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until})
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
