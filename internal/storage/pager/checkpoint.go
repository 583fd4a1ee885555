package pager

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Checkpoint is the one state under construction. It ends with Commit or Abort. Its methods may be called by several
// goroutines, but where pages go then depends on who calls first: who wants the same bytes every time takes pages in an order of
// his own.
type Checkpoint struct {
	p             *Pager
	number        uint64
	reusedThrough uint64

	unwritten atomic.Int64 // pages composed in some Writer and not yet written

	mu      sync.Mutex // guards the pager's space while the checkpoint is open, and what follows
	taken   []Extent
	written []page.ID
	freed   []page.ID
	blobs   BlobState
	limit   page.ID // map pages at or past it move
	ended   bool

	// What the commit has done to the space so far, so that it can be undone.
	madeLive  []page.ID
	freedLive []page.ID

	onCommit []func()
	onAbort  []func()
}

// Begin starts the next checkpoint. Releases that came in since the last one take effect now.
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
	p.building.Store(ck.number)
	return ck, nil
}

// Number is the checkpoint's number, which every page that it writes carries.
func (ck *Checkpoint) Number() uint64 { return ck.number }

// ReusedThrough is the checkpoint whose freed pages were the last to return before this one began.
func (ck *Checkpoint) ReusedThrough() uint64 { return ck.reusedThrough }

// AllocExtent takes the lowest free run of at most n pages, of n at the end of the file. Pages that are not written return when
// the checkpoint ends.
func (ck *Checkpoint) AllocExtent(n int) Extent {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	e := ck.p.space.takeUpTo(n)
	ck.taken = append(ck.taken, e)
	return e
}

// AllocPieces takes n pages as one run where there is one, else as at most nine.
func (ck *Checkpoint) AllocPieces(n int) []Extent {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	pieces := ck.p.space.takePieces(n)
	ck.taken = append(ck.taken, pieces...)
	return pieces
}

// Free says that the state under construction does not reach these pages any more. They were live before, or written by
// this checkpoint.
func (ck *Checkpoint) Free(ids ...page.ID) {
	ck.mu.Lock()
	ck.freed = append(ck.freed, ids...)
	ck.mu.Unlock()
}

// SetBlobs hands over the row store's part of the state.
func (ck *Checkpoint) SetBlobs(rows BlobState) { ck.blobs = rows }

// OnEnd registers what must happen when the new state has become durable and before Commit returns, or when the checkpoint is
// given up.
func (ck *Checkpoint) OnEnd(commit, abort func()) {
	ck.onCommit = append(ck.onCommit, commit)
	ck.onAbort = append(ck.onAbort, abort)
}

// IsTaken reports whether the checkpoint has taken page id, which then is no part of the state before.
func (ck *Checkpoint) IsTaken(id page.ID) bool {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	return ck.p.space.taken.Has(int(id))
}

// noteWritten notes that page id is written, which only pages taken by this checkpoint may be.
func (ck *Checkpoint) noteWritten(id page.ID) error {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	if !ck.p.space.taken.Has(int(id)) {
		return fmt.Errorf("pager: checkpoint %d writes page %d without having taken it", ck.number, id)
	}
	ck.written = append(ck.written, id)
	return nil
}

// Sync makes durable what has been written so far, so that Commit has less to wait for.
func (ck *Checkpoint) Sync(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := ck.p.file.SyncData(); err != nil {
		return ck.p.fail(err)
	}
	return nil
}

// Commit makes the state durable, in crash order. On a full device and on a cancelled context the checkpoint is given up and the old
// state stands; after any other error the pager takes no more checkpoints.
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

// build writes and syncs all that the new superblock will point at.
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
	if err := ck.p.file.SyncData(); err != nil {
		return nil, nil, ck.p.fail(err)
	}
	old := ck.p.current()
	next := &superblock{
		version: formatVersion, checkpoint: ck.number, pageSize: old.pageSize, storeID: old.storeID,
		pageCount: ck.p.pageCountFor(update.next.leaves()), allocation: update.next.Root(),
		state: state, blobs: ck.blobs, copy: own, nextCopy: following,
	}
	return next, &update.next, nil
}

// allocateCopies says where the copy of the new superblock goes, which its predecessor has announced, and where its successor's will go: to the
// place of the predecessor's copy, or to a lower one, so that copies do not keep the file long.
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

