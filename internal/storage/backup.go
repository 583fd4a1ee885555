package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/quarantine"
	"github.com/epochkv/epochkv/internal/vfs"
)

// A copy of a durable state is everything that a restart needs without a log:
//
//	pages        the live pages: tree, repair tree and its mirror, large values, indirection table, allocation map. User
//	             data and the store's own records are in the same tree
//	superblock   roots, counters, epoch, lineage, feature level
//	quarantine   the file that the superblock names, if it names one

// Errors of copies.
var (
	// ErrPinEnded means that the owner of a pin has not renewed it in time: pages of the state may be reused.
	ErrPinEnded = errors.New("storage: the pin of the state has ended, because it was not renewed in time")
	// ErrUnfinishedMerge means that the newest state has a part of the commits after its epoch, because the disk is too full
	// to merge them at once: it is no state without the log.
	ErrUnfinishedMerge = errors.New("storage: a checkpoint in steps is not finished, because the disk is full")
)

// CopyState is the newest durable state of an open engine, pinned until Release, or until its owner has not renewed the pin
// for a lifetime. It is for one goroutine, except for Renew.
type CopyState struct {
	*PinnedState
	Quarantine *QuarantineFile // nil if the state has none

	lifetime time.Duration
	now      func() time.Time

	mu       sync.Mutex
	deadline time.Time
	ended    bool
	timer    *time.Timer
}

// QuarantineFile is the file for what the tree refuses.
type QuarantineFile struct {
	Number  int // of the two files
	Content []byte
}

// PinCopy pins the newest durable state for a copy. The pin ends a lifetime after the last call of Renew. It waits for the
// checkpoint that is under way, or for the context's end.
func (e *Engine) PinCopy(ctx context.Context, lifetime time.Duration) (*CopyState, error) {
	return e.pinCopy(ctx, lifetime, time.Now)
}

func (e *Engine) pinCopy(ctx context.Context, lifetime time.Duration, now func() time.Time) (*CopyState, error) {
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return nil, err
	}
	pages, err := e.pager.CopySnapshot()
	if err != nil {
		e.checkpoints.mu.Unlock()
		return nil, err
	}
	pinned := e.pinLocked(pages, nil)
	file, err := pinned.readQuarantineFile() // a later checkpoint writes another one
	e.checkpoints.mu.Unlock()
	if err == nil {
		err = pinned.checkCopied()
	}
	if err == nil {
		err = pinned.Pages.ReadMap()
	}
	if err != nil {
		pinned.Release()
		return nil, TranslateError(err)
	}
	s := &CopyState{PinnedState: pinned, Quarantine: file, lifetime: lifetime, now: now, deadline: now().Add(lifetime)}
	s.mu.Lock() // expire may run at once
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(lifetime, s.expire)
	return s, nil
}

// checkCopied refuses a state that is none without its log.
func (s *DurableState) checkCopied() error {
	state := s.Pages.State()
	if newest := newestEpoch(&state); newest != state.Epoch {
		return fmt.Errorf("%w: the state of epoch %d has versions up to epoch %d", ErrUnfinishedMerge, state.Epoch, newest)
	}
	return nil
}

func (s *DurableState) readQuarantineFile() (*QuarantineFile, error) {
	state := s.Pages.State()
	number := quarantineFile(&state)
	if number == 0 {
		return nil, nil //nolint:nilnil // most states have none
	}
	name := quarantinePaths(s.Files.Dir)[number-1]
	content, err := quarantine.ReadRaw(s.Files.FS, name)
	if err != nil {
		return nil, quarantineError(name, err)
	}
	return &QuarantineFile{number, content}, nil
}

// Renew keeps the pin for another lifetime. An error says that it has ended: what was read since the last call may be of
// another state.
func (s *CopyState) Renew() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return ErrPinEnded
	}
	s.deadline = s.now().Add(s.lifetime)
	return nil
}

// Release ends the pin. It may be called after the pin has ended.
func (s *CopyState) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timer.Stop()
	s.endLocked()
}

func (s *CopyState) endLocked() {
	if !s.ended {
		s.ended = true
		s.PinnedState.Release()
	}
}

// expire ends the pin if its deadline has passed.
func (s *CopyState) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if left := s.deadline.Sub(s.now()); left > 0 {
		s.timer.Reset(left)
		return
	}
	s.endLocked()
}

// CopyInfo describes a state by its superblock alone.
type CopyInfo struct {
	StoreID      [16]byte
	History      History
	Epoch        keys.Epoch
	FeatureLevel keys.FeatureLevel
	Checkpoint   uint64
	PageSize     int
	PageCount    page.ID
}

