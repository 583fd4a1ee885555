//go:build !ablation

package mvcc

// baselineState is what a session needs for the baselines of package ablation: nothing in this build.
type baselineState struct{}

// refresh computes the min-visible epoch before a write in the baseline that does so.
func (*baselineState) refresh(*Session) {}

// prune prunes as a baseline does, and reports whether it did.
func (*baselineState) prune(*Session) bool { return false }
