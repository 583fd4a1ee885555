package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// Deletions write before they free anything: a log record, and the pages of a checkpoint. So the store keeps a reserve of
// allocated disk space: log files (wal.Log.Reserve), free pages in the data file (pager.FreeBytes), and a file for the next
// contents of the quarantine (quarantine.Files.Reserve). Every write may take from it. When it is not complete and cannot be filled, there is a shortage, and ordinary writes are refused until it is
// complete again. Pages that a checkpoint frees and segments that it recycles count, so that deletions end the shortage
// although other files go on filling the disk.

// diskReserve is the state of the reserve.
type diskReserve struct {
	enabled  bool                          // Options.DiskReserve is not zero; constant after Open
	shortage atomic.Pointer[ShortageError] // nil while the disk has space; written by note
	requests chan struct{}                 // capacity 1: the reserve should be checked; constant after Open
	checked  atomic.Pointer[chan struct{}] // closed when the next check that begins has ended; replaced under mu
	judged   atomic.Int64                  // files of the log's reserve that had become segments when the last check began
	wanted   atomic.Bool                   // the next check gives up something of the log, although the reserve may be complete
	large    atomic.Int64                  // bytes of the largest record for which the next check makes room in pages
	noRoom   atomic.Bool                   // the last check that was to do so found the disk full
	failed   atomic.Bool                   // the last check that was to do so failed for another reason
	given    atomic.Uint64                 // how often a check has given up something of the log
	ended    chan struct{}                 // closed when RunSpace has ended; constant after Open

	mu    sync.Mutex // one check at a time; taken after checkpointState.mu, before retired.mu and Engine.mu
	taken int        // files of the log's reserve that became segments, as seen last; guarded by Engine.mu

	uncertain bool // see Engine.certify; guarded by Engine.mu
}

func (r *diskReserve) init(enabled bool) {
	r.enabled, r.requests, r.ended = enabled, make(chan struct{}, 1), make(chan struct{})
	r.checked.Store(newSpaceCheck())
}

// requestCheck lets RunSpace check the reserve soon.
func (r *diskReserve) requestCheck() {
	select {
	case r.requests <- struct{}{}:
	default:
	}
}

// note records the outcome of filling the reserve. Only a full device makes a shortage. After other errors files and pages
// are made when they are needed, and the error is returned then.
func (r *diskReserve) note(err error) {
	if !errors.Is(err, vfs.ErrNoSpace) || !r.enabled {
		r.shortage.Store(nil)
		return
	}
	s := &ShortageError{Since: time.Now(), cause: err}
	if old := r.shortage.Load(); old != nil {
		s.Since = old.Since
	}
	r.shortage.Store(s)
}

// ShortageError says that the disk has no space for ordinary writes. Reads, deletions and checkpoints go on.
type ShortageError struct {
	Since time.Time
	cause error
}

// Error implements error.
func (s *ShortageError) Error() string {
	return fmt.Sprintf("writes are refused since %s because the disk is full; reads and deletions are served (%v)",
		s.Since.UTC().Format(time.RFC3339), s.cause)
}

// Unwrap makes the error match vfs.ErrNoSpace.
func (s *ShortageError) Unwrap() error { return s.cause }

// Shortage is nil, or why only deletions are accepted.
func (e *Engine) Shortage() *ShortageError { return e.reserve.shortage.Load() }

// CheckSpace fills the reserve, and decides whether there is a shortage. It writes to the disk.
func (e *Engine) CheckSpace() {
	if !e.reserve.enabled {
		return
	}
	e.reserve.mu.Lock()
	defer e.reserve.mu.Unlock()
	judged := *e.reserve.checked.Swap(newSpaceCheck()) // a wait that begins from now on needs a check that begins later
	_, taken := e.log.Reserve()
	e.reserve.note(e.fillReserve())
	e.reserve.judged.Store(int64(taken))
	close(judged)
}

// fillReserve fills all parts of the reserve. If the disk is full, the log gives up its old files, and then the holders of the log
// that yield give up their segments, the largest first. One of these is given up if a record has found no room.
func (e *Engine) fillReserve() error {
	large := e.reserve.large.Swap(0)
	for {
		ofLog := e.log.FillReserve()
		ofLarge, ofPages := e.fillPages(large)
		noRoom := errors.Is(ofLarge, vfs.ErrNoSpace)
		if large > 0 {
			e.reserve.noRoom.Store(noRoom)
			e.reserve.failed.Store(ofLarge != nil && !noRoom)
		}
		err := errors.Join(ofLog, ofPages, e.checkpoints.quarantine.files.Reserve(), e.fullAtMerge())
		if wanted := e.reserve.wanted.Swap(false); !wanted && !noRoom && !errors.Is(err, vfs.ErrNoSpace) {
			return err
		}
		more, failed := e.log.ReleaseOldFiles()
		if !more && failed == nil && e.mayTruncate() {
			_, more, failed = e.log.DropLargestHolder()
		}
		if more {
			e.reserve.given.Add(1)
		}
		if !more || failed != nil {
			return errors.Join(err, failed)
		}
	}
}

