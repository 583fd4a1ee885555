// Package restore makes a store of a base backup and the log archive: the state of a past epoch or time, as another store.
//
//	archive ─► plan: base, files ─► DIR.restoring: base ─► replay ─► new lineage ─► clean ─► verify ─► rename ─► DIR
//	                                    nothing before this is written to the disk
//
// Terms. A *base* is a state that a backup has, or a store without a commit. The *target* is the epoch or the time whose state is
// wanted.
//
// Invariants:
//   - A directory with the final name is a whole, verified store that has the target's state, or does not exist. Until it is whole, it has
//     a file by which a server refuses it under any name.
//   - A target that the archive does not lead to is an error. The next best state is named, and never taken silently.
//   - The restored store is another one: it has its own store id and lineage. So resume tokens and archives of the original refuse
//     it, and it refuses theirs.
//   - What was revoked after the target stays revoked: the restored store has no tokens, unless Options.KeepTokens.
package restore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// Base is a state to begin with.
type Base struct {
	archive.Point
	ID       string // empty for a store without a commit
	PageSize int    // of the data file; zero: it is not known
	// Write writes the data file into an empty directory, without a log. It is nil for a store without a commit.
	Write func(ctx context.Context, dir string) error
}

// Options say what to restore. Progress may be nil.
type Options struct {
	Store      objectstore.Store
	Lineage    keys.Lineage // zero: the only one that the store has
	Oldest     string       // in place of Lineage: the directory of the backups of a store of the oldest feature level, which has none
	Target     archive.Target
	History    string // name of the archive file with which the wanted history ends, if two copies of a store were archived to one place
	Dir        string // must not exist, or be empty
	KeepTokens bool
	PlanOnly   bool
	Memory     int64 // as storage.Options.MemoryBytes
	PageSize   int   // of a store without a base; zero: that of the original, see emptyBase
	Progress   func(Progress)
	Contents   *Contents // what the restored store must have at the target, an epoch; nil: it is not compared
	NewestBase bool      // fail if the newest backup before the target is damaged; otherwise the one before it is taken
	// AllowDamaged lets a backup that was made with damaged pages be the base. What they had is lost, and reads of it are errors.
	AllowDamaged bool

	damaged map[string]error // why backups are not taken, by their ids
	tried   int              // page size, if nothing says it
}

// Progress says how far a restore is.
type Progress struct {
	Step    string
	Epoch   keys.Epoch
	Records uint64
}

// Report is what was restored, or would be.
type Report struct {
	Lineage     keys.Lineage // of the archive
	Base        Base
	Files       int
	Loads       int           // bulk loads in the files
	FileBytes   int64         // with the entries of bulk loads
	Reached     archive.Point // the restored state
	Records     uint64
	Checkpoints int
	NewLineage  keys.Lineage
	StoreID     [16]byte
	Tokens      int              // that were revoked
	Holds       int              // that were ended
	Damages     []inspect.Damage // of the restored store, if damaged pages are allowed
	LostSpace   string           // how much the original had lost, if it had: no data
	Took        time.Duration
}

// ErrDirNotEmpty means that the data directory exists and is not empty.
var ErrDirNotEmpty = errors.New("restore: the data directory exists and is not empty")

// ErrDamaged means that the restored store is damaged, although the backup and the archive are what was written.
var ErrDamaged = errors.New("restore: the restored store is damaged")

// partialSuffix is added to the name of the data directory until it is complete.
const partialSuffix = ".restoring"

// Run restores a state. Errors that match ErrUnreachable mean that the target is not in the archive.
func Run(ctx context.Context, o Options) (r *Report, err error) {
	began := time.Now()
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	if !o.PlanOnly {
		if o.Dir, err = filepath.Abs(o.Dir); err != nil {
			return nil, err
		}
		if err := checkDir(o.Dir); err != nil {
			return nil, err
		}
	}
	if o.Contents != nil && o.Contents.Epoch != o.Target.Epoch {
		return nil, errOtherEpoch
	}
	o.Progress(Progress{Step: "plan"})
	if err := chooseHistory(ctx, &o); err != nil {
		return nil, err
	}
	if !o.PlanOnly { // before the plan: nothing of it is deleted meanwhile
		leased, end, err := keepLease(ctx, &o)
		if err != nil {
			return nil, err
		}
		defer end()
		ctx = leased
	}
	r, err = fromBases(ctx, &o)
	if r != nil && !o.PlanOnly {
		r.Took = time.Since(began)
	}
	return r, err
}

