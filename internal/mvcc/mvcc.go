// Package mvcc is the transactional store: commit sequence numbers (epochs), snapshots, conflicts, and the commit protocol
// over the storage engine.
//
//	epoch     one per commit: 1, 2, 3 ..., with gaps before bulk loads and after an unclean end; all of a commit's versions carry it
//	visible   the largest epoch such that every commit <= it is installed in a memtable
//	durable   the largest epoch such that every commit <= it is on stable storage
//	snapshot  an epoch at which a session reads; it sees per key the newest version <= it
//	low watermark  the smallest epoch that can be read without a lease; the collector moves it to visible every 100 ms
//
// A commit:
//
//	latch keys ─► check conditions ─► reserve (epoch, offset) ─► copy record ─► insert versions ─► enter in ring ─► unlatch
//	                                     one atomic add               no lock, no allocation        advance visible
//
// and is acknowledged once visible has reached its epoch, and durable has too if it is a SYNC commit.
//
// A session may commit again before visible has reached its last epoch: it is ahead of visible. While a neighbour with a
// smaller epoch is between reservation and mark, visible does not move, and the session goes on:
//
//		            visible      neighbour, slow          session, ahead
//		  ── 40 ── 41 ──┤ 42 reserved ├ 43 mark ┤ 44 mark ┤ 45 mark ┤ ... 58: the session waits for 42
//
//	  - Its commits have ascending epochs, because it makes one after the other, and become visible in this order, perhaps
//	    several at once.
//	  - Conditions and read-modify-writes look under the latches at what is installed, so they see every earlier commit of
//	    the session (and of others). Their outcome is revealed when visible has reached what they saw.
//	  - Snapshots are opened at visible, so they may lack commits of the session that are not acknowledged yet. A reader
//	    that must see them waits first (Wait). A transaction has its own writes besides its snapshot.
//	  - A slow neighbour stops the session after epochsAheadMax epochs; its context ends that wait. The commits that it made
//	    are complete and become visible with the neighbour's, whatever becomes of the session.
//
// Invariants:
//   - Same-key versions are installed in epoch order: both ends of the window are under the key's latch.
//   - A condition holds at the commit's own epoch: the latches of its keys are held from the check to the install.
//   - Nothing that a validated commit has read (a serializable transaction, DeleteRange) has changed before its own
//     epoch. What was read is validated before the latches are taken, and then the keys of the commits since, which the
//     log has in order: the last few between the reservation and the installation, after every smaller epoch is visible.
//   - Between the reservation and the entry in the ring nothing allocates, logs, takes a lock or causes a page fault,
//     because every later commit waits for that time. Space in the memtable is secured before.
//   - A reply never reveals a SYNC commit that a crash could still take back: reads and the outcomes of writes, errors included, name
//     the epoch that has to be durable first (Await).
//   - A bulk load is a commit that writes every key: it holds all latches while it is published.
//   - Only the newest epoch of a session is more than epochsAheadMax after visible, which bounds the ring.
//
// Locks: latches in stripe order, then nothing. The engine's rotation mutex is taken outside the slot's protection, under
// the latches. The mutexes of the watermark and of the session pool are leaves.
package mvcc

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// Durability says when a write is acknowledged.
type Durability uint8

const (
	// DurabilityDefault takes the store's setting.
	DurabilityDefault Durability = iota
	// DurabilitySync acknowledges once the commit is on stable storage.
	DurabilitySync
	// DurabilityAsync acknowledges once the commit is visible; the log is synced at an interval.
	DurabilityAsync
)

// Options configure a store. Zero fields take the default named beside them.
type Options struct {
	Storage        storage.Options
	Durability     Durability    // what DurabilityDefault means; DurabilitySync
	SyncInterval   time.Duration // how long an async commit may stay unsynced; 50 ms
	GCInterval     time.Duration // how often min-visible is recomputed; 100 ms
	Retention      time.Duration // how long a past epoch stays readable without a snapshot or a lease; 0
	RetentionBytes int64         // how much may be logged since the oldest epoch that Retention keeps; 0: any amount

	RequestWindow time.Duration // how long the ids of requests are known; 15 min
	RequestBytes  int64         // how much of log and tree the records of ids may take, about; 1 GiB

	CheckpointInterval time.Duration // how often what is in memory is merged into the tree at the latest; 5 min

	WallClock func() time.Time // of the system; tests set it

	// Owner is that of a large commit, an execution or a read of the log under ctx, which have turns in rotation, and of a session of SessionOf, of which
	// clients leave some to each other; nil: all are of one, which leaves none.
	Owner func(ctx context.Context) Owner

	Limits Limits
}

// Limits bound what one request may ask for. Zero fields take the default named beside them.
type Limits struct {
	KeyBytes       int // storage.KeyBytesMax, which is also the most: 2 KiB
	ValueBytes     int // 16 MiB
	BatchBytes     int // 64 MiB
	BatchOps       int // 1,000,000
	InvokeBytes    int // of an InvokeAll of many operations, with those: see InvokeOperationBytes; BatchBytes
	Sessions       int // 8192
	SessionsBeside int // of them, those that SessionOf gives out at once; all
	SnapshotLeases int // leases that exist at once; 4096
}

// ConditionKind names a precondition.
type ConditionKind uint8

// Preconditions of a write.
const (
	KeyAbsent ConditionKind = iota + 1
	KeyPresent
	ValueEquals
	EpochEquals
	LockHeld // the lock named Key is held since the commit with this epoch
)

// Condition is a precondition on the newest committed version of a key.
type Condition struct {
	Kind  ConditionKind
	Key   []byte     // the client's key; for LockHeld, the name of a lock
	Value []byte     // for ValueEquals
	Epoch keys.Epoch // for EpochEquals and LockHeld

	ReturnCurrent bool // the PreconditionError has the key's current value

	held keys.Epoch // a snapshot in which readBefore has found that it holds, which is open; 0: none
}

// conditionKeyBytes is how much longer the internal key of a condition is than its key, at most.
const conditionKeyBytes = 2

// appendInternal appends the internal key that the condition is about.
func (c *Condition) appendInternal(dst []byte) []byte {
	if c.Kind == LockHeld {
		return append(append(dst, byte(keys.SpaceSystem), keys.SystemLock), c.Key...)
	}
	return keys.Append(dst, keys.SpaceUser, c.Key)
}

// Value is the answer to a point read.
type Value struct {
	Found bool
	Data  []byte     // the caller's buffer with the value appended
	Epoch keys.Epoch // the commit that wrote the value
	At    keys.Epoch // the snapshot it was read at
	Await keys.Epoch // the reply must wait until this epoch is durable (Store.AwaitDurable); zero: need not wait
}
