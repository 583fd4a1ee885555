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
