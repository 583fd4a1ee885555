//go:build ablation

package ablation

import "sync"

// Enabled is true in builds with the tag `ablation`.
const Enabled = true

// Switches tell the store which baseline it is.
type Switches struct {
	baseline Baseline
	commit   *sync.Mutex // of Baseline.OneMutex; else nil
}

// New returns the switches of b. Its error is nil; builds without the tag refuse baselines.
func New(b Baseline) (Switches, error) {
	s := Switches{baseline: b}
	if b.OneMutex {
		s.commit = new(sync.Mutex)
	}
	return s, nil
}

// OneMutex is Baseline.OneMutex.
func (s Switches) OneMutex() bool { return s.baseline.OneMutex }

// LockCommit takes the mutex of Baseline.OneMutex, in a store that has it.
func (s Switches) LockCommit() {
	if s.commit != nil {
		s.commit.Lock()
	}
}

// UnlockCommit releases what LockCommit took.
func (s Switches) UnlockCommit() {
	if s.commit != nil {
		s.commit.Unlock()
	}
}

// Pruning is Baseline.Pruning.
func (s Switches) Pruning() Pruning { return s.baseline.Pruning }

// LongChain is how many versions make a chain long; standard is EpochKV's own number.
func (s Switches) LongChain(standard int) int {
	if s.baseline.Pruning == PruneEveryWrite {
		return 1
	}
	return standard
}

// NoPrefetch is Baseline.NoPrefetch.
func (s Switches) NoPrefetch() bool { return s.baseline.NoPrefetch }

// ScanPerWrite is Baseline.ScanPerWrite.
func (s Switches) ScanPerWrite() bool { return s.baseline.ScanPerWrite }
