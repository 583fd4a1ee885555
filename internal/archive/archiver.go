package archive

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// Source is the store as the archiver sees it; *mvcc.Changes is one.
type Source interface {
	// Stable is the largest epoch that is visible and durable.
	Stable() keys.Epoch
	// ReadLog reads the log from an epoch on; mark is where an earlier reader was, or zero.
	ReadLog(next keys.Epoch, mark wal.TailMark) *wal.TailReader
	// OldestInLog is the first epoch that the log has.
	OldestInLog() keys.Epoch
	// Hold keeps the log, and LogHolder is the holder that the store has had since it was opened, or nil.
	Hold(o wal.HolderOptions) *wal.Holder
	LogHolder(name string) *wal.Holder
	// HeldLoad is the bulk load with the epochs after one and up to another, if its versions are kept until ReleaseLoads. If it is not
	// known yet whether they are, it is pending.
	HeldLoad(after, through keys.Epoch) (load keys.HeldLoad, held, pending bool)
	// ReadLoad passes what a held bulk load has written, from a key on, in order; see mvcc.Changes.
	ReadLoad(ctx context.Context, at keys.Epoch, from []byte, each func(key, value []byte) error) error
	// ReleaseLoads gives up what is kept of the bulk loads up to an epoch, and RenewLoads keeps what is kept of all for longer.
	ReleaseLoads(ctx context.Context, through keys.Epoch) error
	RenewLoads(ctx context.Context) error
	// Secure makes the commits of the log segment with an epoch safe in the tree, because the segment is damaged, and
	// returns the first epoch of the next segment, or false if there is none yet.
	Secure(ctx context.Context, at keys.Epoch) (next keys.Epoch, ok bool, err error)
}

// HolderName is the name of the archiver's holder of the log.
const HolderName = "archive"

// Hold is the holder that an archiver needs from the opening of the store on. One that yields ends when the disk is full.
func Hold(target string, yields bool) wal.HolderOptions {
	return wal.HolderOptions{Name: HolderName, Owner: target, Lifetime: holderLifetime, Yields: yields}
}

// Options configure an archiver. All fields are needed, but for the functions that say otherwise.
type Options struct {
	Target    objectstore.Store
	Identity  func() Identity // of the store; its lineage may be zero for a while
	Interval  time.Duration   // a file is closed so long after its first record was read
	FileBytes int64           // or when it has so many bytes
	Yields    bool            // the hold ends when the disk is full
	// Lock is the lock of the data directory, as LockID has it; empty if it is not known.
	Lock string
	// AnswerWithin is how long a process that has not ended has time to answer before another one takes over; zero for 30 s.
	AnswerWithin time.Duration
	// RequestBackup is told that what follows can be restored only with a full backup that is made from now on. It may be nil.
	RequestBackup func(reason string)
	Merge         MergeOptions
	// HasBase reports whether there is a backup of an epoch or a later one. It may be nil.
	HasBase func(ctx context.Context, lineage keys.Lineage, epoch keys.Epoch) (bool, error)
}

// Identity names the history of a store.
type Identity struct {
	Lineage  keys.Lineage
	StoreID  [16]byte
	Level    keys.FeatureLevel
	Parent   keys.Epoch // at which the lineage began; zero if the store was created with it
	PageSize int        // zero: it is not noted
}

const (
	holderLifetime = 10 * time.Minute
	// flushTimeout bounds the upload of the last file when the archiver ends.
	flushTimeout = 3 * time.Second
	retryMin     = 500 * time.Millisecond
	retryMax     = 30 * time.Second
	// pollMax is how long the archiver sleeps between two looks at the log: it takes many commits at once.
	pollMax = 250 * time.Millisecond
	// baseEvery is how often, at most, a base after a break is looked for.
	baseEvery = 10 * time.Second
	// damagesMax is how often a log that is damaged is read before its segment is given up.
	damagesMax = 5
	// deviceErrorsMax is the same for a device that cannot read it, which may pass: a minute and a half.
	deviceErrorsMax = 8
)

// Archiver writes the log of a store to its archive.
//
// Invariant: what the holder does not keep is in the archive.
type Archiver struct {
	// Constant.
	options Options
	source  Source

	ends knownEnds // for Intervals

	// Owned by Run.
	connected bool
	identity  Identity // since connected
	place     place    // the same
	owners    *owners  // since the first attempt to connect
	begin     Begin    // of the next file
	next      keys.Epoch
	last      Link // the last record that was read; not known unless begin is Linked, or a file is open
	writer    *Writer
	sealed    *sealed // a file that is complete and not in the archive yet
	loads     loadState
	tail      tail
	moments

	held atomic.Int64 // bytes of the file at hand

	mu      sync.Mutex // guards what follows
	status  Status
	holder  *wal.Holder
	merging *merger // since this process was the owner first
}

