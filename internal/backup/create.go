package backup

import (
	"bytes"
	"cmp"
	"context"
	cryptorand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Source is the store that is copied.
type Source interface {
	// PinCopy pins the newest durable state, after a checkpoint if later commits exist: what was acknowledged before is in it.
	// See storage.CopyState.
	PinCopy(ctx context.Context, lifetime time.Duration) (*storage.CopyState, error)
}

// Options configure a backup. Zero fields take the default named beside them.
type Options struct {
	Base      string         // id of the base of an incremental backup, or LatestBase; a full one
	Bandwidth int64          // most bytes read per second; no limit
	KeepGoing bool           // complete the backup although pages are damaged
	ReadAll   bool           // read all live pages, also those that cannot have changed since the base, and parts that exist; see readsParts
	PartBytes int64          // pages in a part before compression, about; 64 MiB
	Workers   int            // goroutines that compress; half of the processors, and all while Idle
	Idle      func() bool    // nothing else needs the processors now; nil: it is not known
	Program   string         // version, for the manifest
	Progress  func(Progress) // called when neighbouring pages were read, a MiB at most, and at the end; may be nil

	lease leaseTimes
	pin   func(*storage.CopyState) pin // for tests; the state
	share func() uint64                // for tests; random
}

// Progress says how far a backup is.
type Progress struct {
	ID                   string
	Epoch                uint64
	Pages, PagesTotal    uint64 // read, and to be read
	Damaged              uint64
	PartsSent, PartsKept uint64 // kept: existed already
	BytesSent            uint64
}

const (
	partBytesDefault = 64 << 20
	runBytes         = 1 << 20
	damagedMax       = 100_000

	pinLifetime = 2 * time.Minute
)

// pin is the part of a pinned state that the job renews.
type pin interface {
	Renew() error
	Release()
}

// DamagedPageError is a page that is not intact in the store.
type DamagedPageError struct {
	Page   page.ID
	Damage error
}

func (e *DamagedPageError) Error() string {
	return fmt.Sprintf("backup: page %d of the store is damaged: %v", e.Page, e.Damage)
}

// Unwrap returns the damage.
func (e *DamagedPageError) Unwrap() error { return e.Damage }

// Create makes a backup, and returns its manifest. After an error there is no backup, unless the context has ended and the target does not let the
// manifest be removed; the parts that were sent are used by the next one.
func Create(ctx context.Context, source Source, store objectstore.Store, o Options) (*Manifest, error) {
	o.PartBytes = cmp.Or(o.PartBytes, partBytesDefault)
	state, err := source.PinCopy(ctx, pinLifetime)
	if err != nil {
		return nil, err
	}
	j := &job{store: store, options: o, state: state, pin: state}
	if o.pin != nil {
		j.pin = o.pin(state)
	}
	defer j.pin.Release()
	if err := j.plan(ctx); err != nil {
		return nil, err
	}
	lease, err := takeLease(ctx, store, j.dir, jobBackup, j.manifest.leaseID(), o.lease)
	if err != nil {
		return nil, err
	}
	defer lease.release()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	lease.keep(ctx, cancel)
	if err := lease.awaitNone(ctx, jobPrune, j.pin.Renew); err != nil {
		return nil, because(ctx, err)
	}
	if err := j.checkBase(ctx, j.renewing()); err != nil { // a prune that ran before the lease may have removed it
		return nil, because(ctx, err)
	}
	if err := j.copy(ctx); err != nil {
		return nil, because(ctx, err)
	}
	return j.manifest, because(ctx, j.finish(ctx))
}

// because returns why a context ended, if an error is only the context's.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) {
		return cause
	}
	return err
}

// job is one backup.
type job struct {
	// Constant after plan.
	store   objectstore.Store
	options Options
	state   *storage.CopyState
	pin     pin
	dir     string
	base    *Manifest   // nil for a full backup
	changed *bitset.Set // the pages that can differ from the base; nil: all
	share   uint64      // that is read in any case; see readShares
	total   uint64      // pages to be read, but for those that the base turns out not to have

	// Of the goroutine that reads.
	manifest *Manifest
	nextRun  time.Time // when it may be read
	read     uint64    // pages

	// Of the goroutine that sends, and read by the other.
	sent, kept, bytesSent atomic.Uint64
	keptParts             []object // that existed already; read after the end
}

