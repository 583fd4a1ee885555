package pager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Checkpoint is the one state under construction. It ends with Commit or Abort. Several goroutines may
// call its methods, but then the order of their calls decides which pages they get. A caller that needs
// the same bytes every time takes pages in a fixed order.
type Checkpoint struct {
	p             *Pager
	number        uint64
	reusedThrough uint64

	unwritten atomic.Int64 // pages composed in a Writer and not yet written

	mu      sync.Mutex // guards the pager's space while the checkpoint is open, and the fields below
	taken   []Extent
	written []page.ID // that the space does not know yet; later they are in madeLive
	freed   []page.ID // that the space does not know yet; later they are in freedLive
	blobs   BlobState
	limit   page.ID // map pages at or past it move
	ended   bool

	// What the checkpoint has changed in the space so far, so that Abort can undo it.
	madeLive  []page.ID
	freedLive []page.ID
	own       bitset.Set // the pages of madeLive

	onCommit []func()
	onAbort  []func()
}

// Begin starts the next checkpoint. Pages whose reuse was allowed since the last one become free now.
func (p *Pager) Begin() (*Checkpoint, error) {
	if err := errors.Join(p.Err(), p.MapDamage()); err != nil {
		return nil, err
	}
	if !p.open.CompareAndSwap(false, true) {
		return nil, ErrBusy
	}
	if err := p.rewriteSuperblock(); err != nil {
		p.open.Store(false)
		return nil, err
	}
	ck := &Checkpoint{p: p, reusedThrough: p.applyReuse(), number: p.current().checkpoint + 1, blobs: p.current().blobs}
	if err := p.space.broken; err != nil {
		p.open.Store(false)
		return nil, p.fail(brokenf("%w", err))
	}
	p.building.Store(ck.number)
	return ck, nil
}

// Number is the checkpoint's number, which every page that it writes carries.
func (ck *Checkpoint) Number() uint64 { return ck.number }

// ReusedThrough is the checkpoint of which this one may reuse all freed pages, and those of all earlier
// ones.
func (ck *Checkpoint) ReusedThrough() uint64 { return ck.reusedThrough }

// AllocExtent takes the lowest free run of at most n pages, or n pages at the end of the file. Pages that
// are not written are free again when the checkpoint ends.
func (ck *Checkpoint) AllocExtent(n int) Extent {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	e := ck.p.space.takeUpTo(n)
	ck.taken = append(ck.taken, e)
	return e
}

// AllocPieces takes n pages as one run if there is one, else as at most nine runs.
func (ck *Checkpoint) AllocPieces(n int) []Extent {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	pieces := ck.p.space.takePieces(n)
	ck.taken = append(ck.taken, pieces...)
	return pieces
}

// Free records that the state under construction does not reach these pages any more. They were live in
// the previous state, or this checkpoint wrote them.
func (ck *Checkpoint) Free(ids ...page.ID) {
	ck.mu.Lock()
	ck.freed = append(ck.freed, ids...)
	ck.mu.Unlock()
}

// SetBlobs sets the blob store's part of the state.
func (ck *Checkpoint) SetBlobs(blobs BlobState) { ck.blobs = blobs }

// OnEnd registers two functions. Commit calls the first after the new state is durable, and before it
// returns. Abort calls the second.
func (ck *Checkpoint) OnEnd(commit, abort func()) {
	ck.onCommit = append(ck.onCommit, commit)
	ck.onAbort = append(ck.onAbort, abort)
}

// IsTaken reports whether this checkpoint has taken page id. Such a page is no part of earlier states.
func (ck *Checkpoint) IsTaken(id page.ID) bool {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	return ck.p.space.taken.Has(int(id)) || ck.own.Has(int(id))
}

// IsLive reports whether the state under construction may reach page id. Pages that were freed since the last call of Prepare count as live.
func (ck *Checkpoint) IsLive(id page.ID) bool {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	i := int(id)
	return i >= 0 && ck.p.space.live.Has(i)
}

