//go:build !ablation

package ablation

import "errors"

// Enabled is true in builds with the tag `ablation`.
const Enabled = false

// Switches tell the store which baseline it is; in this build always none.
type Switches struct{}

// ErrNotBuilt means that the program was built without baselines.
var ErrNotBuilt = errors.New("ablation: baselines need a build with -tags ablation")

// New returns the switches of b. In this build it refuses every baseline but the zero one.
func New(b Baseline) (Switches, error) {
	if b != (Baseline{}) {
		return Switches{}, ErrNotBuilt
	}
	return Switches{}, nil
}

// OneMutex is Baseline.OneMutex.
func (Switches) OneMutex() bool { return false }

// LockCommit takes the mutex of Baseline.OneMutex, in a store that has it.
func (Switches) LockCommit() {}

// UnlockCommit releases what LockCommit took.
func (Switches) UnlockCommit() {}

// Pruning is Baseline.Pruning.
func (Switches) Pruning() Pruning { return PruneInBackground }

// LongChain is how many versions make a chain long; standard is EpochKV's own number.
func (Switches) LongChain(standard int) int { return standard }

// NoPrefetch is Baseline.NoPrefetch.
func (Switches) NoPrefetch() bool { return false }

// ScanPerWrite is Baseline.ScanPerWrite.
func (Switches) ScanPerWrite() bool { return false }
