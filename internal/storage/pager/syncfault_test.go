package pager

import (
	"errors"
	"maps"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestASyncThatFailsBesideACheckpointFailsIt: the reserve is filled at any write of a checkpoint, and its sync fails. That drops what the
// checkpoint has written, and a later sync reports success: the checkpoint must not trust it, or its state has pages that a power cut loses.
func TestASyncThatFailsBesideACheckpointFailsIt(t *testing.T) {
	for nth := 1; ; nth++ {
		fs := vfs.NewMem()
		faulty := vfs.NewFaulty(fs)
		y := createToy(t, faulty, 4096)
		must(t, y.checkpoint(1, []int{1, 2, 3}, nil, 10))
		before, writes := y.contents(), 0
		fs.SetHook(func(op vfs.Op, _ string) {
			if op != vfs.OpWrite {
				return
			}
			if writes++; writes != nth {
				return
			}
			rule := faulty.Inject(vfs.Rule{Op: vfs.OpSync, Fault: vfs.DiscardDirty})
			if err := y.p.FillReserve(1 << 20); !errors.Is(err, ErrFailed) {
				t.Errorf("write %d: a failed sync of the reserve: %v", nth, err)
			}
			rule.Remove()
		})
		err := y.checkpoint(2, []int{1, 2, 3, 4}, nil, 20)
		fs.SetHook(nil)
		if writes < nth {
			if nth < 3 || err != nil {
				t.Errorf("%d writes, %v: this tests little", writes, err)
			}
			return
		}
		if !errors.Is(err, ErrFailed) {
			t.Errorf("write %d: the checkpoint beside a failed sync: %v", nth, err)
		}
		again, err := openToy(fs.Crash(uint64(nth), vfs.SurviveNone))
		if err != nil {
			t.Errorf("write %d: after a power cut: %v", nth, err)
			continue
		}
		if got := again.contents(); !maps.Equal(got, before) {
			t.Errorf("write %d: after a power cut there is %v, want %v", nth, got, before)
		}
		must(t, again.p.Close())
	}
}
