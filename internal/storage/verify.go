package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// A verification looks at one durable state as the files tell it, past caches and past what the engine has in memory:
//
//	log        every record from the state's epoch on
//	tree       each page's checksum and inside, levels, separators, order, newest epochs
//	values     each large value, end to end
//	accounts   every page is reached once and live, or not live; rows, keys and bytes are as many as the superblock says
//
// It goes on beside what is damaged, and reports the keys that the damage may hide. The accounts are compared only if nothing is
// damaged, since they would repeat in other words what is known already.
//
// Online it takes the newest state and keeps its pages from being used again until it is done (rootPins). Checkpoints and
// writers go on meanwhile.

// VerifyOptions steer a verification. The zero value is a fast, silent one.
type VerifyOptions struct {
	PagesPerSecond int                  // pages read per second at most; 0: as fast as it goes
	Progress       func(VerifyProgress) // called a few times a second, if set
}

// VerifyProgress is how far a verification is.
type VerifyProgress struct {
	Pages, PagesTotal uint64
	Damages           uint64
}

// Damage is something wrong.
type Damage struct {
	Kind     DamageKind
	File     string
	Offset   int64
	Page     page.ID // zero if it is no page of the data file
	KeyLower []byte  // client keys that it may hide: [KeyLower, KeyUpper), nil for no bound
	KeyUpper []byte
	Reason   string
}

// DamageKind says what is damaged.
type DamageKind string

// What can be damaged.
const (
	DamageSuperblock DamageKind = "superblock"     // a superblock, or a copy of one; alone it costs nothing, and the next start repairs it
	DamagePage       DamageKind = "page"           // a page of the tree
	DamageValue      DamageKind = "value"          // a large value; the range is its key
	DamageRows       DamageKind = "blobs"          // the row table
	DamageMap        DamageKind = "allocation_map" // the allocation map
	DamageAccounts   DamageKind = "accounts"       // pages, rows, keys or bytes do not add up
	DamageLog        DamageKind = "log"
	DamageQuarantine DamageKind = "quarantine" // the quarantine file, or one of the two copies of its contents; one alone costs nothing
)

// damagesMax bounds the list of damages; the rest is counted.
const damagesMax = 1000

// VerifyReport is the outcome of a verification.
type VerifyReport struct {
	Epoch      keys.Epoch // of the state that was looked at
	Checkpoint uint64

	Pages      uint64 // reached, those of map and rows included
	LeafPages  uint64
	InnerPages uint64
	Height     int
	Keys       uint64 // live
	Versions   uint64
	Values     uint64 // outside leaves
	ValueBytes uint64 // of those
	LogRecords uint64
	LogBytes   uint64
	Accounted  bool // the accounts were compared

	Damages     []Damage // at most damagesMax
	DamageTotal uint64
	Notes       []string // what is no damage but worth knowing: a torn log, a superblock that a crash left half written
	Duration    time.Duration
}

// OK reports whether nothing was found to be damaged.
func (r *VerifyReport) OK() bool { return r.DamageTotal == 0 }

// Verify checks the newest durable state while the engine works. An error means that the check could not be completed; damage is in the
// report.
func (e *Engine) Verify(ctx context.Context, o VerifyOptions) (*VerifyReport, error) {
	v := newVerifier(ctx, o)
	frozen, _, err := e.freeze(ctx)
	if err != nil {
		return nil, err
	}
	defer e.checkpoints.pins.unpin(e.pager, frozen.Checkpoint())
	if err := v.checkLog(e.fs, e.options.Dir, frozen.State().Epoch, 0, e.log.Durable()); err != nil {
		e.checkpoints.pins.logPinned.Add(-1)
		return nil, err
	}
	e.checkpoints.pins.logPinned.Add(-1)
	if err := e.verifyQuarantine(ctx, v); err != nil {
		return nil, err
	}
	return v.run(frozen)
}

// verifyQuarantine reads the file that belongs to the newest state, which may be a newer one than the verification looks at: an older file is gone.
func (e *Engine) verifyQuarantine(ctx context.Context, v *verifier) error {
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return err
	}
	defer e.checkpoints.mu.Unlock()
	state := e.pager.State()
	return v.checkQuarantine(e.fs, &e.options, &state)
}

// freeze takes the newest state, with the side tree that belongs to it, and keeps its pages, and the log behind it. It waits for the checkpoint that is
// under way, or the context's end.
func (e *Engine) freeze(ctx context.Context) (*pager.Pager, *repairTree, error) {
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return nil, nil, err
	}
	defer e.checkpoints.mu.Unlock()
	frozen, err := e.pager.Snapshot()
	if err != nil {
		return nil, nil, err
	}
	e.checkpoints.pins.pin(e.pager, frozen.Checkpoint())
	e.checkpoints.pins.logPinned.Add(1)
	return frozen, e.view.Load().repairTree, nil
}