func newSpaceCheck() *chan struct{} {
	judged := make(chan struct{})
	return &judged
}

// AwaitReserve waits until it is known whether there is a shortage, if the memtables need more pages than are free for them, or the
// log has taken a file of the reserve: writers must not be faster than RunSpace, which may be slow on a slow device, and which may
// find space in what is kept of the log. The caller reads Shortage afterwards. It waits up to Options.StallMax
// (ErrReserveUnchecked): the caller holds latches, and the device may not answer for long. A large record is refused by itself if there
// is no room for its pages (ShortageError): no checkpoint could merge it.
func (e *Engine) AwaitReserve(ctx context.Context, w *Writer, body *batch.Body) error {
	large := int64(0)
	if e.oversized(body.Size()) {
		large, w.covered = int64(body.Size()), e.reserve.enabled
	}
	_, taken := e.log.Reserve()
	unjudged := int64(taken) > e.reserve.judged.Load()
	if outgrown := e.reserve.enabled && e.Shortage() == nil && (unjudged || !e.covers(e.unmerged()+large)); !outgrown {
		return nil
	}
	for {
		before := e.reserve.large.Load()
		if large <= before || e.reserve.large.CompareAndSwap(before, large) {
			break
		}
	}
	judged := *e.reserve.checked.Load()
	e.reserve.requestCheck()
	deadline := time.NewTimer(e.options.StallMax)
	defer deadline.Stop()
	select {
	case <-judged:
		w.covered = large > 0 && !e.reserve.failed.Load()
	case <-e.reserve.ended:
		w.covered = false
	case <-deadline.C:
		return ErrReserveUnchecked
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if large > 0 && e.reserve.noRoom.Load() && e.Shortage() == nil && !e.covers(e.unmerged()+large) {
		return &ShortageError{Since: time.Now(), cause: fmt.Errorf("%w for the pages of a record of %d bytes", vfs.ErrNoSpace, large)}
	}
	return nil
}

// covers reports whether the free pages suffice for the memtables and three quarters of the reserve.
func (e *Engine) covers(unmerged int64) bool {
	free, want := e.pager.FreeBytes()
	return free >= want-want/4+unmerged && !e.pager.Hollow()
}

// fillPages fills the part of the data file: the reserve, and the pages that the memtables will need. A quarter of the
// reserve may be missing before that counts; otherwise a shortage would begin and end with every checkpoint. Why pages of a large record
// are missing concerns that record only.
func (e *Engine) fillPages(large int64) (ofLarge, err error) {
	unmerged := e.unmerged()
	err = e.pager.FillReserve(unmerged)
	ofLarge = err
	if large > 0 && err == nil { // by itself: a file that cannot become as large does not grow at all
		ofLarge = e.pager.FillReserve(unmerged + large)
	}
	if large == 0 || e.covers(unmerged+large) {
		ofLarge = nil
	}
	if e.Shortage() != nil || !e.covers(unmerged) {
		return ofLarge, err
	}
	return ofLarge, nil
}

// fullAtMerge is the full disk that stopped the last checkpoint, or nil: some file systems need space to write where there was something before.
func (e *Engine) fullAtMerge() error {
	if blocked := e.checkpoints.blocked.Load(); blocked != nil && errors.Is(*blocked, vfs.ErrNoSpace) {
		return *blocked
	}
	return nil
}

// unmerged is the memory of the generations that no checkpoint has merged: about as much as their versions will need in
// pages, or more.
func (e *Engine) unmerged() int64 {
	v := e.view.Load()
	return int64(v.active.mem.Resident()) + residentBytes(v.immutables)
}

// shrinkFile leaves the free pages that the memtables need: writers were accepted because they are there.
func (e *Engine) shrinkFile() error {
	return e.pager.Shrink(func() int64 {
		if !e.reserve.enabled {
			return 0
		}
		return e.unmerged()
	})
}

// reserveFor requests a check of the reserve when it does not cover the memtables any more.
func (e *Engine) reserveFor(unmerged int64) {
	if !e.reserve.enabled {
		return
	}
	if free, want := e.pager.FreeBytes(); free < want+unmerged {
		e.reserve.requestCheck()
	}
}

// RunSpace keeps the reserve, and during a shortage tries to fill it again, until ctx ends. It runs once.
func (e *Engine) RunSpace(ctx context.Context) {
	defer close(e.reserve.ended)
	retry := time.NewTicker(spaceRetry)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.reserve.requests:
			e.CheckSpace()
		case <-retry.C:
			if e.Shortage() != nil {
				e.releasePages()
				e.CheckSpace()
				e.signalRoom() // for writers that wait for a segment
			}
		}
	}
}

