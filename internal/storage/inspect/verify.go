// Package inspect reads the files of a store without its caches: it verifies them, salvages what
// damaged files still have, repairs a damaged log, and measures the space that keys take.
//
// A verification reads one durable state:
//
//	log         every record after the state's epoch
//	tree        each page's checksum and contents, levels, separators, order, newest epochs
//	values      each large value, end to end
//	quarantine  both copies of its file
//	accounts    every page is reached once and live, or not live; blobs, keys and bytes are as many as the superblock says
//
// It continues next to damage, and reports the keys that the damage may hide. The accounts are
// compared only if nothing is damaged, because they would repeat in other words what is already
// reported.
//
// Online, a verification pins the newest state (storage.Engine.PinState), so that its pages are not
// reused before the end. Checkpoints and writers continue. Offline, everything holds the lock of
// the store.
//
// The package reads through storage.DurableState and changes nothing, with the exception of
// RepairLog. Package storage does not import it.
package inspect

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/quarantine"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// VerifyOptions configure a verification. The zero value means no limit and no progress reports.
type VerifyOptions struct {
	Owner          string               // the client, for kvctl log holders
	PagesPerSecond int                  // most pages read per second; 0 for no limit
	Progress       func(VerifyProgress) // called a few times a second, if set
}

// VerifyProgress says how far a verification is.
type VerifyProgress struct {
	Pages, PagesTotal uint64
	Damages           uint64
}

// VerifyReport is the result of a verification.
type VerifyReport struct {
	Epoch      keys.Epoch // of the state that was verified
	Checkpoint uint64

	Pages      uint64 // reached, with those of the allocation map and of the blobs
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
	Notes       []string // facts that are not damage: a torn log, a superblock that a crash left half written
	Duration    time.Duration
}

// OK reports whether no damage was found.
func (r *VerifyReport) OK() bool { return r.DamageTotal == 0 }

// OnlySpace reports whether all that was found is space that nothing uses.
func (r *VerifyReport) OnlySpace() bool {
	used := func(d Damage) bool { return !d.OnlySpace }
	return !r.OK() && r.DamageTotal == uint64(len(r.Damages)) && !slices.ContainsFunc(r.Damages, used)
}

// Verify checks the newest durable state while the engine works. An error means that the check
// could not be completed; damage is in the report.
func Verify(ctx context.Context, e *storage.Engine, o VerifyOptions) (*VerifyReport, error) {
	v := newVerifier(ctx, o)
	state, err := e.PinStateAndLog(ctx, "verify", o.Owner)
	if err != nil {
		return nil, err
	}
	defer state.Release()
	if err := v.checkLog(&state.DurableState, wal.Proof{}, state.Durable(), state.RenewLog); err != nil {
		return nil, err
	}
	state.ReleaseLog()
	versions, fault, err := state.ReadNewestQuarantine(ctx)
	if err := v.checkQuarantine(versions, fault, err); err != nil {
		return nil, err
	}
	return v.run(&state.DurableState)
}

// VerifyDir checks the files of a store that is not open. Errors: vfs.ErrLocked if it is,
// ErrNewerFormat, and those of the file system.
func VerifyDir(ctx context.Context, fsys vfs.FS, dir string, o VerifyOptions) (report *VerifyReport, err error) {
	files, lock, err := storage.LockFiles(fsys, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	v := newVerifier(ctx, o)
	state, err := files.OpenState()
	if err != nil {
		return v.withoutState(files, err)
	}
	defer func() { err = errors.Join(err, state.Close()) }()
	if err := v.checkLog(state, state.LogProof(), keys.MaxEpoch, func() error { return nil }); err != nil {
		return nil, err
	}
	if state.Pages.SuperblockMissing() && v.report.DamageTotal > 0 { // of the log, which was truncated after the state that is lost
		v.report.Damages, v.report.DamageTotal = nil, 0
		v.note("the log does not reach back to checkpoint %d: a newer checkpoint was durable, and both its superblock and the copy are damaged", state.Pages.Checkpoint())
	}
	versions, fault, err := state.ReadQuarantine()
	if err := v.checkQuarantine(versions, fault, err); err != nil {
		return nil, err
	}
	return v.run(state)
}

// withoutState reports a data file that cannot be opened or does not exist.
func (v *verifier) withoutState(files storage.Files, cause error) (*VerifyReport, error) {
	switch {
	case errors.Is(cause, pager.ErrNewerFormat):
		return nil, storage.TranslateError(cause)
	case errors.Is(cause, fs.ErrNotExist):
		if segments, err := wal.Segments(files.FS, files.Dir); err != nil || len(segments) == 0 {
			return nil, fmt.Errorf("%s holds no store: %w", files.Dir, cause)
		}
	case !errors.Is(cause, pager.ErrNotDataFile) && !errors.Is(cause, pager.ErrSuperblocks) && !errors.Is(cause, pager.ErrSuperblockMissing):
		return nil, cause
	}
	v.damage(Damage{Kind: DamageSuperblock, File: files.DataPath(), Reason: cause.Error()})
	v.finish()
	return &v.report, nil
}

// checkQuarantine reports what reading the quarantine file has found, and notes what the file
// holds.
func (v *verifier) checkQuarantine(versions []quarantine.Version, fault, err error) error {
	damage, ok := errors.AsType[*storage.CorruptionError](errors.Join(fault, err))
	if err != nil && !ok {
		return err
	}
	if ok {
		v.damage(Damage{Kind: DamageQuarantine, File: damage.File, Reason: damage.Reason})
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

// logTries bounds how often the log is listed again because a recycled file changed its name.
const logTries = 10

// checkLog reads every record after the state. segment is a log segment that must exist, zero for
// none. Records newer than durable are being written at the same time and are not checked. renew says that the log
// is still read, and whether it is still kept.
func (v *verifier) checkLog(state *storage.DurableState, proof wal.Proof, durable keys.Epoch, renew func() error) error {
	records := 0
	each := func(keys.Epoch, []byte) error {
		if records++; records%yieldEvery == 0 {
			runtime.Gosched()
		}
		return errors.Join(v.ctx.Err(), renew())
	}
	fsys, dir, after := state.Files.FS, state.Files.Dir, state.Pages.State().Epoch
	found, err := wal.Replay(fsys, dir, after, proof, each)
	for tries := 0; errors.Is(err, fs.ErrNotExist) && tries < logTries; tries++ {
		// A recycled segment got its new name between listing and opening.
		found, err = wal.Replay(fsys, dir, after, proof, each)
	}
	if gone := renew(); gone != nil { // what is missing was recycled, and is not damaged
		return gone
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
	if foreign, ok := errors.AsType[*wal.LineageError](err); ok {
		v.damage(Damage{Kind: DamageLog, File: foreign.File, Reason: foreign.Error()})
		return nil
	}
	if err != nil {
		return storage.TranslateError(err)
	}
	if torn := found.Torn; torn != nil && durable == keys.MaxEpoch {
		v.note("%s ends in an unfinished record at offset %d, which the next start will truncate", torn.File, torn.Offset)
	}
	return nil
}
