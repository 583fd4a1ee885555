//go:build ablation

package mvcc

import (
	"time"

	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/keys"
)

// baselineState is what a session needs for the baselines of package ablation.
type baselineState struct{ snapshots []keys.Epoch }

// refresh computes the min-visible epoch before a write in the baseline that does so.
func (*baselineState) refresh(x *Session) {
	if x.store.options.Storage.Ablation.ScanPerWrite() {
		x.refreshMinVisible()
	}
}

// prune prunes as a baseline does, and reports whether it did.
func (*baselineState) prune(x *Session) bool {
	pruning := x.store.options.Storage.Ablation.Pruning()
	if pruning == ablation.PruneInBackground {
		return false
	}
	if pruning == ablation.PruneByWriter {
		x.refreshMinVisible()
	}
	x.store.engine.PruneLongChains(&x.committing.writer, 1)
	return true
}

// refreshMinVisible publishes the min-visible epoch as of now. With a retention rule the GC low watermark stays where
// the collector's timer put it.
func (x *Session) refreshMinVisible() {
	s := x.store
	watermark := s.Visible()
	if s.options.Retention > 0 {
		watermark = s.registry.LowWatermark()
	}
	x.baseline.snapshots = s.registry.AdvanceLowWatermark(x.baseline.snapshots, watermark, time.Now())
}