// moments are times that the archiver remembers.
type moments struct {
	opened time.Time // when the first record of the file was read; zero without any
	asOf   time.Time // when the stable epoch was what was read up to
	baseAt time.Time // when a base is looked for again
}

// tail is the archiver's place in the log.
type tail struct {
	log     *wal.TailReader // nil until the next read
	damages int             // reads in a row that have found damage, or that the device could not do
}

// sealed is a complete file.
type sealed struct {
	info Info
	data []byte
	asOf time.Time
}

// New returns an archiver. It does nothing before Run.
func New(source Source, o Options) *Archiver {
	a := &Archiver{options: o, source: source, writer: NewWriter()}
	a.status = Status{Target: o.Target.String(), Interval: o.Interval, Started: time.Now()}
	a.status.AsOf = a.status.Started // until Run has looked at the log
	return a
}

// Run archives until ctx ends, and then uploads what it has read, if that is quick. It never returns before: whatever the target
// does, it is tried again.
func (a *Archiver) Run(ctx context.Context) {
	defer a.closeLog()
	a.setHolder(a.source.LogHolder(HolderName))
	renewing, end := context.WithCancel(ctx)
	defer end()
	go a.renewHolder(renewing)
	a.beginsAt(a.oldestCommit(ctx))
	var merging sync.WaitGroup
	merging.Go(func() { a.mergeFiles(ctx) })
	defer merging.Wait()
	quick := min(retryMin, a.options.Interval)
	pause := quick
	for ctx.Err() == nil {
		before := a.Status().Files
		err := a.work(ctx)
		if ctx.Err() != nil {
			break
		}
		if a.Status().Files > before {
			pause = quick
		}
		a.failed(err)
		a.keepHolder()
		a.keepLoads(ctx)
		sleep(ctx, pause)
		pause = min(2*pause, retryMax)
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	if a.connected {
		if err := a.flush(last); err != nil {
			a.failed(err)
		}
	}
	if a.owners != nil {
		a.owners.end(last)
	}
}

// disconnect forgets what was read and is not in the archive: it is read again after the next connect, if this process is the owner then.
func (a *Archiver) disconnect() {
	a.closeLog()
	a.connected, a.sealed, a.opened, a.loads.now = false, nil, time.Time{}, nil
	a.release()
}

// release gives up the memory of a file with a large record, which it has until it is uploaded: the next files are smaller.
func (a *Archiver) release() {
	a.writer.release(2 * a.options.FileBytes)
	a.held.Store(int64(cap(a.writer.out)))
}

// HeldBytes is the memory of the file that is being filled or uploaded.
func (a *Archiver) HeldBytes() int64 { return a.held.Load() }

// work archives until an error.
func (a *Archiver) work(ctx context.Context) error {
	if !a.connected {
		if err := a.connect(ctx); err != nil {
			return err
		}
		a.connected = true
	}
	poll := min(a.options.Interval/10, pollMax)
	for ctx.Err() == nil {
		a.keepHolder()
		a.keepLoads(ctx)
		if err := a.step(ctx); err != nil {
			if notOwner(err) {
				a.disconnect()
			}
			return err
		}
		sleep(ctx, poll)
	}
	return ctx.Err()
}

// step reads what is stable, and uploads the file when it is due. A process that has lost the archive stops here, also if it has nothing
// to upload.
func (a *Archiver) step(ctx context.Context) error {
	if err := a.owners.held(); err != nil {
		return err
	}
	for {
		more, err := a.read(ctx)
		if err != nil {
			return err
		}
		if a.sealed == nil && a.due() {
			a.seal()
		}
		if err := a.upload(ctx); err != nil {
			return err
		}
		if !more {
			a.progress()
			return a.findBase(ctx)
		}
	}
}

// findBase ends the note of a break when there is a backup from which what follows can be restored.
func (a *Archiver) findBase(ctx context.Context) error {
	b := a.Status().Break
	if b == nil || a.options.HasBase == nil || time.Now().Before(a.baseAt) {
		return nil
	}
	a.baseAt = time.Now().Add(max(a.options.Interval, baseEvery))
	found, err := a.options.HasBase(ctx, a.identity.Lineage, b.First-1)
	if err != nil || !found {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status.Break = nil
	return nil
}

// flush uploads everything that is stable now.
func (a *Archiver) flush(ctx context.Context) error {
	for {
		more, err := a.read(ctx)
		if err != nil {
			return err
		}
		a.seal()
		if err := a.upload(ctx); err != nil || !more {
			return err
		}
	}
}

// due reports whether the file should be closed.
func (a *Archiver) due() bool {
	return !a.writer.EndsWithLoad() && a.writer.Count() > 0 && !a.opened.IsZero() && (time.Since(a.opened) >= a.options.Interval || a.writer.Bytes() >= a.options.FileBytes)
}

// read adds stable records to the file, until it is full or has all. It reports whether there is more to read.
func (a *Archiver) read(ctx context.Context) (more bool, err error) {
	if a.sealed != nil {
		return false, nil // the records after it need its memory
	}
	if a.loads.now != nil {
		return a.readLoad(ctx)
	}
	began, through := time.Now(), a.source.Stable()
	if a.tail.log == nil {
		a.tail.log = a.source.ReadLog(a.next, wal.TailMark{})
	}
	for ctx.Err() == nil && (a.opened.IsZero() || a.writer.EndsWithLoad() || a.writer.Bytes() < a.options.FileBytes) { // a file does not end with a bulk load
		rec, ok, err := a.tail.log.Next(through)
		switch {
		case err != nil:
			return false, a.unreadable(ctx, err)
		case !ok:
			a.asOf, a.tail.damages = began, 0
			return false, nil
		case rec.Gap && !rec.Skipped:
			a.seal()
			a.loads.now = &loading{after: a.next - 1, through: rec.Epoch}
			return true, nil
		}
		if err := a.add(&Record{Epoch: rec.Epoch, Term: rec.Term, Skipped: rec.Skipped, Body: rec.Body}); err != nil {
			return false, err
		}
	}
	a.asOf = time.Time{}
	return true, ctx.Err()
}

// add adds a record to the file, which it begins if there is none.
func (a *Archiver) add(rec *Record) error {
	if a.opened.IsZero() {
		h := Header{Lineage: a.identity.Lineage, First: a.next, Begin: a.begin, Level: a.identity.Level}
		if a.begin == Linked {
			h.Link = a.last
		}
		a.writer.Reset(h)
		a.opened = time.Now()
	}
	err := a.writer.Append(rec)
	a.held.Store(int64(cap(a.writer.out)))
	if err != nil {
		return err
	}
	a.last, a.next, a.begin = a.writer.Last(), rec.Epoch+1, Linked
	return nil
}

// restart begins a new chain at an epoch. A file that ends with a bulk load is given up: it cannot be ended, and has nothing else.
func (a *Archiver) restart(why Begin, at keys.Epoch, reason string) {
	a.closeLog()
	a.opened = time.Time{}
	a.begin, a.next, a.last, a.loads.release = why, at, Link{}, at-1
	if at == 1 {
		return // a store without a commit is its base
	}
	a.mu.Lock()
	a.status.Breaks++
	a.status.Break = &Break{Reason: reason, First: at, Since: time.Now()}
	a.mu.Unlock()
	if a.options.RequestBackup != nil {
		a.options.RequestBackup(reason)
	}
}

// unreadable handles a log that cannot be read at the next epoch: records that are not in it any more, or that are damaged, are
// given up. A nil error means that the archiver can go on.
func (a *Archiver) unreadable(ctx context.Context, err error) error {
	a.closeLog()
	if truncated, is := errors.AsType[*wal.TruncatedError](err); is {
		a.seal()
		a.restart(BeginsGap, truncated.Oldest, fmt.Sprintf("the log was given up before epoch %d was archived", truncated.Oldest))
		return nil
	}
	first := a.begin == BeginsFirst // files that were given up long ago may still have their names: they are not needed
	if !a.tail.givesUp(err, damagesMax) && !(first && isDamage(err)) {
		return err
	}
	next, ok, failed := a.source.Secure(ctx, a.next)
	if failed != nil || !ok {
		return errors.Join(err, failed)
	}
	if first {
		a.restart(BeginsFirst, next, "the archive begins")
		return nil
	}
	a.seal()
	a.restart(BeginsGap, next, fmt.Sprintf("the log is damaged at epoch %d: %v", a.next, err))
	return nil
}

// givesUp counts an error of a read, and reports whether there were too many of its kind in a row.
func (t *tail) givesUp(err error, damages int) bool {
	switch {
	case isDamage(err):
		t.damages++
		return t.damages >= damages
	case errors.Is(err, syscall.EIO): // the kernel's error for a block that the device cannot read
		t.damages++
		return t.damages >= deviceErrorsMax
	}
	return false
}

func isDamage(err error) bool {
	return errors.Is(err, wal.ErrCorrupt) || errors.Is(err, wal.ErrVersion) || errors.Is(err, batch.ErrCorrupt)
}

func (a *Archiver) closeLog() {
	if a.tail.log != nil {
		_ = a.tail.log.Close() // it was only read
	}
	a.tail.log = nil
}

// seal completes the file if it has records.
func (a *Archiver) seal() {
	if a.opened.IsZero() || a.sealed != nil || a.writer.EndsWithLoad() {
		return
	}
	info, data := a.writer.Finish()
	a.sealed, a.opened = &sealed{info, data, a.asOf}, time.Time{}
}

// upload creates the complete file in the archive, and lets the holder go on.
func (a *Archiver) upload(ctx context.Context) error {
	s := a.sealed
	if s == nil {
		return nil
	}
	f := file{name: a.place.name(logDir, FileName(s.info.First, s.info.Last.Epoch)), first: s.info.First, last: s.info.Last.Epoch, size: s.info.Bytes}
	err := a.create(ctx, f.name, s.data)
	if err == nil || errors.Is(err, objectstore.ErrExists) {
		err = a.check(ctx, &f, s)
	}
	if err != nil {
		return err
	}
	a.sealed = nil
	a.release()
	if h := a.currentHolder(); h != nil {
		h.Advance(s.info.Last.Epoch) // and not the epoch after it: the next start compares this record
	}
	a.uploaded(s)
	if s.info.Loads > 0 {
		a.loads.release = s.info.Last.Epoch
	}
	return nil
}

// create creates an object while this process is surely the owner.
func (a *Archiver) create(ctx context.Context, name string, data []byte) error {
	if err := a.owners.confirmSurely(ctx); err != nil {
		return err
	}
	surely, stop := a.owners.whileSure(ctx)
	err := a.place.store.Create(surely, name, objectstore.Bytes(data))
	if unsure := stop(); unsure != nil {
		if lost := a.owners.confirm(ctx); lost != nil {
			return a.owners.late(name, lost)
		}
		if err != nil {
			return fmt.Errorf("%w: %s", unsure, err.Error()) // it is tried again
		}
	}
	return err
}

// check returns nil if the file that exists has the same records as ours. An attempt that seemed to fail may have created it, or
// another archiver of the same history. One that is damaged is deleted: the next attempt creates it.
func (a *Archiver) check(ctx context.Context, f *file, s *sealed) error {
	found, err := a.place.info(ctx, f)
	if errors.Is(err, ErrDamaged) || errors.Is(err, objectstore.ErrShort) { // it may have another size
		if f.size, err = a.place.size(ctx, f); err != nil {
			return err
		}
		found, err = a.place.info(ctx, f)
	}
	if errors.Is(err, ErrDamaged) {
		return errors.Join(err, a.place.store.Delete(ctx, f.name))
	}
	if err != nil {
		return refused(err)
	}
	if found.Last != s.info.Last || found.Count != s.info.Count || found.Loads != s.info.Loads || found.Loads == 0 && found.RawBytes != s.info.RawBytes || found.Begin == s.info.Begin && found.Link != s.info.Link {
		return &RefusedError{f.name + " exists and has other records: another store writes to this archive"}
	}
	return nil
}

// RefusedError means that this store must not write to the archive. An operator has to decide.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return "archive: refused: " + e.Reason }

// renewHolder puts off the deadline of the holder until ctx ends, also while a call to the target does not return.
func (a *Archiver) renewHolder(ctx context.Context) {
	for ctx.Err() == nil {
		every := holderLifetime
		if h := a.currentHolder(); h != nil {
			_ = h.Renew() // Run replaces one that has ended
			every = h.Lifetime
		}
		sleep(ctx, every/8)
	}
}

func (a *Archiver) currentHolder() *wal.Holder {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.holder
}

func (a *Archiver) setHolder(h *wal.Holder) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.holder = h
}

// keepHolder replaces a holder that has ended: if the log has been given up meanwhile, the reader finds that out.
func (a *Archiver) keepHolder() {
	if h := a.currentHolder(); h != nil && h.Renew() == nil {
		return
	}
	hold := Hold(a.options.Target.String(), a.options.Yields)
	if a.connected {
		hold.From = max(a.Status().Archived, 1)
	}
	a.setHolder(a.source.Hold(hold))
}

func (a *Archiver) origin() Origin {
	return Origin{
		Format: 1, Lineage: a.identity.Lineage.String(), StoreID: hex.EncodeToString(a.identity.StoreID[:]), ParentEpoch: uint64(a.identity.Parent), PageSize: a.identity.PageSize, Created: time.Now().UTC(),
	}
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
