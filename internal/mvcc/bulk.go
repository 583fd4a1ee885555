package mvcc

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// ErrBulkLoadBusy means that another bulk load is under way.
var ErrBulkLoadBusy = storage.ErrBulkLoadBusy

// ErrBulkLoadQuarantine means that there is no load while the tree has refused entries.
var ErrBulkLoadQuarantine = storage.ErrBulkLoadQuarantine

// ErrBulkLoadOvertaken means that more was committed beside a load than there were epochs before its own.
var ErrBulkLoadOvertaken = storage.ErrBulkLoadOvertaken

// BulkLoad is a bulk load under way: everything in it becomes visible and durable at once, at one epoch, or not at all. How is described in
// storage/bulk.go. It is for one goroutine and not bounded by the limits of a batch.
type BulkLoad struct {
	store *Store
	load  *storage.BulkLoad
	key   []byte
}

// BulkLoaded is the outcome of a load.
type BulkLoaded struct {
	Epoch       keys.Epoch
	Keys        uint64        // distinct ones
	CommitPause time.Duration // how long commits were held off
}

// bulkLoadSwitch is the moment in which a load takes its place.
type bulkLoadSwitch struct {
	done chan struct{} // closed when it is over
}

// BeginBulkLoad begins a load. It ends with Close, which comes before the store's. There is one at a time: ErrBulkLoadBusy.
func (s *Store) BeginBulkLoad() (*BulkLoad, error) {
	if s.closing.Load() {
		return nil, ErrClosed
	}
	if err := s.engine.Err(); err != nil {
		return nil, err
	}
	if short := s.engine.Shortage(); short != nil {
		return nil, short
	}
	load, err := s.engine.NewBulkLoad()
	if err != nil {
		return nil, err
	}
	return &BulkLoad{store: s, load: load}, nil
}

// Add puts a key. Of several values of one key the last one counts. It keeps neither slice. Errors: *LimitError, ErrEmptyKey,
// and those of the file system, among them vfs.ErrNoSpace.
func (l *BulkLoad) Add(key, value []byte) error {
	if err := l.store.checkKey(key); err != nil {
		return err
	}
	if limit := l.store.limits.ValueBytes; len(value) > limit {
		return &LimitError{What: "value bytes", Limit: limit, Got: len(value)}
	}
	l.key = keys.Append(l.key[:0], keys.SpaceUser, key)
	return l.load.Add(l.key, value)
}

// Close ends the load. Without a Commit before, nothing of it has happened.
func (l *BulkLoad) Close() error { return l.load.Close() }

// Commit makes everything that was added visible and durable. An error means that nothing happened, unless it is ErrFailed: then only the
// next start knows. Commits go on beside it, and are held off for the switch at its end, for some milliseconds and two syncs of the device.
func (l *BulkLoad) Commit(ctx context.Context) (BulkLoaded, error) {
	s := l.store
	n, err := l.load.Prepare(ctx)
	if err != nil || n == 0 {
		return BulkLoaded{Epoch: s.Visible()}, err
	}
	// What is in memtables is merged first, so that the memory for what is committed beside the load is free.
	if err := s.Checkpoint(ctx); err != nil {
		return BulkLoaded{}, err
	}
	if err := l.build(ctx); err != nil {
		return BulkLoaded{}, err
	}
	pause, err := l.switchOver(ctx)
	if !l.load.Published() {
		s.engine.CancelBulkLoad(l.load)
		return BulkLoaded{}, err
	}
	// An error of what comes after is the store's own: the load has happened.
	_ = s.engine.CompleteBulkLoad(ctx, l.load)
	return BulkLoaded{Epoch: l.load.Epoch(), Keys: n, CommitPause: pause}, nil
}

// build makes the state that is to be switched to. It gives way to commits that find no memory because of it: storage.ErrBulkLoadYielded.
func (l *BulkLoad) build(ctx context.Context) error {
	e := l.store.engine
	yielding, release := e.YieldingBulkLoad(ctx)
	defer release()
	err := e.BuildBulkLoad(yielding, l.load, l.store.gcWatermarks())
	if err == nil {
		if err = l.catchUp(yielding); err != nil {
			e.CancelBulkLoad(l.load)
		}
	}
	if cause := context.Cause(yielding); err != nil && errors.Is(cause, storage.ErrBulkLoadYielded) {
		return cause
	}
	return err
}

