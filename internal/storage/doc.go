// Package storage is the engine: a durable, ordered, versioned map of keys to values.
//
// Each commit has a commit sequence number, its epoch. A version is what one commit did to one key: (key, epoch, kind,
// value). A reader at a snapshot, which is an epoch, sees of each key the newest version at or below it. The engine takes
// commits that package mvcc has checked for conflicts, and tells mvcc what is durable. It decides nothing about isolation.
//
// # Terms
//
//	generation              one log segment, and the memtable that its records fill; both are rotated together
//	active generation       the one that commits go to
//	immutable generation    sealed: it takes no more commits, and waits for a checkpoint; its memtable is immutable
//	view                    what a reader uses: active generation, immutable ones, root of the tree; never changed
//	checkpoint              merges immutable memtables into the tree and makes the new root durable
//	bulk load               sorted import of many keys, merged into the tree at one epoch, past log and memtable
//	repair tree             a second, small tree for versions of keys in pages that cannot be read (package repairtree)
//	quarantine              the versions of keys of which the tree has refused an entry (package quarantine)
//	GC watermarks           the epochs that readers still need, as values that the caller passes down
//
// # Picture
//
//	       commit                                           get, scan
//	         │ Reserve, Record, Install                        │ inside the guard of a slot
//	         ▼                                                 ▼
//	┌─ active generation ─┐                          view ──► active memtable
//	│ log segment         │ rotation                     ──► immutable memtables, newest first
//	│ memtable            │ ────────► immutable          ──► quarantine
//	└─────────────────────┘           generations        ──► repair tree
//	                                       │             ──► tree, through the page cache
//	                                       │ checkpoint
//	                                       ▼
//	                                  tree, blobs ──► superblock
//
// The first version at or below the snapshot, in that order, is the answer, because generations hold disjoint, ascending
// ranges of epochs, and all of them are newer than the tree.
//
// # A commit
//
// Reserve secures memory in the memtable, and takes an epoch and an offset in the log with one atomic add. Record copies
// the body into the log, Install puts the versions into the memtable. From Reserve to Install nothing allocates or blocks.
// When the active generation is full, Reserve returns ErrRotating; the caller leaves its guard and calls
// AdvanceGeneration, which waits for memory if immutable memtables have used the budget up. Throttle delays writers before
// that, so that they and checkpoints go at the same rate (ADR 0020). NoOp ends a reservation without a commit.
//
// # A checkpoint
//
//  1. It takes the oldest immutable generations all of whose epochs are installed, at most half of the budget at once, and
//     finds leaves with dead versions to vacuum.
//  2. The log is made durable up to the last of their epochs, the cut: the tree is never newer than the log.
//  3. The memtables are merged into new leaves by several workers. Nothing is changed in place. Versions that no reader can
//     see are dropped. Pages that cannot be read are skipped; entries that the tree refuses go to the quarantine file.
//  4. Pages are synced, then the superblock is written and synced. From here on a crash finds the new state.
//  5. A view with the new root and without the merged generations is published.
//  6. When the readers of the older views have left their guards, the memtables are reused, the replaced pages are freed
//     and the log segments up to the cut are recycled.
//
// Steps 1 to 6 are repeated until nothing is left. Without enough free pages on a full disk, the merge is made in steps of
// one key span each (steps.go). A failure before step 4 leaves the last state. A full disk and a damaged page can pass; any
// other error stops the store.
//
// # Opening
//
// Open takes the lock file, opens the newest intact superblock, repairs what follows from other data (repair.go), and
// replays the log after the tree's epoch into memtables (replay.go).
//
// # Invariants
//
//   - a view that was loaded after a snapshot was taken holds every version that the snapshot sees;
//   - the epochs of the generations of a view are disjoint and ascending, and all newer than its tree;
//   - the epoch of the tree never falls, and is never newer than the durable log;
//   - a memtable or page is reused only after every reader that could reach it has left its guard;
//   - memory for immutable memtables stays inside its budget, except for one generation where nothing else can be merged.
//
// Those that the engine can check itself are asserted (assert.go): a broken one stops the store.
//
// # Concurrency
//
// Readers load the view through one atomic pointer and take no lock. The lock order is with the fields of Engine. The
// background goroutines are run by the caller: RunTablePool, RunPrefetch and RunSpace until their context ends, Checkpoint
// as Schedule and CheckpointRequests say.
//
// # What it does not do
//
// It does not detect conflicts, order visibility, or know clients, transactions and keyspaces' meaning (package mvcc). It
// does not verify, measure or salvage a store (package inspect, which reads durable states). It does not repeat a failed
// write or sync of the log: the store accepts no more writes then, and reads go on.
package storage
