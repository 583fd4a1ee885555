//go:build !ablation

package mvcc

// baselineState is what a session needs for the baselines of package ablation: nothing in this build.
type baselineState struct{}

// refreshAsBaseline computes the min-visible epoch before a write in the baseline that does so.
func (x *Session) refreshAsBaseline() {}

// pruneAsBaseline prunes as a baseline does, and reports whether it did.
func (x *Session) pruneAsBaseline() bool { return false }