// VerifyDir checks the files of a store that is not open. Errors: vfs.ErrLocked if it is, ErrNewerFormat, and those of the file
// system.
func VerifyDir(ctx context.Context, fsys vfs.FS, dir string, o VerifyOptions) (report *VerifyReport, err error) {
	options, lock, err := lockOffline(fsys, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	v := newVerifier(ctx, o)
	frozen, err := pager.OpenSnapshot(options.FS, options.dataPath())
	if err != nil {
		return v.withoutState(options, err)
	}
	defer func() { err = errors.Join(err, frozen.Close()) }()
	state := frozen.State()
	if err := v.checkLog(options.FS, dir, state.Epoch, logSegment(&state), keys.MaxEpoch); err != nil {
		return nil, err
	}
	if err := v.checkQuarantine(options.FS, options, &state); err != nil {
		return nil, err
	}
	if frozen.SuperblockMissing() && v.report.DamageTotal > 0 { // of the log, which has been cut behind the state that is lost
		v.report.Damages, v.report.DamageTotal = nil, 0
		v.note("the log does not reach back to checkpoint %d: a newer one was durable, whose superblock is damaged together with its copy", frozen.Checkpoint())
	}
	return v.run(frozen)
}

// withoutState reports a data file that cannot be opened, or is not there.
func (v *verifier) withoutState(o *Options, cause error) (*VerifyReport, error) {
	switch {
	case errors.Is(cause, pager.ErrNewerFormat):
		return nil, translate(cause)
	case errors.Is(cause, fs.ErrNotExist):
		if segments, err := wal.Segments(o.FS, o.Dir); err != nil || len(segments) == 0 {
			return nil, fmt.Errorf("%s holds no store: %w", o.Dir, cause)
		}
	case !errors.Is(cause, pager.ErrNotDataFile) && !errors.Is(cause, pager.ErrSuperblocks) && !errors.Is(cause, pager.ErrSuperblockMissing):
		return nil, cause
	}
	v.damage(Damage{Kind: DamageSuperblock, File: o.dataPath(), Reason: cause.Error()})
	v.finish()
	return &v.report, nil
}

// checkQuarantine reads both copies of the quarantine file, and notes what it holds.
func (v *verifier) checkQuarantine(fsys vfs.FS, o *Options, state *pager.State) error {
	versions, fault, err := readQuarantine(fsys, o, state)
	if damage, ok := errors.AsType[*CorruptionError](err); ok {
		fault, err = errors.New(damage.Reason), nil
	}
	if err != nil {
		return err
	}
	if fault != nil {
		v.damage(Damage{Kind: DamageQuarantine, File: o.quarantinePath(), Reason: fault.Error()})
	}
	for i := range versions[:min(len(versions), quarantineNotesMax)] {
		q := &versions[i]
		v.note("key %.40q of %d bytes is in quarantine at epoch %d: %s", keys.User(q.Key), len(q.Key)-1, q.Trailer.Epoch(), q.Reason)
	}
	if more := len(versions) - quarantineNotesMax; more > 0 {
		v.note("and %d more versions are in quarantine", more)
	}
	return nil
}

// quarantineNotesMax bounds the notes about versions in quarantine.
const quarantineNotesMax = 20

// logTries bounds how often a log is listed again because a file that is not part of it changed its name.
const logTries = 10

// checkLog reads every record behind the state, which knows a segment of the log, zero if it does not. Records newer than durable are being written while it looks.
func (v *verifier) checkLog(fsys vfs.FS, dir string, after keys.Epoch, segment uint64, durable keys.Epoch) error {
	found, err := wal.Replay(fsys, dir, after, segment, func(keys.Epoch, []byte) error { return v.ctx.Err() })
	for tries := 0; errors.Is(err, fs.ErrNotExist) && tries < logTries; tries++ {
		// A spare segment that an earlier checkpoint left got its new name between listing and opening.
		found, err = wal.Replay(fsys, dir, after, segment, func(keys.Epoch, []byte) error { return v.ctx.Err() })
	}
	v.report.LogRecords, v.report.LogBytes = found.Records, found.Bytes
	if damage, ok := errors.AsType[*wal.CorruptionError](err); ok {
		if damage.Epoch <= durable {
			v.damage(Damage{
				Kind: DamageLog, File: damage.File, Offset: damage.Offset,
				Reason: fmt.Sprintf("epoch %d: %s", damage.Epoch, damage.Reason),
			})
		}
		return nil
	}
	if err != nil {
		return translate(err)
	}
	if torn := found.Torn; torn != nil && durable == keys.MaxEpoch {
		v.note("%s ends in an unfinished record at offset %d, which the next start will cut off", torn.File, torn.Offset)
	}
	return nil
}