// releasePages frees pages that the last checkpoints replaced and no reader reaches any more, and gives back log segments that the log was still
// writing, or had not left, when the last checkpoint ended. A running checkpoint does it itself.
func (e *Engine) releasePages() {
	if e.mayTruncate() {
		_ = cmp.Or(e.log.LeaveDurable(), e.log.Truncate()) // a failure stops the log, which keeps the error
	}
	e.Reclaim()
	if e.checkpoints.mu.TryLock() {
		_ = e.shrinkFile() // a failure stops the pager, which keeps the error
		e.checkpoints.mu.Unlock()
	}
}

// spaceRetry is how often a store that refuses writes checks whether the disk has space again.
const spaceRetry = 500 * time.Millisecond

// newSegment returns a segment of the log, and lets the reserve be checked if the segment came from there: whether that is a shortage depends on
// what else the log can give up. It waits at Open only; see advanceGeneration.
func (e *Engine) newSegment(first keys.Epoch, bodyBytes int) (*wal.Segment, error) {
	if err := e.certify(); err != nil {
		return nil, err
	}
	segment, err := e.log.NewSegment(context.Background(), first, bodyBytes)
	if _, taken := e.log.Reserve(); taken > e.reserve.taken {
		e.reserve.taken = taken
		e.reserve.requestCheck()
		e.checkpoints.request() // immutable memtables should be merged while the reserve is there
	}
	return segment, err
}

// beginLog makes the newest superblock certain before the log goes on, see certify. A full disk does not matter if the log has all
// that its next segment needs.
func (e *Engine) beginLog(found *wal.Recovery) error {
	state := e.pager.State()
	err := e.pager.MakeCertain()
	if errors.Is(err, vfs.ErrNoSpace) {
		e.reserve.uncertain = !found.Continues(lineageOf(&state))
		return nil
	}
	return err
}

// certify makes the newest superblock durable for certain, unless that has happened, before the log gets a segment that needs it.
// After a failed sync and a restart of the process, the superblock may be in the kernel's memory only. A crash would then lose a
// bulk load, which is not in the log, or the lineage, and the log that went on after it would not fit the data file. It is called at
// Open, or with mu.
func (e *Engine) certify() error {
	if !e.reserve.uncertain {
		return nil
	}
	err := e.pager.MakeCertain()
	if errors.Is(err, pager.ErrBusy) { // the checkpoint does it
		return fmt.Errorf("%w: the newest superblock is being written", ErrNoSegment)
	}
	e.reserve.uncertain = err != nil
	return err
}

// AwaitsSegment reports whether the log has no segment for the next record. After Open that means that the disk is full.
func (e *Engine) AwaitsSegment() bool { return e.view.Load().active.sealed() }

// CheckpointBlocked reports whether the last checkpoint failed because the disk is full or a page is damaged.
func (e *Engine) CheckpointBlocked() bool { return e.checkpoints.blocked.Load() != nil }

// rotatable reports whether a rotation leaves the log a part of its reserve, so that deletions can still be accepted if nothing can be merged.
func (e *Engine) rotatable() bool {
	kept, _ := e.log.Reserve()
	return !e.CheckpointBlocked() || kept >= reserveSegments
}

// openReserve fills the reserve for the first time, when the log is open.
func (e *Engine) openReserve() {
	if !e.reserve.enabled {
		return
	}
	e.pager.SetReserve(e.options.pagesReserve())
	e.CheckSpace()
}

