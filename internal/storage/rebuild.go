package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/orphans"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
)

const (
	// newFileCheckpoint is the checkpoint of a data file that has nothing yet.
	newFileCheckpoint = 1
	// rebuildReadBytes is how many bytes a search for orphans reads each second, so that readers keep the device.
	rebuildReadBytes = 128 << 20
	// healEvery is the time between two looks whether skipped pages can be read again.
	healEvery = 10 * time.Minute
	// healRetry is the time between two looks whether the disk has space, so that skipped pages can be looked at.
	healRetry = time.Second
	// healBackoffMax bounds the pause between two looks after merges that have yielded: a day, about.
	healBackoffMax = 7
	// healTime bounds a look: a device that fails may take seconds for each page.
	healTime = 5 * time.Second
	// rebuildPauseMin is the least time between two searches; rebuildPauses is how many times longer than a search the pause
	// after it is.
	rebuildPauseMin = 50 * time.Millisecond
	rebuildPauses   = 9
)

// rebuilds lets inner nodes that cannot be read be rebuilt (ADR 0047). A merge or a read that meets one requests a search,
// which runs beside commits and checkpoints over a pinned state. The next checkpoint writes the nodes that it has proved.
//
// A page never changes while it is live, and the pages of a pinned state are not used again. So a lost node that is still in
// the tree when the checkpoint merges has the children that the search has found.
type rebuilds struct {
	requests     chan struct{}      // capacity 1: a node may be lost
	ready        *readyRebuild      // guarded by checkpointState.mu
	mirrorFailed bool               // no mirror of the repair tree can be built, until the next start; guarded by checkpointState.mu
	waiting      atomic.Bool        // ready is not nil: a checkpoint has something to do
	yield        yielder            // cancels a merge that rebuilds
	yielded      atomic.Uint32      // merges that were cancelled so, since one rebuilt something
	later        atomic.Bool        // a checkpoint could not write the nodes: the search is repeated after one that succeeds
	done         atomic.Uint64      // nodes rebuilt
	reads        atomic.Uint64      // pages read by searches
	mu           sync.Mutex         // a leaf
	refused      map[page.ID]string // guarded by mu: nodes that stay lost, and why; nil without any
}

// readyRebuild is what a search has found, for the next checkpoint.
type readyRebuild struct {
	state  *PinnedState // nil without nodes
	nodes  []btree.RebuiltNode
	leaves map[page.ID]struct{} // that are skipped and can be read again
}

// mends reports whether the page need not be skipped any more.
func (r *readyRebuild) mends(id page.ID) bool {
	_, healed := r.leaves[id]
	return healed || isRebuilt(r.nodes, id)
}

// Rebuild tells what became of an inner node that could not be read.
type Rebuild struct {
	Page     uint64
	Offset   int64
	Level    int
	Children int    // of the rebuilt node; zero if it was not rebuilt
	Reason   string // why it was not rebuilt
	KeyLower []byte // client keys of a rebuilt node; nil for no bound
}

// request lets RunRebuilds search, unless page id is known to stay lost.
func (r *rebuilds) request(id page.ID) {
	r.mu.Lock()
	_, refused := r.refused[id]
	r.mu.Unlock()
	if !refused {
		r.wake()
	}
}

func (r *rebuilds) wake() {
	select {
	case r.requests <- struct{}{}:
	default:
	}
}

// again requests a search for all lost nodes, those that were refused as well.
func (r *rebuilds) again() {
	r.mu.Lock()
	r.refused = nil
	r.mu.Unlock()
	r.wake()
}

// requestFor requests a search if inner nodes are skipped.
func (r *rebuilds) requestFor(skipped *repairtree.Tree) {
	for _, p := range skipped.Pages() {
		if p.Level > 0 {
			r.request(p.ID)
		}
	}
}

// refuse records that nodes stay lost.
func (r *rebuilds) refuse(nodes []btree.RebuiltNode, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refused == nil { // again has been called since the search
		r.refused = map[page.ID]string{}
	}
	for i := range nodes {
		r.refused[nodes[i].ID] = reason
	}
}

// reasonOf is why page id stays lost, or an empty string.
func (r *rebuilds) reasonOf(id page.ID) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused[id]
}

