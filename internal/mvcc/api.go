// Package mvcc is the transactional store: epochs, snapshots, conflicts, and the commit protocol over the storage engine.
package mvcc

import (
	"context"
	"time"

	"epochkv/internal/storage"
	"epochkv/internal/storage/keys"
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
	Storage      storage.Options
	Durability   Durability    // what DurabilityDefault means; DurabilitySync
	SyncInterval time.Duration // how long an async commit may stay unsynced; 50 ms
	GCInterval   time.Duration // how often min-visible is recomputed; 100 ms
	Retention    time.Duration // how long a past epoch stays readable with nobody holding it; 0
	Limits       Limits
}

// Limits bound what one request may ask for. Zero fields take the default named beside them.
type Limits struct {
	KeyBytes   int // a quarter of the page: 2 KiB
	ValueBytes int // 16 MiB
	BatchBytes int // 64 MiB
	BatchOps   int // 1,000,000
	Sessions   int // 8192
	Holds      int // scan tokens alive at once; 4096
}

// ConditionKind names a precondition.
type ConditionKind uint8

// Preconditions of a write.
const (
	KeyAbsent ConditionKind = iota + 1
	KeyPresent
	ValueEquals
	EpochEquals
)

// Condition is a precondition on the newest committed version of a key.
type Condition struct {
	Kind  ConditionKind
	Key   []byte     // the client's key
	Value []byte     // for ValueEquals
	Epoch keys.Epoch // for EpochEquals
}

// Value is the answer to a point read.
type Value struct {
	Found bool
	Data  []byte     // the caller's buffer with the value appended
	Epoch keys.Epoch // the commit that wrote the value
	At    keys.Epoch // the snapshot it was read at
	Await keys.Epoch // the reply must wait until this epoch is durable (Store.AwaitDurable); zero: need not wait
}

/* API that the server is written against (implementation follows in this package):

func Open(o Options) (*Store, error)                       // recovers; errors: *storage.CorruptionError, storage.ErrNewerFormat, vfs.ErrLocked, ...
func (s *Store) Recovery() storage.Recovery                // what opening found: replayed records, cut torn tail
func (s *Store) Close() error
func (s *Store) Err() error                                // nil, or why the store stopped accepting writes (fail-stop)
func (s *Store) Stats() Stats
func (s *Store) Visible() keys.Epoch ; Durable() ; MinVisible()
func (s *Store) Session() (*Session, error)                // ErrTooManySessions; from a pool; one goroutine at a time
func (x *Session) Close()                                  // back to the pool; ends its snapshot

// Reading. View registers a snapshot; at 0 = newest. Get is View+Read+Done.
func (x *Session) View(at keys.Epoch) (keys.Epoch, error)  // *SnapshotGoneError
func (x *Session) Read(dst, key []byte) (Value, error)
func (x *Session) Done()
func (x *Session) Get(dst, key []byte, at keys.Epoch) (Value, error)
func (x *Session) Scan(o ScanOptions) (*Cursor, error)     // inside View..Done
    type ScanOptions struct { Lower, Upper []byte; Reverse, KeysOnly bool }   // user keys; nil Upper = end
    (*Cursor) Next() bool; Key() []byte; Value() []byte; Epoch() keys.Epoch; Err() error
    (*Cursor) Await() keys.Epoch   // max over what was returned since the last call to Await; 0 none
    (*Cursor) Pause()              // gives up physical protection while the caller blocks; Key/Value become invalid; Next goes on
    (*Cursor) Close()

// Writing. Commit returns once the commit is logged and installed; Wait before acknowledging.
func (x *Session) Commit(w *Write) (keys.Epoch, error)
    type Write struct { Batch batch.Builder; Conditions []Condition; Durability Durability }   // reuse with Reset()
func (x *Session) DeleteRange(o RangeDelete) (RangeDeleted, error)
    type RangeDelete struct { Lower, Upper []byte; Limit int; Conditions []Condition; Durability Durability }
    type RangeDeleted struct { Epoch keys.Epoch; Count int; More bool }
func (s *Store) Wait(ctx context.Context, e keys.Epoch, d Durability) error      // visible, and durable if d is sync
func (s *Store) AwaitDurable(ctx context.Context, e keys.Epoch) error
func (s *Store) Settled(e keys.Epoch, d Durability) bool    // Wait would return at once
func (s *Store) Keep(at keys.Epoch, ttl time.Duration) error // keeps an epoch readable for a scan token; ErrTooManyHolds

// Errors (errors.go): *ConflictError{Key, Epoch}; *PreconditionError{Index int, Condition Condition}; *SnapshotGoneError{Epoch, Oldest}; *LimitError{What string, Limit, Got int}; *batch.DuplicateKeyError
// sentinels: ErrMemoryFull, vfs.ErrNoSpace (disk full), ErrFailed (fail-stop, wraps the cause), ErrClosed, ErrTooManySessions, ErrTooManyHolds, ErrEmptyBatch
*/

var _ = context.Background