// noteWritten records that page id is written. Only pages that this checkpoint has taken may be written.
func (ck *Checkpoint) noteWritten(id page.ID) error {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	if !ck.p.space.taken.Has(int(id)) {
		return fmt.Errorf("pager: checkpoint %d writes page %d, which it has not taken", ck.number, id)
	}
	ck.written = append(ck.written, id)
	return nil
}

// Prepare lets the space know the pages that were written and freed so far, so that Commit has work for
// the later ones only. It writes nothing, and Abort undoes it. After an error the checkpoint must be
// aborted.
func (ck *Checkpoint) Prepare() error {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	err := ck.applyToSpace()
	ck.taken = slices.DeleteFunc(ck.taken, func(e Extent) bool {
		return ck.p.space.taken.Next(int(e.First)) >= int(e.First)+e.Count
	})
	return err
}

// Prepared reports whether nothing was written or freed since the last call of Prepare.
func (ck *Checkpoint) Prepared() bool {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	return len(ck.written) == 0 && len(ck.freed) == 0
}

// Sync makes the pages written so far durable, so that Commit has less to wait for.
func (ck *Checkpoint) Sync(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return ck.p.syncPages()
}

// Commit makes the state durable, in crash order. On a full device and on a cancelled context it aborts
// the checkpoint, and the old state remains. After any other error the pager takes no more checkpoints.
func (ck *Checkpoint) Commit(ctx context.Context, state State) error {
	if ck.ended {
		return ErrEnded
	}
	next, allocation, err := ck.build(ctx, state)
	if err != nil {
		ck.Abort()
		return fmt.Errorf("checkpoint %d: %w", ck.number, ck.p.failed(err))
	}
	if err := ck.commitSuperblock(next); err != nil {
		ck.Abort()
		return fmt.Errorf("checkpoint %d: %w", ck.number, ck.p.fail(err))
	}
	ck.publish(next, allocation)
	return nil
}