// RunRebuilds searches the children of inner nodes that cannot be read, whenever one is met, and looks at the skipped pages from time to
// time, until ctx ends.
func (e *Engine) RunRebuilds(ctx context.Context) {
	heal := time.NewTicker(healEvery)
	defer heal.Stop()
	looked := e.heal(ctx)
	for look := 1; ; {
		var space <-chan time.Time
		if !looked {
			space = time.After(healRetry)
		}
		select {
		case <-ctx.Done():
			return
		case <-space:
			looked = e.heal(ctx)
			continue
		case <-heal.C:
			looked = e.lookAgain(ctx, look)
			look++
			continue
		case <-e.rebuilds.requests:
		}
		began := time.Now()
		if err := e.searchOrphans(ctx); err != nil {
			e.rebuilds.later.Store(true)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(rebuildPauseMin, rebuildPauses*time.Since(began))):
		}
	}
}

// lookAgain lets everything be tried again that a merge may succeed with now. After merges that have yielded, each of which has delayed writers,
// it does so every second time, every fourth, and so on. The result is that of heal.
func (e *Engine) lookAgain(ctx context.Context, look int) (looked bool) {
	yielded := e.rebuilds.yielded.Load()
	if look%(1<<min(yielded, healBackoffMax)) != 0 {
		return true
	}
	looked = e.heal(ctx)
	if yielded > 0 {
		e.rebuilds.again()
	}
	return looked
}

// errSearchYields ends a search while the disk is full: the pages of its pinned state are those that deletions free. The
// search is repeated after a checkpoint.
var errSearchYields = errors.New("storage: the search for orphans waits until the disk has space")

// yields is errSearchYields while there is a shortage.
func (e *Engine) yields() error {
	if e.Shortage() != nil {
		return errSearchYields
	}
	return nil
}

// searchOrphans makes one search, and hands what it has found to the next checkpoint.
func (e *Engine) searchOrphans(ctx context.Context) error {
	if e.rebuilds.waiting.Load() {
		return nil
	}
	if err := e.yields(); err != nil {
		return err
	}
	state, err := e.PinState(ctx)
	if err != nil {
		return err
	}
	state.ReleaseLog()
	found, err := state.findOrphans(ctx)
	if err != nil {
		state.Release()
		return err
	}
	e.rebuilds.reads.Add(uint64(found.Reads))
	e.noteRefused(found.Refused)
	if len(found.Nodes) == 0 {
		state.Release()
		return nil
	}
	if err := e.hand(ctx, &readyRebuild{state: state, nodes: found.Nodes}); err != nil {
		state.Release()
		return err
	}
	return nil
}

// hand gives the next checkpoint what was found.
func (e *Engine) hand(ctx context.Context, found *readyRebuild) error {
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return err
	}
	e.rebuilds.ready = found
	e.rebuilds.waiting.Store(true)
	e.checkpoints.mu.Unlock()
	e.checkpoints.request()
	return nil
}

// heal lets the next checkpoint end the skipping of leaves that can be read again, as after a device has answered with errors for a
// while. A live page never changes: what it has is what it had. An inner node is left to a search, also if an earlier one has refused it.
// While the disk is full it does not look, and reports false.
func (e *Engine) heal(ctx context.Context) (looked bool) {
	if e.Shortage() != nil {
		return false
	}
	if e.rebuilds.waiting.Load() {
		return true
	}
	source, found := pagesource.NewDirect(&e.pager.Reader), &readyRebuild{leaves: map[page.ID]struct{}{}}
	pages, began := e.view.Load().repairTree.Pages(), time.Now()
	for i := range pages {
		p := &pages[(i+int(began.Unix()))%len(pages)] // each time from another one on
		if ctx.Err() != nil || time.Since(began) > healTime {
			break
		}
		b, err := source.Page(p.ID, p.Level)
		switch {
		case err != nil || p.Misplaced(b) != nil:
		case p.Level > 0:
			e.rebuilds.again()
		default:
			found.leaves[p.ID] = struct{}{}
		}
	}
	if len(found.leaves) > 0 {
		_ = e.hand(ctx, found) // ctx has ended
	}
	return true
}