// fromBases restores from the newest base from which the target can be reached. A damaged backup is left out: the one before it leads there, too, if
// the archive has the log since then.
func fromBases(ctx context.Context, o *Options) (*Report, error) {
	o.damaged = map[string]error{}
	var damage error
	for {
		c, err := choose(ctx, o)
		if err != nil {
			return nil, cmp.Or(damage, err)
		}
		if err := c.check(o); err != nil {
			return nil, err
		}
		if damage == nil {
			c.report(o.Progress)
		}
		base, plan := c.base, c.plan
		r := &Report{Lineage: o.Lineage, Base: base, Files: len(plan.Files), Loads: plan.Loads, FileBytes: plan.Bytes(), Reached: plan.Last}
		if o.PlanOnly {
			return r, nil
		}
		err = build(ctx, o, plan, r)
		if o.triesLarger(&base, err) {
			continue
		}
		broken := (*baseError)(nil)
		if o.NewestBase || !errors.As(err, &broken) || !broken.damaged() {
			return r, err
		}
		o.damaged[base.ID], damage = err, cmp.Or(damage, err)
		o.Progress(Progress{Step: fmt.Sprintf("the backup is damaged, and one before it is looked for (%v)", err), Epoch: base.Epoch})
	}
}

// baseError means that a base could not be restored.
type baseError struct {
	id    string
	cause error
}

func (e *baseError) Error() string { return fmt.Sprintf("restore base %s: %v", e.id, e.cause) }
func (e *baseError) Unwrap() error { return e.cause }

// damaged reports whether the backup lacks something, or something of it is not what was written.
func (e *baseError) damaged() bool {
	return errors.Is(e.cause, backup.ErrDamaged) || errors.Is(e.cause, backup.ErrNoBackup)
}

// keepLease keeps the objects of an archive from being deleted until end is called. An archive that cannot be written, such as a
// volume that is full or mounted to be read, is restored without: what is deleted meanwhile is a named error.
func keepLease(ctx context.Context, o *Options) (_ context.Context, end func(), err error) {
	lease, err := archive.TakeLease(ctx, o.Store, o.backups())
	if cannotBeWritten(err) {
		o.Progress(Progress{Step: "no lease, because the archive cannot be written: nothing keeps a prune from deleting what is restored"})
		return ctx, func() {}, nil
	}
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		lease.Keep(ctx, unlessFull(cancel))
	}()
	return ctx, func() {
		cancel(nil)
		<-renewed
	}, nil
}

// unlessFull ends a restore that has lost its lease, unless the archive cannot be written any more: a server may have filled it meanwhile.
func unlessFull(end context.CancelCauseFunc) context.CancelCauseFunc {
	return func(err error) {
		if !cannotBeWritten(err) {
			end(err)
		}
	}
}

func cannotBeWritten(err error) bool {
	return slices.ContainsFunc([]error{objectstore.ErrDenied, syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT}, func(kind error) bool { return errors.Is(err, kind) })
}

// checkDir refuses a directory with anything in it, and one whose place the finished directory cannot take.
func checkDir(dir string) error {
	partial := dir + partialSuffix
	if _, err := os.Lstat(partial); err == nil {
		return inUse(partial)
	}
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	parent, err := os.Stat(filepath.Dir(dir))
	if err != nil {
		return err
	}
	if !info.IsDir() || DeviceOf(info) != DeviceOf(parent) {
		return fmt.Errorf("%w: %s is a file, a symbolic link or a mount point, which cannot be replaced; restore into a new directory below it or beside it", ErrDirNotEmpty, dir)
	}
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("%w: %s; restore into another directory, or remove it", ErrDirNotEmpty, dir)
	}
	return err
}

// inUse refuses an unfinished directory of another restore.
func inUse(partial string) error {
	return fmt.Errorf("%w: another restore makes %s, or a restore that was killed has left it; remove it if none is running", ErrDirNotEmpty, partial)
}

// DeviceOf is the file system of a file; zero if that is not known.
func DeviceOf(info fs.FileInfo) uint64 {
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		return stat.Dev
	}
	return 0
}

// makePartial makes the unfinished directory. Only one restore can do so. If root restores, the store belongs to the account of the
// empty directory that it replaces, or of the one that it is in: a server without privileges must be able to open it.
func makePartial(dir string) (partial string, err error) {
	partial = dir + partialSuffix
	parent := filepath.Dir(dir)
	if err := vfs.NewOS().MkdirAll(parent); err != nil {
		return "", err
	}
	like := dir
	if _, err := os.Lstat(dir); err != nil {
		like = parent
	}
	if err = vfs.MkdirLike(partial, like); errors.Is(err, fs.ErrExist) {
		err = inUse(partial)
	}
	return partial, err
}

// build makes the store under another name, and renames it when it is complete.
func build(ctx context.Context, o *Options, plan *archive.Plan, r *Report) (err error) {
	partial, err := makePartial(o.Dir)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeUnfinished(partial, os.RemoveAll))
		}
	}()
	if err := markUnfinished(partial); err != nil {
		return err
	}
	o.Progress(Progress{Step: "base", Epoch: r.Base.Epoch})
	if r.Base.Write != nil {
		if err := r.Base.Write(ctx, partial); err != nil {
			return &baseError{r.Base.ID, err}
		}
	}
	if err := replay(ctx, o, plan, r, partial); err != nil {
		return err
	}
	o.Progress(Progress{Step: "clean and verify", Epoch: r.Reached.Epoch, Records: r.Records})
	if err := finish(ctx, o, r, partial); err != nil {
		return err
	}
	return giveName(partial, o.Dir, vfs.NewOS().SyncDir)
}

