package storage

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/storage/quarantine"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
	"github.com/epochkv/epochkv/internal/wal"
)

// DurableState is one durable state of a store: the pages that a superblock refers to, and the
// other files that belong to it. Package inspect verifies, measures and salvages a store through it.
// It reads the files, without the page cache and the memtables of an engine, and writes nothing.
type DurableState struct {
	Files Files
	Pages *pager.Snapshot
}

// SkippedPage is what the repair tree records of a damaged page that checkpoints skip.
type SkippedPage = repairtree.Page

// RepairTree has the skipped pages of a state, and what was written to their keys.
type RepairTree = repairtree.Tree

// Tree is the root of the tree.
func (s *DurableState) Tree() btree.Root { return rootOf(s.Pages.State()) }

// RepairTreeRoots are the roots of the repair tree and of its mirror, as the superblock names them.
func (s *DurableState) RepairTreeRoots() (root, mirror btree.Root, err error) {
	return repairTreeRoots(&s.Pages.Reader)
}

// RepairTree reads the records of the repair tree, or of its mirror where the first is damaged.
func (s *DurableState) RepairTree(blobs *blob.Store) (*RepairTree, error) {
	return readRepairTree(&s.Pages.Reader, blobs)
}

// ReadPage reads and verifies a page.
func (s *DurableState) ReadPage(id page.ID, buf []byte) error {
	return pagesource.Read(&s.Pages.Reader, id, buf)
}

// Source reads and verifies tree pages. A page lives until the next call.
func (s *DurableState) Source() btree.Source { return pagesource.NewDirect(&s.Pages.Reader) }

// MapIsExact reports whether every live tree page of the allocation map is known to be reachable. Inner nodes are
// rebuilt only then.
func (s *DurableState) MapIsExact() bool {
	state := s.Pages.State()
	return mapIsExact(&state)
}

// SystemKeys is how many live keys are not the clients', if the state knows it.
func (s *DurableState) SystemKeys() (n uint64, known bool) {
	state := s.Pages.State()
	return systemKeys(&state)
}

// LogProof is what the state knows of the log.
func (s *DurableState) LogProof() wal.Proof {
	state := s.Pages.State()
	return logProof(&state)
}

// ReadQuarantine reads the quarantine of the state, see Files.ReadQuarantine.
func (s *DurableState) ReadQuarantine() (versions []quarantine.Version, fault, err error) {
	state := s.Pages.State()
	return s.Files.ReadQuarantine(&state)
}

// ExplainLog turns an error of the replay of the log after this state into the engine's: if the
// newest superblock may be lost, the superblock is damaged and not the log.
func (s *DurableState) ExplainLog(err error) error { return blameSuperblock(&s.Pages.Reader, err) }

// Close closes the file of a state that Files opened.
func (s *DurableState) Close() error { return s.Pages.Close() }

// PinnedState is the newest durable state of an open engine. Checkpoints and writers go on, but do
// not reuse its pages until Release.
type PinnedState struct {
	DurableState
	engine     *Engine
	repairTree *repairtree.Tree // the repair tree in use
	log        *wal.Holder      // of the log after the state; nil if it is not kept
}

// PinState pins the newest durable state. It waits for the checkpoint that is under way, or for the
// context's end.
func (e *Engine) PinState(ctx context.Context) (*PinnedState, error) { return e.pinState(ctx, nil) }

// logHolderLifetime is how long the log is kept for a reader that does not renew its holder.
const logHolderLifetime = time.Minute

// PinStateAndLog is PinState, and keeps the log after the state for an owner, until ReleaseLog. The
// owner calls RenewLog meanwhile, and stops when that returns an error: the log is not kept then.
func (e *Engine) PinStateAndLog(ctx context.Context, name, owner string) (*PinnedState, error) {
	return e.pinState(ctx, &wal.HolderOptions{Name: name, Owner: owner, Lifetime: logHolderLifetime, Yields: true})
}

func (e *Engine) pinState(ctx context.Context, log *wal.HolderOptions) (*PinnedState, error) {
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return nil, err
	}
	defer e.checkpoints.mu.Unlock()
	pages, err := e.pager.Snapshot()
	if err != nil {
		return nil, err
	}
	return e.pinLocked(pages, log), nil
}

// pinLocked pins the state that the pager has just returned. checkpoints.mu is held.
func (e *Engine) pinLocked(pages *pager.Snapshot, log *wal.HolderOptions) *PinnedState {
	e.checkpoints.pins.pin(e.pager, pages.Checkpoint())
	p := &PinnedState{DurableState: DurableState{Files{e.fs, e.options.Dir}, pages}, engine: e, repairTree: e.view.Load().repairTree}
	if log != nil {
		log.From = pages.State().Epoch + 1
		p.log = e.log.Hold(*log)
	}
	return p
}

// Durable is the newest epoch of the log on stable storage.
func (p *PinnedState) Durable() keys.Epoch { return p.engine.Durable() }

// ReadNewestQuarantine reads the quarantine of the engine's newest durable state, which may be
// newer than p: the file of an older state does not exist any more.
func (p *PinnedState) ReadNewestQuarantine(ctx context.Context) (versions []quarantine.Version, fault, err error) {
	e := p.engine
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return nil, nil, err
	}
	defer e.checkpoints.mu.Unlock()
	state := e.pager.State()
	return p.Files.ReadQuarantine(&state)
}

// RepairTreesInUse are the roots of the repair tree and of its mirror, without one that the engine
// has found to be damaged.
func (p *PinnedState) RepairTreesInUse() (root, mirror btree.Root) { return p.repairTree.Roots() }

// SkippingSource is Source, except that it refuses the pages that checkpoints skip, as damaged: the
// repair tree has newer versions of their keys.
func (p *PinnedState) SkippingSource() btree.Source {
	if p.repairTree == nil {
		return p.Source()
	}
	return p.repairTree.Skipping(p.Source(), &p.Pages.Reader)
}

// RenewLog keeps the log for longer. An error says that it is not kept any more.
func (p *PinnedState) RenewLog() error { return p.log.Renew() }

// ReleaseLog lets checkpoints remove log segments again.
func (p *PinnedState) ReleaseLog() {
	if p.log != nil {
		p.log.Release()
	}
}

// Release lets checkpoints reuse the pages of the state, and remove log segments. It is called
// once.
func (p *PinnedState) Release() {
	p.ReleaseLog()
	p.engine.checkpoints.pins.unpin(p.engine.pager, p.Pages.Checkpoint())
}