// findOrphans searches the state.
func (p *PinnedState) findOrphans(ctx context.Context) (*orphans.Found, error) {
	if err := p.Pages.ReadMap(); err != nil {
		return nil, err
	}
	root, mirror := p.repairTree.Roots()
	stored := p.Pages.State()
	avoid := p.repairTree.Avoid()
	limit := readLimit{began: time.Now(), pagesPerSecond: rebuildReadBytes / p.Pages.PageSize()}
	return orphans.Find(ctx, &orphans.Search{
		Pages: p.Pages, Tree: p.Tree(), Beside: []btree.Root{root, mirror}, Newest: newestEpoch(&stored), Exact: p.MapIsExact(),
		Blobs: p.reachBlobs,
		Pause: func(ctx context.Context) error {
			if err := p.engine.yields(); err != nil {
				return err
			}
			return limit.wait(ctx)
		},
		Skipped: func(id page.ID) bool { _, skipped := avoid[id]; return skipped },
	})
}

// reachBlobs calls each for the pages of the blob store, as far as they can be read.
func (p *PinnedState) reachBlobs(each func(page.ID) error) error {
	store, err := blob.Open(&p.Pages.Reader)
	if err != nil {
		if IsDamage(err) {
			return nil
		}
		return err
	}
	_, err = store.Reach(each)
	return err
}

// readLimit keeps a search to a rate.
type readLimit struct {
	began          time.Time
	pagesPerSecond int
	pages          int
}

// wait waits before the next page is read, if the search is ahead of its rate.
func (l *readLimit) wait(ctx context.Context) error {
	l.pages++
	ahead := time.Duration(l.pages)*time.Second/time.Duration(l.pagesPerSecond) - time.Since(l.began)
	if ahead < time.Millisecond {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(ahead):
		return nil
	}
}

// noteRefused records which nodes stay lost, and reports those that are new.
func (e *Engine) noteRefused(refused []orphans.Refusal) {
	r := &e.rebuilds
	r.mu.Lock()
	old := r.refused
	r.refused = map[page.ID]string{}
	for i := range refused {
		r.refused[refused[i].Page] = refused[i].Reason
	}
	r.mu.Unlock()
	for i := range refused {
		if p := &refused[i]; old[p.Page] != p.Reason {
			e.reportRebuild(&Rebuild{Page: uint64(p.Page), Level: p.Level, Reason: p.Reason})
		}
	}
}

func (e *Engine) reportRebuild(r *Rebuild) {
	r.Offset = int64(r.Page) * int64(e.options.PageSize)
	if e.options.OnRebuild != nil {
		e.options.OnRebuild(*r)
	}
}

// rebuildIn lets a whole merge rebuild the nodes that are ready, or a repair tree that has lost its mirror. It returns the
// repair tree that the merge has: what the repair tree has for the keys of rebuilt nodes becomes input of the tree.
func (e *Engine) rebuildIn(
	ctx context.Context, batch *blob.Batch, in *btree.MergeInput, job *mergeJob,
) (b *nodeRebuild, known *repairtree.Tree, err error) {
	known = e.checkpoints.skippedPages
	switch {
	case job.rebuilds(e):
		in.Rebuilt = e.rebuilds.ready.nodes
	case !job.rebuildsMirror(e):
		return nil, known, nil
	}
	b = &nodeRebuild{back: known.GiveBack(&e.pager.Reader, e.mendedIn(job))}
	if b.copies, err = b.back.Copies(ctx, e.blobs, batch.Store); err != nil {
		return nil, nil, err
	}
	all := in.Input
	in.Input = func() btree.Input { return b.back.Input(all()) }
	in.Lookahead, in.Cuts = nil, btree.Cuts{}
	return b, b.back.Remaining, nil
}

// mendedIn reports which pages the merge skips no more.
func (e *Engine) mendedIn(job *mergeJob) func(page.ID) bool {
	if !job.rebuilds(e) {
		return func(page.ID) bool { return false }
	}
	return e.rebuilds.ready.mends
}

// nodeRebuild is the part of a merge that rebuilds nodes.
type nodeRebuild struct {
	back   *repairtree.GivingBack
	copies map[page.Ref]page.Ref // of blobs in ranges that are still skipped
}

// finish frees what the new repair tree replaces.
func (b *nodeRebuild) finish(ctx context.Context, ck *pager.Checkpoint, blobs repairtree.Blobs, counts *btree.Stats) (complete bool, err error) {
	if b == nil {
		return true, nil
	}
	return b.back.Free(ctx, ck, blobs, counts)
}

// copiesForMirror are the copies that mergeBoth needs.
func (b *nodeRebuild) copiesForMirror() map[page.Ref]page.Ref {
	if b == nil {
		return nil
	}
	return b.copies
}

