package server

import (
	"bytes"
	"context"
	"runtime"
	"runtime/debug"
	"syscall"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestBrokenPipelineGivesItsAnswersBack: at once and not when the garbage collector finds them: those that wait for the disk, the one that waits
// for room among them, and the one that is executed when the stream breaks.
func TestBrokenPipelineGivesItsAnswersBack(t *testing.T) {
	h := mustStart(t)
	h.heldSyncs(t)
	for round := range 3 {
		ctx, cancel := context.WithCancel(testContext(t))
		stream := h.pipeline(t, ctx)
		mustSend(t, stream, putRequest(1, "k", string(bytes.Repeat([]byte("v"), 200<<10)), pb.Durability_DURABILITY_SYNC))
		for i := range uint64(20) {
			mustSend(t, stream, getRequest(2+i, "k"))
		}
		eventually(t, "the backlog is full", func() bool { _, _, answers := h.admission.inflight(); return answers >= 6*200<<10 })
		before := debug.SetGCPercent(-1)
		cancel()
		eventually(t, "the stream has ended", func() bool { return h.streams.Load() == 0 })
		for range 200 { // and the receiver soon
			if _, _, answers := h.admission.inflight(); answers == 0 {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		if _, _, answers := h.admission.inflight(); answers != 0 {
			t.Errorf("round %d: %d bytes of answers are counted that nothing will send", round, answers)
		}
		debug.SetGCPercent(before)
	}
}

// TestDrainingPipelineRests: while its receiver is held up, by a client that does not read or by a commit that waits, the other half of a
// pipeline that is to end waits for it without taking a core.
func TestDrainingPipelineRests(t *testing.T) {
	p := &pipeline{server: new(Server)}
	p.backlog.init()
	p.server.draining.Store(true)
	p.executing.Store(true)
	time.AfterFunc(300*time.Millisecond, func() { p.executing.Store(false) })
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	used := func() time.Duration {
		var u syscall.Rusage
		const thread = 1
		if err := syscall.Getrusage(thread, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	if !p.drained() {
		t.Error("not drained")
	}
	if took := used() - before; took > 20*time.Millisecond {
		t.Errorf("waiting for 300 ms took %v of a core", took)
	}
}
