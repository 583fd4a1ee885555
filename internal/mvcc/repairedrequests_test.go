package mvcc

import (
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestARepairOfTheLogExecutesNoRequestTwice: a merge has dropped the record of a request, and a repair of the log drops the cut-off which says
// so. What the request has written is there.
func TestARepairOfTheLogExecutesNoRequestTwice(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.RequestWindow = time.Hour
	o.Storage.CheckpointBytes = 64 << 20 // no checkpoint but those here
	s := mustOpen(t, o)
	x := mustSession(t, s)
	r := &Request{ID: requestID(milliseconds(time.Now()) - 60_000), Hash: 7}
	if err := increment(x, r, DurabilitySync); err != nil {
		t.Fatal(err)
	}
	mustCheckpoint(t, s)
	mustPut(t, s, "other", "value")
	if err := s.engine.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.advanceCutoff(t.Context(), s.newSession(), r.ID.Time()); err != nil {
		t.Fatal(err)
	}
	before := s.engine.TreeEpoch()
	if err := s.mergeImmutables(t.Context()); err != nil || s.engine.TreeEpoch() <= before {
		t.Fatalf("nothing was merged: %v", err)
	}
	for range 3 {
		mustPut(t, s, "other", "value")
	}
	x.Close()
	fs := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveAll)
	_ = s.Close()
	repairNewestSegment(t, fs, &o)
	s = mustOpen(t, o)
	if v := get(t, s, "sum", 0); v != "1" {
		t.Fatalf("the sum is %s", v)
	}
	x = mustSession(t, s)
	defer x.Close()
	err := increment(x, r, DurabilitySync)
	if v := get(t, s, "sum", 0); v != "1" {
		t.Errorf("the sum is %s after the second attempt: %v", v, err)
	}
}

// TestAMergeDropsRecordsUpToTheCutoffOfItsState: of two cut-offs that are durable, the later one is not in the state that the merge makes.
func TestAMergeDropsRecordsUpToTheCutoffOfItsState(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.RequestWindow = time.Hour
	o.Storage.CheckpointBytes = 64 << 20 // no checkpoint but those here
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	now := milliseconds(time.Now())
	var requests []*Request
	for age := uint64(60_000); age > 0; age -= 20_000 {
		requests = append(requests, &Request{ID: requestID(now - age), Hash: 7})
		if err := increment(x, requests[len(requests)-1], DurabilitySync); err != nil {
			t.Fatal(err)
		}
	}
	move := func(to *Request) {
		t.Helper()
		if err := s.advanceCutoff(t.Context(), s.newSession(), to.ID.Time()); err != nil {
			t.Fatal(err)
		}
	}
	move(requests[0])
	if err := s.engine.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	move(requests[1])
	want := []OutcomeState{OutcomeExpired, OutcomeApplied, OutcomeApplied}
	check := func() {
		t.Helper()
		for i, r := range requests {
			if out, err := x.Outcome(t.Context(), r); err != nil || out.State != want[i] {
				t.Errorf("request %d is %v, want %v: %v", i, out.State, want[i], err)
			}
		}
	}
	if err := s.mergeImmutables(t.Context()); err != nil {
		t.Fatal(err)
	}
	check()
	mustCheckpoint(t, s)
	want[1] = OutcomeExpired
	check()
	for i := range uint64(3 * durableCutoffsMax) { // while nothing is merged
		move(&Request{ID: requestID(now + i)})
	}
	if n := len(s.requests.durable.list); n > durableCutoffsMax {
		t.Errorf("%d cut-offs are kept", n)
	}
	mustCheckpoint(t, s)
	want[2] = OutcomeExpired
	check()
}