// rebuilds reports whether the merge writes the nodes that are ready.
func (j *mergeJob) rebuilds(e *Engine) bool {
	return e.rebuilds.ready != nil && j.span == nil && !j.recovering
}

// rebuildsMirror reports whether the merge builds a repair tree and its mirror anew, because there is no mirror.
func (j *mergeJob) rebuildsMirror(e *Engine) bool {
	return e.checkpoints.skippedPages.LacksMirror() && !e.rebuilds.mirrorFailed && j.span == nil && !j.recovering
}

func isRebuilt(nodes []btree.RebuiltNode, id page.ID) bool {
	return slices.ContainsFunc(nodes, func(n btree.RebuiltNode) bool { return n.ID == id })
}

// endRebuild reports the nodes that a durable checkpoint has rebuilt.
func (e *Engine) endRebuild(job *mergeJob) {
	if !job.rebuilds(e) {
		if e.rebuilds.later.Swap(false) {
			e.rebuilds.wake()
		}
		return
	}
	for i := range e.rebuilds.ready.nodes {
		n := &e.rebuilds.ready.nodes[i]
		e.rebuilds.done.Add(1)
		e.reportRebuild(&Rebuild{Page: uint64(n.ID), Level: n.Level, Children: len(n.Children), KeyLower: boundKey(&n.Children[0].Separator)})
	}
	e.dropRebuild()
	e.rebuilds.yielded.Store(0)
	e.rebuilds.wake() // the nodes may have others below them
}

// errRebuildYields ends a merge with a rebuild when a writer has waited for memory for long: the repair tree may be far larger than what the
// merge frees.
var errRebuildYields = errors.New("storage: it takes longer than writers wait for memory")

// yieldingRebuild is the context for one attempt of a merge.
func (e *Engine) yieldingRebuild(ctx context.Context, job *mergeJob) (yielding context.Context, release func()) {
	if !job.rebuilds(e) && !job.rebuildsMirror(e) {
		return ctx, func() {}
	}
	return e.rebuilds.yield.begin(ctx)
}

// giveUpRebuild makes a merge go on without the nodes that are ready, after an attempt with them failed, or else without a new
// mirror, and reports whether there was one of the two. After a full disk the search for nodes is repeated later; after another
// failure they stay lost, if it was because writers waited for memory until lookAgain. A mirror is not tried again before the next start.
func (e *Engine) giveUpRebuild(ctx context.Context, job *mergeJob, err error) bool {
	if err == nil || ctx.Err() != nil || e.pager.Err() != nil {
		return false
	}
	if !job.rebuilds(e) {
		mirror := job.rebuildsMirror(e)
		e.rebuilds.mirrorFailed = e.rebuilds.mirrorFailed || mirror
		return mirror
	}
	nodes := e.rebuilds.ready.nodes
	e.dropRebuild()
	if errors.Is(err, errRebuildYields) {
		e.rebuilds.yielded.Add(1)
	}
	if doesNotFit(err) {
		e.rebuilds.later.Store(true)
		return true
	}
	if len(nodes) == 0 {
		e.rebuilds.wake() // for nodes that were met meanwhile
		return true
	}
	e.rebuilds.refuse(nodes, fmt.Sprintf("the checkpoint that rebuilt it failed: %v", err))
	for i := range nodes {
		e.reportRebuild(&Rebuild{Page: uint64(nodes[i].ID), Level: nodes[i].Level, Reason: e.rebuilds.reasonOf(nodes[i].ID)})
	}
	return true
}

func (e *Engine) dropRebuild() {
	if e.rebuilds.ready.state != nil {
		e.rebuilds.ready.state.Release()
	}
	e.rebuilds.ready = nil
	e.rebuilds.waiting.Store(false)
}

// meetsLost requests a search if a merge has met an inner node that it cannot read.
func (e *Engine) meetsLost(pages []btree.UnreadablePage) {
	for i := range pages {
		if pages[i].Level > 0 {
			e.rebuilds.request(pages[i].ID)
		}
	}
}

// failsRebuild reports whether a merge could not read a page that it was not to skip any more: a node does not fit its place, or a leaf
// can be read at times only.
func (e *Engine) failsRebuild(job *mergeJob, err error) bool {
	found, ok := errors.AsType[*btree.UnreadableError](err)
	return ok && job.rebuilds(e) && slices.ContainsFunc(found.Pages, func(p btree.UnreadablePage) bool { return e.rebuilds.ready.mends(p.ID) })
}