// build writes and syncs all pages that the new superblock names.
func (ck *Checkpoint) build(ctx context.Context, state State) (*superblock, *PageArray, error) {
	if err := ck.p.Err(); err != nil {
		return nil, nil, err
	}
	if n := ck.unwritten.Load(); n != 0 {
		return nil, nil, brokenf("%d pages composed and not written", n)
	}
	if err := ck.applyToSpace(); err != nil {
		return nil, nil, err
	}
	ck.giveBack()
	own, following, err := ck.allocateCopies()
	if err != nil {
		return nil, nil, err
	}
	update, err := ck.allocateMap()
	if err != nil {
		return nil, nil, err
	}
	if root := state.Root; root != 0 && !ck.p.space.live.Has(int(root)) {
		return nil, nil, brokenf("root %d is not live", root)
	}
	if err := ck.writeMap(update); err != nil {
		return nil, nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	if err := ck.p.syncPages(); err != nil {
		return nil, nil, err
	}
	old := ck.p.current()
	state.Format = max(state.Format, old.state.Format, FormatOldest)
	next := &superblock{
		checkpoint: ck.number, pageSize: old.pageSize, storeID: cmp.Or(ck.p.newStoreID, old.storeID),
		pageCount: ck.p.pageCountFor(&ck.p.space.live, update.next.leaves()), allocation: update.next.Root(),
		state: state, blobs: ck.blobs, copy: own, nextCopy: following,
	}
	return next, &update.next, nil
}

// allocateCopies returns the locations of two copies. The copy of the new superblock goes to the
// location that the previous superblock names. The copy of the following superblock goes to the location
// of the previous copy, or to a lower one, so that copies do not keep the file long.
func (ck *Checkpoint) allocateCopies() (own, following page.ID, err error) {
	old, space, home := ck.p.current(), ck.p.space, copyHome(ck.p.pageSize)
	take := func() page.ID {
		id := space.takeFrom(home)
		err = errors.Join(err, ck.makeLive(id))
		return id
	}
	if own, following = old.nextCopy, old.copy; own == 0 {
		own = take()
	}
	if following == 0 || following > space.freeFrom(home) {
		if following = take(); old.copy != 0 {
			err = errors.Join(err, ck.freeLive(old.copy))
		}
	}
	if err != nil {
		return 0, 0, err
	}
	return own, following, ck.p.growTo(ck.p.offset(max(own, following) + 1))
}

// applyToSpace makes written pages live, and ends the life of freed pages.
func (ck *Checkpoint) applyToSpace() error {
	for _, id := range ck.written {
		if err := ck.makeLive(id); err != nil {
			return err
		}
	}
	for _, id := range ck.freed {
		if err := ck.freeLive(id); err != nil {
			return err
		}
	}
	ck.written, ck.freed = nil, nil
	return nil
}

// giveBack frees the pages that were taken and not written.
func (ck *Checkpoint) giveBack() {
	for _, e := range ck.taken {
		ck.p.space.giveBack(e)
	}
	ck.taken = nil
}

func (ck *Checkpoint) makeLive(id page.ID) error {
	if err := ck.p.space.makeLive(id); err != nil {
		return brokenf("%w", err)
	}
	ck.madeLive = append(ck.madeLive, id)
	ck.own.Add(int(id))
	ck.p.changes.noteLive(id)
	return nil
}

func (ck *Checkpoint) freeLive(id page.ID) error {
	if err := ck.p.space.freeLive(id); err != nil {
		return brokenf("%w", err)
	}
	ck.freedLive = append(ck.freedLive, id)
	return nil
}

// mapNodes allocates the nodes of the allocation map itself.
type mapNodes struct{ ck *Checkpoint }

func (m mapNodes) takeNode() (page.ID, error) {
	e := m.ck.p.space.takeUpTo(1)
	return e.First, m.ck.makeLive(e.First)
}

func (m mapNodes) freeNode(id page.ID) error { return m.ck.freeLive(id) }

// allocateMap allocates the changed pages of the map. Each allocation changes the map, which may change
// further pages of it. The loop ends because a page moves at most once.
func (ck *Checkpoint) allocateMap() (*arrayUpdate, error) {
	p, nodes := ck.p, mapNodes{ck}
	leaves := p.mapLeaves(p.space.liveEnd())
	update, err := p.allocation.update(nodes, leaves, ck.dirtyLeaves(), ck.limit)
	if err != nil {
		return nil, err
	}
	for {
		before := len(ck.madeLive)
		if err := update.allocate(nodes); err != nil {
			return nil, err
		}
		if need := p.mapLeaves(p.space.liveEnd()); need > leaves {
			leaves = need
			if err := update.resize(nodes, leaves); err != nil {
				return nil, err
			}
		}
		more := false // a map that lost leaves has freed their pages, even if it has allocated none
		dirty := ck.dirtyLeaves()
		for i := dirty.Next(0); i < leaves; i = dirty.Next(i + 1) {
			more = update.dirty[0].Add(i) || more
		}
		if !more && len(ck.madeLive) == before {
			return update, nil
		}
	}
}

// dirtyLeaves is the leaves of the map whose bits have changed since they were written.
func (ck *Checkpoint) dirtyLeaves() *bitset.Set {
	var leaves bitset.Set
	words := &ck.p.space.dirtyWords
	perLeaf := ArrayLeafBytes(ck.p.pageSize) / 8
	for w := words.Next(0); w < words.Len(); w = words.Next((w/perLeaf + 1) * perLeaf) {
		leaves.Add(w / perLeaf)
	}
	return &leaves
}

func (ck *Checkpoint) writeMap(update *arrayUpdate) error {
	w := ck.Writer()
	if err := update.write(w, func(i int, payload []byte) { encodeMapLeaf(&ck.p.space.live, i, payload) }); err != nil {
		return err
	}
	return w.Flush()
}

// commitSuperblock makes the superblock durable, in its slot and in its copy, with one sync: each of the
// two is a whole state, whichever a crash leaves. The old state is valid until commitSuperblock returns
// nil. If it fails, it is unknown which state is on the device.
func (ck *Checkpoint) commitSuperblock(next *superblock) error {
	pages := []page.ID{next.slot(), next.copy}
	if next.nextCopy != ck.p.current().copy { // the page now holds an intact superblock, whatever it held before
		pages = append(pages, next.nextCopy)
	}
	if err := ck.checkSuperblock(next, pages); err != nil {
		return err
	}
	if err := ck.p.writeSuperblock(next, pages...); err != nil {
		return err
	}
	return ck.p.sync(ck.p.file.SyncData, ck.p.fail)
}

// writeSuperblock writes sb to these pages, and does not sync.
func (p *Pager) writeSuperblock(sb *superblock, pages ...page.ID) error {
	buf, writes := vfs.AlignedBuffer(len(pages)*p.pageSize), make([]vfs.Request, len(pages))
	for i, at := range pages {
		writes[i] = vfs.Request{Buf: buf[i*p.pageSize : (i+1)*p.pageSize], Offset: p.offset(at)}
		sb.encode(writes[i].Buf, at)
	}
	return p.file.WriteBatch(writes)
}

// locations are the slot and the copy, if there is one.
func (s *superblock) locations() []page.ID {
	if s.copy == 0 {
		return []page.ID{s.slot()}
	}
	return []page.ID{s.slot(), s.copy}
}

// publish makes the new state the newest one of the pager.
func (ck *Checkpoint) publish(next *superblock, allocation *PageArray) {
	p := ck.p
	p.newest.Store(next)
	p.allocation = allocation
	p.space.dirtyWords = bitset.Set{}
	p.space.addPending(ck.number, ck.freedLive)
	for _, f := range ck.onCommit {
		f()
	}
	ck.end()
}

// Abort ends the checkpoint and restores the space. After Commit it does nothing.
func (ck *Checkpoint) Abort() {
	if ck.ended {
		return
	}
	space := ck.p.space
	for _, id := range ck.freedLive {
		space.unfree(id)
	}
	for _, id := range ck.madeLive {
		space.freePage(id)
	}
	ck.giveBack()
	for _, ids := range [][]page.ID{ck.written, ck.madeLive} {
		for _, id := range slices.Backward(ids) {
			ck.p.onAbort(id)
		}
	}
	for _, f := range ck.onAbort {
		f()
	}
	ck.end()
}

func (ck *Checkpoint) end() {
	ck.ended = true
	if invariants.Enabled {
		ck.p.space.sortPending() // finds what else the next checkpoint would find
	}
	if err := ck.p.space.broken; err != nil {
		_ = ck.p.fail(brokenf("%w", err)) // Begin returns it
	} else if ck.p.Err() == nil {
		ck.p.checkSpace()
	}
	ck.p.publishStats()
	ck.p.open.Store(false)
}

// Errors of checkpoints.
var (
	// ErrFailed means that an earlier write or sync failed. What is on the device is unknown, and the pager
	// takes no checkpoints.
	ErrFailed = errors.New("pager: stopped after a failed write")
	// ErrBusy means that a checkpoint is open already.
	ErrBusy = errors.New("pager: a checkpoint is open")
	// ErrEnded means that the checkpoint was already committed or aborted.
	ErrEnded = errors.New("pager: checkpoint has ended")
	// ErrBroken means that a caller or the pager itself broke an invariant. Nothing of the checkpoint was
	// made durable, and the pager takes no more checkpoints.
	ErrBroken = errors.New("pager: invariant broken")
)

func brokenf(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrBroken, fmt.Errorf(format, args...))
}