// plan checks what can be checked before anything is written, and begins the manifest.
func (j *job) plan(ctx context.Context) error {
	info, err := j.state.Info()
	if err != nil {
		return err
	}
	j.manifest = &Manifest{
		Format: manifestFormat, ID: newID(begunAt(time.Now(), info.History.CommitTime)), Kind: Full, State: describe(&info), Program: j.options.Program, LivePages: 0,
	}
	j.manifest.State.Superblock = j.state.Pages.Superblock()
	j.dir = Dir(info.History.Lineage, info.StoreID)
	for id := j.state.Pages.NextCopied(0); id < j.state.Pages.PageCount(); id = j.state.Pages.NextCopied(id + 1) {
		j.manifest.LivePages++
	}
	j.total = j.manifest.LivePages
	if j.options.Base == "" {
		return nil
	}
	target := j.renewing() // there may be many manifests
	if j.options.Base == LatestBase {
		j.base, err = j.latestBase(ctx, target)
	} else {
		j.base, err = Find(ctx, target, j.dir, j.options.Base)
	}
	if err != nil || j.base == nil {
		return err
	}
	if why := j.manifest.unfitBase(j.base); why != "" {
		return fmt.Errorf("%w: %s cannot be the base: %s", ErrBase, j.base.ID, why)
	}
	j.manifest.Kind = Incremental
	j.manifest.Base = &Base{ID: j.base.ID, SHA256: j.base.SHA256(), Checkpoint: j.base.State.Checkpoint}
	if err := j.checkBase(ctx, target); err != nil {
		return err
	}
	j.planReading()
	return nil
}

// checkBase returns nil if the target has the base, and the bases that it needs.
func (j *job) checkBase(ctx context.Context, target objectstore.Store) error {
	if j.base == nil {
		return nil
	}
	_, err := Chain(ctx, target, j.manifest)
	return err
}

// planReading finds out which pages can differ from the base: this process has made the base, and remembers what was written since.
func (j *job) planReading() {
	changed, known := j.state.Pages.ChangedSince(j.base.SHA256())
	if !known || j.options.ReadAll {
		return
	}
	j.changed, j.share, j.total = changed, rand.Uint64N(readShares), 0
	if j.options.share != nil {
		j.share = j.options.share()
	}
	for id := j.state.Pages.NextCopied(0); id < j.state.Pages.PageCount(); id = j.state.Pages.NextCopied(id + 1) {
		if j.reads(id) {
			j.total++
		}
	}
}

// readShares: an incremental backup reads one of 64 shares of the pages, whatever it knows of them. A share has every 64th MiB of the file, so
// that the device reads long runs.
const readShares = 64

// mayDiffer reports whether a page of the state can be another one than in the base.
func (j *job) mayDiffer(id page.ID) bool { return j.changed == nil || j.changed.Has(int(id)) }

// reads reports whether a page is read although the base may have it.
func (j *job) reads(id page.ID) bool {
	return j.mayDiffer(id) || uint64(id)*uint64(j.state.Pages.PageSize())/runBytes%readShares == j.share
}

// LatestBase stands for the newest backup that can be the base. Without one the backup is a full one.
const LatestBase = "latest"

func (j *job) latestBase(ctx context.Context, target objectstore.Store) (base *Manifest, err error) {
	all, _, err := List(ctx, target, j.dir) // a manifest that cannot be read is no base
	for _, m := range all {
		if j.manifest.unfitBase(m) == "" {
			base = m
		}
	}
	return base, err
}

// ErrBase means that an incremental backup cannot have the base. A full one is possible.
var ErrBase = errors.New("backup: unfit base, make a full backup")

// idTime is the form of the time in an id.
const idTime = "20060102T150405Z"

// begunAt is the time in the id of a backup: no commit of its state is later. A wall clock that was set back is before the times of commits, which never
// go back.
func begunAt(now, newest time.Time) time.Time {
	if newest.After(now) {
		return newest.UTC()
	}
	return now.UTC()
}

// newID names a backup by its time, and by chance.
func newID(now time.Time) string {
	var random [4]byte
	_, _ = cryptorand.Read(random[:]) // never fails
	return fmt.Sprintf("%s-%x", now.Format(idTime), random)
}

