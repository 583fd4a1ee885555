// Package ablation names the baselines that benchmarks compare EpochKV with: the same store with one of its techniques replaced.
//
// A build without the tag `ablation` has no baselines: Switches is empty and its methods return constants, so that the compiler removes
// every branch that depends on them. With the tag, Options of mvcc and storage carry the switches that New makes.
//
// The package imports nothing of ours, so that every layer may use it.
package ablation

// Baseline tells which techniques are replaced. The zero value replaces none.
type Baseline struct {
	OneMutex     bool    // one mutex for all keys, which each commit holds from its checks to its install
	Pruning      Pruning // of long version chains in memtables
	ScanPerWrite bool    // each write computes the min-visible epoch from the registry of snapshots
	NoPrefetch   bool    // bounded scans of cold data read each page when they need it
}

// Pruning says when versions that no snapshot sees are taken out of a memtable's version chains. All ways keep what a snapshot sees, and
// differ in speed and memory.
type Pruning uint8

const (
	// PruneInBackground is EpochKV's own way: writers queue a chain at multiples of a length, and the collector prunes it.
	PruneInBackground Pruning = iota
	// PruneByWriter has the writer that makes a chain's length a multiple of that length compute the min-visible epoch and prune the chain.
	PruneByWriter
	// PruneEveryWrite has every writer prune the chains that it wrote to, whatever their length. Without ScanPerWrite it prunes nothing until
	// the collector's next tick.
	PruneEveryWrite
)
