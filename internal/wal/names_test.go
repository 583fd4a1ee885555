package wal

import (
	"errors"
	"path"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAFailedSyncOfNamesHidesNoSegment: while a segment gets its name, another sync of the directory fails, after which the kernel may
// count the name as written. The sync for the segment then reports success, and a power cut would lose the segment with its records.
func TestAFailedSyncOfNamesHidesNoSegment(t *testing.T) {
	fs := vfs.NewMem()
	faulty := vfs.NewFaulty(fs)
	opts := testOptions(faulty, SegmentBytesMin)
	opts.Reserve = 1
	a := mustStart(t, opts)
	a.patient = true // the preparation of the segment is repeated
	rule := faulty.Inject(vfs.Rule{Op: vfs.OpSyncDir, Fault: vfs.DiscardDirty, Nth: 1})
	var once atomic.Bool
	var failed error
	fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpSync && path.Base(name) == FileName(2) && once.CompareAndSwap(false, true) {
			failed = a.log.FillReserve() // the new segment has its name, whose sync comes next
		}
	})
	var last keys.Epoch
	for range 100 {
		e, err := a.put(bodyOf(1, 1000))
		if err != nil {
			t.Fatal(err)
		}
		last = e
	}
	if rule.Fired() != 1 || failed == nil || errors.Is(failed, ErrFailed) {
		t.Fatalf("%d syncs have failed: %v; this tests nothing", rule.Fired(), failed)
	}
	rec, err := Recover(fs.Crash(1, vfs.SurviveNone), testDir, 0, Proof{}, func(Commit) error { return nil })
	if err != nil || rec.Last < last {
		t.Fatalf("the log ends at %d instead of %d: %v", rec.Last, last, err)
	}
}