// Find returns a backup by its id. That is a name, which a client has chosen, and never a path.
func Find(ctx context.Context, store objectstore.Store, dir, id string) (*Manifest, error) {
	names, err := list(ctx, store, dir+"/"+manifestsDir+id+".")
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%w: %s", ErrNoBackup, id)
	}
	return readManifest(ctx, store, dir, names[0].Name[len(dir)+1:])
}

// copy reads the pages, and sends them in parts.
func (j *job) copy(ctx context.Context) error {
	s := newSender(ctx, j)
	err := j.readPages(s)
	if err == nil && j.state.Quarantine != nil {
		err = j.copyQuarantine(s)
	}
	if sending := s.close(); err == nil || sending != nil && errors.Is(err, errSendingFailed) {
		err = sending
	}
	return err
}

// throttle waits until n more bytes may be read, and renews the pin meanwhile. Time that passed without reading is not made up for.
func (j *job) throttle(ctx context.Context, n int) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if j.options.Bandwidth <= 0 {
		return nil
	}
	for wait := time.Until(j.nextRun); wait > 0; wait = time.Until(j.nextRun) {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(min(wait, time.Second)):
		}
		if err := j.pin.Renew(); err != nil {
			return err
		}
	}
	j.nextRun = time.Now().Add(time.Duration(float64(n) / float64(j.options.Bandwidth) * float64(time.Second)))
	return nil
}

// copyQuarantine sends the quarantine file as a part of its own.
func (j *job) copyQuarantine(s *sender) error {
	file := j.state.Quarantine
	a := newAssembler(s, partFile, j.state.Pages.PageSize(), j.options)
	for rest := file.Content; len(rest) > 0; {
		n := min(len(rest), frameBytes)
		if err := a.addFrame(bytes.Clone(rest[:n])); err != nil {
			_ = a.close() // there is an error already
			return err
		}
		rest = rest[n:]
	}
	err := a.endPart()
	if sealed := a.close(); err == nil {
		err = sealed
	}
	return err
}

// finish makes the backup exist: its manifest is the last object. Before, the base and the parts that existed already are looked up: a prune of a
// machine that does not see our lease could have deleted one. After it, all parts are: a target may execute a deletion late whose connection has
// broken, of an object that was made anew since.
func (j *job) finish(ctx context.Context) error {
	m := j.manifest
	m.Created = time.Now().UTC().Truncate(time.Second)
	for i := range m.Parts {
		m.Pages += m.Parts[i].Pages
	}
	if err := j.lookUp(ctx, j.keptParts); err != nil {
		return err
	}
	p, err := m.encode()
	if err != nil {
		return err
	}
	if err := objectstore.CreateOwn(ctx, j.store, path.Join(j.dir, m.name), p); err != nil {
		return err
	}
	if err := j.lookUp(ctx, m.objects()); err != nil {
		return errors.Join(err, j.removeManifest(ctx))
	}
	j.state.Pages.SetCopyName(m.SHA256())
	j.report()
	return nil
}

// removeManifest ends the existence of a backup that may lack a part. After the end of the job it takes no longer than the removal of the lease.
func (j *job) removeManifest(ctx context.Context) error {
	removing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-removing.Done():
		case <-time.After(j.options.lease.withDefaults().release):
			cancel()
		}
	})
	defer stop()
	return j.store.Delete(removing, path.Join(j.dir, j.manifest.name))
}

func (j *job) lookUp(ctx context.Context, parts []object) error {
	if err := j.checkBase(ctx, j.store); err != nil {
		return fmt.Errorf("backup: the base has disappeared; it was deleted while the backup ran: %w", err)
	}
	for _, part := range parts {
		if ok, err := hasPart(ctx, j.store, j.dir, part); err != nil || !ok {
			return errors.Join(err, fmt.Errorf("backup: part %s has disappeared; it was deleted while the backup ran", part.SHA256))
		}
	}
	return nil
}

func (j *job) report() {
	if j.options.Progress == nil {
		return
	}
	j.options.Progress(Progress{
		ID: j.manifest.ID, Epoch: j.manifest.State.Epoch, Pages: j.read, PagesTotal: max(j.total, j.read), Damaged: uint64(len(j.manifest.Damaged)),
		PartsSent: j.sent.Load(), PartsKept: j.kept.Load(), BytesSent: j.bytesSent.Load(),
	})
}