const (
	// lagMax is how many versions may be left to the switch: each of them may rewrite a page.
	lagMax = 256
	// catchUpRoundsMax bounds the rounds that try to get there. Each has at most three quarters of the work of the one before, or is the last: commits come
	// about as fast as they are merged then, and more rounds would not help.
	catchUpRoundsMax = 16
)

// follow merges what is committed beside the load until little of it is left.
func (l *BulkLoad) catchUp(ctx context.Context) error {
	e := l.store.engine
	before := math.MaxInt
	for range catchUpRoundsMax {
		behind := e.BulkLoadLag(l.load)
		if behind <= lagMax || behind > before-before/4 {
			return nil
		}
		before = behind
		if ok, err := e.RotateForBulkLoad(ctx); err != nil || !ok { // memory is full: commits wait for the switch in any case
			return err
		}
		if err := l.store.watermark.waitAlone(ctx, e.SealedEpoch()); err != nil {
			return err
		}
		if err := e.CatchUpBulkLoad(ctx, l.load, l.store.gcWatermarks()); err != nil {
			return err
		}
	}
	return nil
}

// switchOver holds off commits until the load is published and visible, and returns for how long.
func (l *BulkLoad) switchOver(ctx context.Context) (time.Duration, error) {
	s, start := l.store, time.Now()
	s.engine.BeginBulkLoadSwitch()
	now := &bulkLoadSwitch{done: make(chan struct{})}
	s.bulkLoading.Store(now)
	defer func() {
		s.bulkLoading.Store(nil)
		close(now.done)
		s.commitPause.add(time.Since(start))
	}()
	if err := s.drain(ctx); err != nil {
		return 0, err
	}
	last := s.engine.SealBulkLoad()
	if err := s.watermark.waitAlone(ctx, last); err != nil {
		return 0, err
	}
	if err := l.finish(ctx); err != nil {
		return 0, err
	}
	epoch := l.load.Epoch()
	s.noOps.Add(uint64(epoch - last))
	for i := range s.latches.table {
		stripe := &s.latches.table[i]
		_ = stripe.lock(context.Background(), s.bulkLoader)
		stripe.newest = epoch
		stripe.unlock()
	}
	s.watermark.jumpTo(epoch)
	return time.Since(start), nil
}

// commitPause is how long switches have held commits off, those of loads that failed in it among them. There is one load at a time.
type commitPause struct{ total, longest atomic.Int64 }

func (h *commitPause) add(d time.Duration) {
	h.total.Add(int64(d))
	h.longest.Store(max(h.longest.Load(), int64(d)))
}

// gcWatermarks is what a merge may assume of readers at present.
func (s *Store) gcWatermarks() storage.GCWatermarks {
	return storage.GCWatermarks{Visible: s.Visible(), Snapshots: s.collector.snapshotEpochs()}
}

// finish publishes the load. Its error counts only if it did not.
func (l *BulkLoad) finish(ctx context.Context) error {
	err := l.store.engine.FinishBulkLoad(ctx, l.load, l.store.gcWatermarks())
	if l.load.Published() {
		return nil
	}
	return err
}

// drain returns when every commit that had its latches before loading was set has given them back: its versions are installed.
func (s *Store) drain(ctx context.Context) error {
	for i := range s.latches.table {
		if err := s.latches.table[i].lock(ctx, s.bulkLoader); err != nil {
			return err
		}
		s.latches.table[i].unlock()
	}
	return nil
}

// lockUnlessLoading takes the latches of x.held, or none of them if the context ends first. While a bulk load is
// published no commit begins: it waits, without latches. A load looks at every latch once after it has announced
// itself, and a commit looks for an announced load while it holds its latches: one of the two sees the other.
func (x *Session) lockUnlessLoading(ctx context.Context) error {
	s := x.store
	for {
		if err := s.latches.lock(ctx, &x.held, x.parker); err != nil {
			return err
		}
		load := s.bulkLoading.Load()
		if load == nil {
			return nil
		}
		s.latches.unlock(&x.held)
		select {
		case <-load.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
