package storage

import (
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Options configure an engine. Zero fields take the default named beside them.
type Options struct {
	Dir           string
	FS            vfs.FS            // the operating system's
	DataFS        vfs.FS            // the data file's, if another: past the kernel's page cache, for instance
	PageSize      int               // bytes; 8192; fixed when the store is created
	FeatureLevel  keys.FeatureLevel // of a store that is created; the newest
	MemoryBytes   int64             // bounds cache, memtables and log buffers together; 1 GiB
	CacheBytes    int64             // derived from MemoryBytes
	MemtableBytes int64             // of one generation; derived
	SegmentBytes  int64             // of one log segment; derived

	CheckpointBytes   int64         // immutable memtables that start a checkpoint, if writers do not wait before; 128 MiB
	CheckpointWorkers int           // goroutines that merge; half the processors, all while writers wait
	DiskReserve       int64         // disk space that is kept for deletions and checkpoints; 0: none; DiskReserveDerived
	StallMax          time.Duration // how long a write waits for memory before it is refused; 10 s
	StartPatience     time.Duration // how long a start tries pages again that the device fails to read; 4 s
	ChangeLog         ChangeLog     // what is kept of the log for readers of changes; nothing

	Obtain    func(bytes uint64) error // asked before a memtable takes memory from the system; for tests, which refuse it; may be nil
	Ablation  ablation.Switches        // the baseline of a benchmark; builds without the tag `ablation` have none
	OnReplay  func(ReplayProgress)     // hears every few seconds how far the replay of a long log is; may be nil
	OnRebuild func(Rebuild)            // hears what became of inner nodes that cannot be read; may be nil

	disturb func(btree.Input) btree.Input // lets tests hand the tree what it refuses; may be nil
}

// Recovery tells what opening a store found and did.
type Recovery struct {
	Records    uint64     // log records replayed
	Bytes      uint64     // log bytes replayed
	Epoch      keys.Epoch // newest epoch recovered
	Next       keys.Epoch // at which commits go on; not Epoch+1 after an unclean end, in which epochs may have been seen and lost
	CommitTime uint64     // the latest time of a commit, in microseconds since 1970; zero if none is known
	Tree       keys.Epoch // up to which the tree had every commit before the replay
	TreeTime   uint64     // CommitTime of those commits alone
	TornFile   string     // the segment with a torn tail, or empty
	TornAt     int64      // where it was cut
	TornSize   int64      // bytes that were cut

	Skipped []keys.EpochRange // of which commits may have been seen that do not exist: after this unclean end, and those of the log that was read

	Repaired   []string // what was damaged and could be made anew, with the reason
	Incomplete []string // what was damaged and could be made anew only in part, because the device failed reads: the next start makes it anew again

	SegmentBytes int64 // of one log segment in this run: that of an earlier run, because the disk has no room for those of the options; 0 if it has

	Checkpoints  int   // made during the replay, because the log held more than memory
	MemtablePeak int64 // most bytes that memtables took meanwhile
}

// ErrNewerFormat means a file was written by a newer version.
var ErrNewerFormat = errors.New("storage: written by a newer version")

// CorruptionError is damage found in a file. It is reported and never served.
type CorruptionError struct {
	File     string
	Offset   int64
	Reason   string
	Remedy   string
	KeyLower []byte // client keys that the damage may hide, when known; both nil if not
	KeyUpper []byte
	Hides    *HiddenRange // the range of internal keys; nil if it is not known
}

// HiddenRange is the range of internal keys that a damaged page may hide; a nil bound is none.
type HiddenRange struct {
	Lower, Upper []byte
	Newest       keys.Epoch // no hidden version is newer; keys.MaxEpoch if that is not known
}

// ErrDamaged matches every CorruptionError.
var ErrDamaged = errors.New("storage: damaged")

// Is makes errors.Is(err, ErrDamaged) true.
func (e *CorruptionError) Is(target error) bool { return target == ErrDamaged }

func (e *CorruptionError) Error() string {
	return fmt.Sprintf("storage: %s is damaged at offset %d: %s; %s", e.File, e.Offset, e.Reason, e.Remedy)
}