// Info describes the state.
func (s *CopyState) Info() (CopyInfo, error) { return DescribeCopy(s.Pages.Superblock()) }

// DescribeCopy decodes a superblock of a copy.
func DescribeCopy(superblock []byte) (CopyInfo, error) {
	image, err := decodeImage(superblock)
	if err != nil {
		return CopyInfo{}, err
	}
	state := image.State()
	return CopyInfo{
		StoreID: image.StoreID(), History: historyOf(&state), Epoch: state.Epoch, FeatureLevel: featureLevel(&state),
		Checkpoint: image.Checkpoint(), PageSize: image.PageSize(), PageCount: image.PageCount(),
	}, nil
}

func decodeImage(superblock []byte) (*pager.Image, error) {
	image, err := pager.DecodeImage(superblock)
	if err != nil {
		return nil, TranslateError(err)
	}
	state := image.State()
	if err := checkFeatureLevel(&state); err != nil {
		return nil, TranslateError(err)
	}
	if _, _, err := decodeRepairTreeRoots(&state); err != nil {
		return nil, err
	}
	return image, nil
}

// restoreSyncBytes is how much a restoration writes before it is synced, beside what it writes next. With one sync at the end, the
// device would be idle until then.
const restoreSyncBytes = 16 << 20

// Restoration writes the files of a copied state into a directory without a store. The caller writes pages, and then calls
// Finish.
type Restoration struct {
	files    Files
	image    *pager.Image
	data     vfs.File
	unsynced int        // bytes since the last sync began
	synced   chan error // has the outcome of the last sync; empty while one is running
}

// BeginRestore creates the data file of a state. A file that exists is an error (fs.ErrExist).
func BeginRestore(fsys vfs.FS, dir string, superblock []byte) (*Restoration, error) {
	image, err := decodeImage(superblock)
	if err != nil {
		return nil, err
	}
	names, err := fsys.List(dir)
	if err != nil {
		return nil, err
	}
	if holdsStore(names) {
		return nil, fmt.Errorf("%s holds a store: %w", dir, fs.ErrExist)
	}
	r := &Restoration{files: Files{fsys, dir}, image: image, synced: make(chan error, 1)}
	r.synced <- nil
	if r.data, err = fsys.Open(r.files.DataPath(), vfs.Create); err != nil {
		return nil, err
	}
	return r, nil
}

// WritePages writes neighbouring pages, the first of which has this id.
func (r *Restoration) WritePages(first page.ID, pages []byte) error {
	if _, err := r.data.WriteAt(pages, int64(first)*int64(r.image.PageSize())); err != nil {
		return err
	}
	if r.unsynced += len(pages); r.unsynced < restoreSyncBytes {
		return nil
	}
	select {
	case err := <-r.synced:
		if err != nil {
			r.synced <- err // no later sync tells of what this one has lost
			return err
		}
		r.unsynced = 0
		go func() { r.synced <- r.data.SyncData() }()
	default:
	}
	return nil
}

// wait waits for the sync that is running, and returns the error of the last one.
func (r *Restoration) wait() error {
	err := <-r.synced
	r.synced <- err
	return err
}

// Finish writes the superblocks and the quarantine file, makes everything durable, and closes the data file. The restored state
// knows of no log.
func (r *Restoration) Finish(file *QuarantineFile) error {
	state := r.image.State()
	err := r.wait()
	if err == nil {
		err = r.writeQuarantine(&state, file)
	}
	if err == nil {
		clear(state.Engine[areaSegment:areaNewest])
		err = r.data.Truncate(int64(r.image.PageCount()) * int64(r.image.PageSize()))
	}
	if err == nil {
		err = r.image.Restore(r.data, state)
	}
	if err == nil {
		err = r.data.Sync()
	}
	if err = errors.Join(err, r.data.Close()); err != nil {
		return err
	}
	return r.files.FS.SyncDir(r.files.Dir)
}

// Abort closes the data file of an unfinished restoration.
func (r *Restoration) Abort() error {
	_ = r.wait() // there is an error already
	return r.data.Close()
}

func (r *Restoration) writeQuarantine(state *pager.State, file *QuarantineFile) error {
	number := quarantineFile(state)
	if (file == nil) != (number == 0) || file != nil && file.Number != number {
		return fmt.Errorf("storage: the superblock names quarantine file %d, which is not the one of the copy", number)
	}
	if file == nil {
		return nil
	}
	f, err := r.files.FS.Open(quarantinePaths(r.files.Dir)[number-1], vfs.Create)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(file.Content, 0); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