// applyToSpace turns what was written live and what was freed dead, and gives back what was taken in vain.
func (ck *Checkpoint) applyToSpace() error {
	space := ck.p.space
	for _, id := range ck.written {
		if err := ck.makeLive(id); err != nil {
			return err
		}
	}
	for _, e := range ck.taken {
		space.giveBack(e)
	}
	ck.taken = nil
	for _, id := range ck.freed {
		if err := ck.freeLive(id); err != nil {
			return err
		}
	}
	return nil
}

func (ck *Checkpoint) makeLive(id page.ID) error {
	if err := ck.p.space.makeLive(id); err != nil {
		return brokenf("%w", err)
	}
	ck.madeLive = append(ck.madeLive, id)
	return nil
}

func (ck *Checkpoint) freeLive(id page.ID) error {
	if err := ck.p.space.freeLive(id); err != nil {
		return brokenf("%w", err)
	}
	ck.freedLive = append(ck.freedLive, id)
	return nil
}

// mapNodes gives the allocation map's own nodes their places.
type mapNodes struct{ ck *Checkpoint }

func (m mapNodes) takeNode() (page.ID, error) {
	e := m.ck.p.space.takeUpTo(1)
	return e.First, m.ck.makeLive(e.First)
}

func (m mapNodes) freeNode(id page.ID) error { return m.ck.freeLive(id) }

// allocateMap finds places for the map's changed pages. Each place changes the map, which may make further pages of it change; since
// a page moves at most once, that ends.
func (ck *Checkpoint) allocateMap() (*arrayUpdate, error) {
	p, places := ck.p, mapNodes{ck}
	leaves := p.mapLeaves(p.space.liveEnd())
	update, err := p.allocation.update(places, leaves, ck.dirtyLeaves(), ck.limit)
	if err != nil {
		return nil, err
	}
	for {
		before := len(ck.madeLive)
		if err := update.allocate(places); err != nil {
			return nil, err
		}
		if need := p.mapLeaves(p.space.liveEnd()); need > leaves {
			leaves = need
			if err := update.resize(places, leaves); err != nil {
				return nil, err
			}
		}
		more := false // a map that lost leaves has freed their pages, whether it has placed any or not
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
	if err := update.write(w, ck.p.encodeMapLeaf); err != nil {
		return err
	}
	return w.Flush()
}

// commitSuperblock makes the superblock durable, in its slot and in its copy, with one sync: whichever of them a crash leaves is a whole state. Until it
// returns nil the old state is the one that counts; if it fails, nobody knows which.
func (ck *Checkpoint) commitSuperblock(next *superblock) error {
	places := []page.ID{next.slot(), next.copy}
	if next.nextCopy != ck.p.current().copy { // from now on the place holds an intact superblock, whatever was there before
		places = append(places, next.nextCopy)
	}
	if err := ck.p.writeSuperblock(next, places...); err != nil {
		return err
	}
	return ck.p.file.SyncData()
}

// writeSuperblock writes sb to these places, and does not sync.
func (p *Pager) writeSuperblock(sb *superblock, places ...page.ID) error {
	buf, writes := vfs.AlignedBuffer(len(places)*p.pageSize), make([]vfs.Request, len(places))
	for i, at := range places {
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

// publish makes the new state the pager's own.
func (ck *Checkpoint) publish(next *superblock, allocation *PageArray) {
	p := ck.p
	p.base.Store(next)
	p.allocation = allocation
	p.space.dirtyWords = bitset.Set{}
	p.space.addPending(ck.number, ck.freedLive)
	for _, f := range ck.onCommit {
		f()
	}
	ck.end()
}

// Abort gives the checkpoint up: the space is as it was. After Commit it does nothing.
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
	for _, e := range ck.taken {
		space.giveBack(e)
	}
	for _, id := range ck.written {
		ck.p.onFree(id)
	}
	for _, f := range ck.onAbort {
		f()
	}
	ck.end()
}

func (ck *Checkpoint) end() {
	ck.ended = true
	ck.p.publishStats()
	ck.p.open.Store(false)
}

// Errors of checkpoints.
var (
	// ErrFailed means that an earlier write or sync failed: what is on the device is unknown, and no checkpoint is taken.
	ErrFailed = errors.New("pager: stopped after a failed write")
	// ErrBusy means that a checkpoint is open already.
	ErrBusy = errors.New("pager: a checkpoint is open")
	// ErrEnded means that the checkpoint was committed or given up before.
	ErrEnded = errors.New("pager: checkpoint has ended")
	// ErrBroken means that a caller or the pager itself broke an invariant. Nothing was made durable, and nothing will be.
	ErrBroken = errors.New("pager: invariant broken")
)

func brokenf(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrBroken, fmt.Errorf(format, args...))
}