// firstGeneration is the active generation of a store that was just opened. If the disk is too full for a segment, the
// generation is sealed and has none: the first write that is accepted tries again. Segments whose commits are all in the
// tree are removed first. They may be left from short runs, and no checkpoint would recycle them if there is nothing to
// merge. Segments without a commit, which runs that were killed have left, are removed, too, before the last file of the reserve becomes one. The tree has the
// records of what those runs lost (complete).
func (e *Engine) firstGeneration(found *wal.Recovery, merged bool) (*generation, error) {
	first := found.Next()
	if merged && e.reserveTaken() {
		if err := e.releaseEmptySegments(found); err != nil {
			return nil, err
		}
	}
	g, err := e.newGenerationLocked(first, 0, nil)
	if errors.Is(err, vfs.ErrNoSpace) {
		g, err = e.truncatedFirstGeneration(first, err)
	}
	if !errors.Is(err, vfs.ErrNoSpace) {
		return g, err
	}
	e.reserve.note(err)
	mem, err := e.newTable()
	if err != nil {
		return nil, err
	}
	g = &generation{segment: e.log.Unopened(first), mem: mem, first: first}
	g.end.Store(uint64(first))
	return g, nil
}

// reserveTaken reports whether the log's part of the reserve is not complete.
func (e *Engine) reserveTaken() bool {
	kept, _ := e.log.Reserve()
	return kept < e.options.logReserve()
}

// releaseEmptySegments says in the data file that the tree has all epochs of the log, which has no commit after those in the tree. Then the log needs only
// its newest segment. A superblock that a crash may lose needs the others.
func (e *Engine) releaseEmptySegments(found *wal.Recovery) error {
	state := e.pager.State()
	if found.Last < state.Epoch || !e.pager.Certain() {
		return nil
	}
	if found.Last > state.Epoch { // the log has nothing to merge, not even a record of what was lost
		state.Epoch = found.Last
		setNewestEpoch(&state, 0)
		setEpochHistory(&state, found.Term(), commitTime(&state))
		setLogSegment(&state, e.log.NewestDurableHeader())
		if err := e.commitState(state); errors.Is(err, vfs.ErrNoSpace) {
			return nil
		} else if err != nil {
			return err
		}
	}
	return e.log.TruncateBefore(state.Epoch + 1)
}

// truncatedFirstGeneration removes segments for the first generation, if the superblock is certain to be durable that no
// longer needs them. Otherwise it returns full, the error of the full disk.
func (e *Engine) truncatedFirstGeneration(first keys.Epoch, full error) (*generation, error) {
	if err := e.pager.MakeCertain(); errors.Is(err, vfs.ErrNoSpace) {
		return nil, full
	} else if err != nil {
		return nil, err
	}
	if err := e.log.TruncateBefore(e.pager.State().Epoch + 1); err != nil {
		return nil, err
	}
	return e.newGenerationLocked(first, 0, nil)
}

// reservedPages is how many bytes of free pages the data file should have.
func (e *Engine) reservedPages() int64 {
	_, want := e.pager.FreeBytes()
	return want
}

// segmentToCome returns a channel to wait for, if a segment could not be made because the disk is full, and a checkpoint
// will recycle one, or has done so since, or the log may give up one that it keeps. Otherwise it returns nil. A large record needs a file of its own:
// that the disk does not have so much is no shortage for others, and only what the log gives up can help. given is how often it had when the record was
// refused before.
func (e *Engine) segmentToCome(err error, large bool, given *uint64) (room <-chan struct{}) {
	if !errors.Is(err, vfs.ErrNoSpace) || !e.reserve.enabled {
		return nil
	}
	if !large {
		e.reserve.note(err)
		if room := e.recycledSegment(); room != nil {
			return room
		}
	}
	before := *given
	if *given = e.reserve.given.Load(); *given == before {
		return nil
	}
	judged := *e.reserve.checked.Load()
	if large {
		e.reserve.wanted.Store(true)
	}
	e.reserve.requestCheck()
	return judged
}

// recycledSegment returns a channel to wait for, if the reserve of the log has a file, or a checkpoint will recycle one.
func (e *Engine) recycledSegment() (room <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if kept, _ := e.log.Reserve(); kept > 0 {
		return noWait
	}
	recycles := len(e.view.Load().immutables) > 0 || e.checkpoints.merging.Load() // a merge publishes its tree before it recycles segments
	if !recycles || e.CheckpointBlocked() {
		return nil
	}
	e.yieldToCommits() // a bulk load prevents checkpoints
	e.checkpoints.request()
	return e.memory.room
}

// noWait is a channel that is closed.
var noWait = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// reserved is how many bytes the reserve has.
func (e *Engine) reserved() int64 {
	if !e.reserve.enabled {
		return 0
	}
	kept, _ := e.log.Reserve()
	free, want := e.pager.FreeBytes()
	return int64(kept)*e.options.SegmentBytes + max(0, min(free, want))
}