// replay brings the records up to the target into the data file, and makes it another store.
func replay(ctx context.Context, o *Options, plan *archive.Plan, r *Report, dir string) error {
	var reached archive.Point
	restored, err := storage.Restore(ctx, o.storage(r, dir), func(apply func(wal.Commit, bool) error) (err error) {
		newest := r.Base.Epoch
		reached, err = plan.Replay(ctx, func(rec archive.Record) error {
			continues := rec.Load && rec.Epoch == newest
			if newest = rec.Epoch; !continues {
				r.Records++
			}
			if rec.Load || r.Records%(1<<16) == 0 {
				o.Progress(Progress{"replay", rec.Epoch, r.Records})
			}
			return apply(wal.Commit{Epoch: rec.Epoch, Term: rec.Term, Body: rec.Body}, continues)
		})
		return err
	})
	if err != nil {
		return err
	}
	if restored.Epoch != reached.Epoch {
		return fmt.Errorf("%w: the data file is at epoch %d instead of %d", archive.ErrNotReached, restored.Epoch, reached.Epoch)
	}
	r.Reached, r.NewLineage, r.StoreID, r.Checkpoints = reached, restored.Lineage, restored.StoreID, restored.Checkpoints
	return nil
}

func (o *Options) storage(r *Report, dir string) storage.Options {
	return storage.Options{Dir: dir, MemoryBytes: o.Memory, PageSize: o.pageSize(&r.Base)}
}

// finish opens the store, deletes what must not come back, verifies it, and closes it.
func finish(ctx context.Context, o *Options, r *Report, dir string) (err error) {
	options := mvcc.Options{Storage: o.storage(r, dir)}
	if o.Contents != nil { // keys that the original had must not expire before they are compared
		options.WallClock = func() time.Time { return time.UnixMicro(0) }
	}
	store, err := mvcc.OpenContext(ctx, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	if o.Contents != nil {
		if err := compareContents(ctx, store, o.Contents); err != nil {
			return err
		}
	}
	if store.ID() != r.StoreID || store.History().Lineage != r.NewLineage {
		return fmt.Errorf("restore: %s has another store than the one that was restored there", dir)
	}
	session := store.OwnSession()
	defer session.Close()
	if r.Holds, err = o.deleteRecords(ctx, session, keys.SystemHold); err != nil {
		return fmt.Errorf("end holds: %w", err)
	}
	if !o.KeepTokens {
		if r.Tokens, err = o.deleteRecords(ctx, session, keys.SystemToken); err != nil {
			return fmt.Errorf("revoke tokens: %w", err)
		}
	}
	if err := store.Checkpoint(ctx); err != nil {
		return err
	}
	if err := o.checkKeys(&r.Base, store.Stats().Storage.Quarantine.Versions); err != nil {
		return err
	}
	report, err := store.Verify(ctx, inspect.VerifyOptions{Owner: "restore"})
	if err != nil {
		return err
	}
	if report.OnlySpace() {
		r.LostSpace = report.Damages[0].Reason
		o.Progress(Progress{Step: "the store has everything, and some space that nothing uses, as the original had (" + r.LostSpace + ")", Epoch: r.Reached.Epoch, Records: r.Records})
		return nil
	}
	if r.Damages = report.Damages; !report.OK() && !o.AllowDamaged {
		return fmt.Errorf("%w: %s; it is kept with --allow-damaged", ErrDamaged, report.Damages[0].Reason)
	}
	return nil
}

// deleteMax bounds the records that one commit deletes.
const deleteMax = 1000

// deleteRecords deletes the records of the store with a first byte, by commits of the origin RESTORE, and counts them, but for one that has only this byte:
// that is about all of them. Records on damaged pages are lost.
func (o *Options) deleteRecords(ctx context.Context, x *mvcc.Session, first byte) (n int, err error) {
	var hidden func(lower, upper []byte, err error)
	if o.AllowDamaged {
		hidden = func(_, _ []byte, _ error) {}
	}
	for {
		w := &mvcc.Write{Durability: mvcc.DurabilitySync, Origin: batch.OriginRestore}
		w.SetOwn()
		count := 0
		err := x.ScanReadable(ctx, []byte{first}, []byte{first + 1}, func(key, _ []byte, _ keys.Epoch) bool {
			w.Batch.DeleteRecord(keys.SpaceSystem, key)
			if count++; len(key) > 1 {
				n++
			}
			return count < deleteMax
		}, hidden)
		if err != nil || count == 0 {
			return n, err
		}
		epoch, err := x.Commit(ctx, w)
		if err == nil {
			err = x.Store().Wait(ctx, epoch, mvcc.DurabilitySync)
		}
		if err != nil {
			return n, err
		}
	}
}
