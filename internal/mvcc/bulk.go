package mvcc

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// ErrBulkLoadBusy means that another bulk load is in progress.
var ErrBulkLoadBusy = storage.ErrBulkLoadBusy

// ErrBulkLoadQuarantine means that no bulk load is possible while the quarantine has versions.
var ErrBulkLoadQuarantine = storage.ErrBulkLoadQuarantine

// ErrBulkLoadOvertaken means that so much was committed during a bulk load that the epochs before
// its own are used up.
var ErrBulkLoadOvertaken = storage.ErrBulkLoadOvertaken

// BulkLoad is a bulk load in progress: everything in it becomes visible and durable at once, at one
// epoch, or not at all. storage/bulk.go describes how. It is for one goroutine, and the limits of a
// batch do not apply to it.
type BulkLoad struct {
	store  *Store
	load   *storage.BulkLoad
	key    []byte
	permit func() error // see Permit; nil: every commit is permitted
}

// BulkLoaded is the outcome of a bulk load.
type BulkLoaded struct {
	Epoch       keys.Epoch
	Keys        uint64        // distinct ones
	PausedAt    time.Time     // when other commits were stopped, so that it becomes durable
	CommitPause time.Duration // how long
}

// bulkLoads is the store's part of bulk loads. There is one bulk load at a time.
type bulkLoads struct {
	session *Session // commits it; nil before the first bulk load, and outside the limit of sessions
	pause   commitPause
	turn    chan struct{} // holds a token while a bulk load is in its commit pause
	keep    atomic.Int64  // see Store.KeepBulkLoads
	held    heldLoads
}

// commitPause sums up how long bulk loads have stopped commits, those that failed in the commit
// pause included.
type commitPause struct{ total, longest atomic.Int64 }

func (h *commitPause) add(d time.Duration) {
	h.total.Add(int64(d))
	h.longest.Store(max(h.longest.Load(), int64(d)))
}

// KeepBulkLoads says for how long the states before and after each further bulk load are kept readable, by snapshot leases, as
// far as their limit allows; zero: not at all.
func (s *Store) KeepBulkLoads(ttl time.Duration) { s.bulk.keep.Store(int64(ttl)) }

// BeginBulkLoad begins a bulk load. It ends with Close, which must be called before Store.Close.
// There is one bulk load at a time: ErrBulkLoadBusy.
func (s *Store) BeginBulkLoad() (*BulkLoad, error) {
	if s.lifecycle.closing.Load() {
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
	if s.bulk.session == nil {
		s.bulk.session = s.newSession()
		s.bulk.session.parker.urgent = true
	}
	return &BulkLoad{store: s, load: load}, nil
}

// Add puts a key. Of several values of one key the last one remains. Add keeps neither slice.
// Errors: *LimitError, ErrEmptyKey, and those of the file system, among them vfs.ErrNoSpace.
func (l *BulkLoad) Add(key, value []byte) error {
	if err := l.store.checkKey(key); err != nil {
		return err
	}
	if limit := l.store.options.Limits.ValueBytes; len(value) > limit {
		return &LimitError{What: "value bytes", Limit: limit, Got: len(value)}
	}
	l.key = keys.Append(l.key[:0], keys.SpaceUser, key)
	return l.load.Add(l.key, value)
}

// Permit sets the function that Commit calls at the beginning of the commit pause. It is not called again: what ends the
// permission waits with AwaitCommitPause.
func (l *BulkLoad) Permit(permit func() error) { l.permit = permit }

// AwaitCommitPause waits until no bulk load is in a commit pause that has begun before.
func (s *Store) AwaitCommitPause(ctx context.Context) error {
	select {
	case s.bulk.turn <- struct{}{}:
		<-s.bulk.turn
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Cancel lets an Add that waits for the sorting of earlier entries end early, with an error. Nothing can
// be committed after it. It may be called by any goroutine.
func (l *BulkLoad) Cancel() { l.load.Cancel() }

// Close ends the bulk load. Without a Commit before, the store is unchanged.
func (l *BulkLoad) Close() error { return l.load.Close() }

// Commit makes everything that was added visible and durable. An error means that the store is
// unchanged, unless it is ErrFailed and comes with the epoch that the bulk load would have: then the
// outcome is known after the next start. Other commits
// continue meanwhile, delayed in the last moments, and stop for the commit pause at the end: some
// milliseconds and two syncs of the device.
func (l *BulkLoad) Commit(ctx context.Context) (BulkLoaded, error) {
	s := l.store
	n, err := l.load.Prepare(ctx)
	if err != nil {
		return BulkLoaded{}, err
	}
	if n == 0 {
		return BulkLoaded{Epoch: s.Visible()}, nil
	}
	// The memtables are merged first, so that their memory is free for what is committed during the
	// bulk load.
	if err := s.Checkpoint(ctx); err != nil {
		return BulkLoaded{}, err
	}
	yielding, release := s.engine.YieldingBulkLoad(ctx)
	defer release()
	if err := l.build(yielding); err != nil {
		return BulkLoaded{}, orYielded(yielding, err)
	}
	endHolding := s.beginHoldingLoad()
	defer endHolding()
	at := time.Now()
	pause, err := l.switchOver(yielding)
	if !l.load.Published() {
		s.engine.CancelBulkLoad(l.load)
		return BulkLoaded{Epoch: l.load.Epoch()}, orYielded(yielding, err)
	}
	// A later error is an error of the store: the bulk load has happened.
	_ = s.engine.CompleteBulkLoad(ctx, l.load)
	s.holdLoad(ctx, l.load)
	_ = s.recordLoads(ctx, s.bulk.session) // else the next sample does
	return BulkLoaded{Epoch: l.load.Epoch(), Keys: n, PausedAt: at, CommitPause: pause}, nil
}

// orYielded is storage.ErrBulkLoadYielded instead of an error that the end of yielding has caused.
func orYielded(yielding context.Context, err error) error {
	if cause := context.Cause(yielding); errors.Is(cause, storage.ErrBulkLoadYielded) && !errors.Is(err, ErrFailed) {
		return cause
	}
	return err
}

// build makes the state that switchOver publishes.
func (l *BulkLoad) build(yielding context.Context) error {
	e := l.store.engine
	err := e.BuildBulkLoad(yielding, l.load, l.store.gcWatermarks())
	if err == nil {
		if err = l.catchUp(yielding); err != nil {
			e.CancelBulkLoad(l.load)
		}
	}
	return err
}

const (
	// lagMax is how long the merge in the commit pause may be expected to take.
	lagMax = 10 * time.Millisecond
	// catchUpRoundsMax bounds the rounds of catchUp. From the second one on writers are throttled,
	// in each round twice as much as in the round before: to half of what merges take in, to a
	// quarter of it, and so on.
	catchUpRoundsMax = 16
)

// catchUp merges what is committed during the bulk load until little of it is left.
func (l *BulkLoad) catchUp(ctx context.Context) error {
	e := l.store.engine
	for round := range catchUpRoundsMax {
		if e.BulkLoadLag(l.load) <= lagMax {
			return nil
		}
		if round > 0 {
			e.ThrottleForBulkLoad(l.load, 1<<round)
		}
		if ok, err := e.RotateForBulkLoad(ctx); err != nil || !ok { // memory is full: commits wait for the commit pause in any case
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

// switchOver commits the bulk load, and returns how long other commits were stopped: from the first
// latch that is taken until all of them are released.
func (l *BulkLoad) switchOver(ctx context.Context) (time.Duration, error) {
	s, start := l.store, time.Now()
	s.bulk.turn <- struct{}{} // others keep it for no time
	defer func() { <-s.bulk.turn }()
	defer func() { s.bulk.pause.add(time.Since(start)) }()
	s.engine.BeginBulkLoadSwitch()
	s.bulk.session.Permit(l.permit)
	defer s.bulk.session.Permit(nil) // the hold of the load needs none
	_, err := s.bulk.session.commit(ctx, &Write{load: l.load})
	return time.Since(start), err
}

// publishBulkLoad is what reserve and complete are for other commits. All latches are held, so every
// epoch that was reserved is installed, and no other commit begins until they are released. If it
// fails, no epoch was used.
func (x *Session) publishBulkLoad(ctx context.Context, load *storage.BulkLoad) (keys.Epoch, error) {
	s := x.store
	last := s.engine.SealBulkLoad()
	if err := s.watermark.wait(ctx, last, x.parker); err != nil {
		return 0, err
	}
	err := s.engine.FinishBulkLoad(ctx, load, s.gcWatermarks(), s.clock.Now())
	if !load.Published() {
		return 0, err
	}
	if ttl := s.bulk.keep.Load(); ttl > 0 { // before the watermark moves: no collector has passed these epochs
		s.LeaseSnapshot(load.Epoch()-1, "", time.Duration(ttl))
		s.LeaseSnapshot(load.Epoch(), "", time.Duration(ttl))
	}
	s.bulk.held.published(load.Epoch())
	s.counters.noOps.Add(uint64(load.Epoch() - last))
	s.latches.wrote(&x.committing.held, load.Epoch())
	s.timeline.noteLoad(timeSample{at: load.CommitTime(), epoch: load.Epoch(), bytes: s.engine.LoggedBytes(), noted: true})
	s.watermark.jumpTo(load.Epoch())
	return load.Epoch(), nil
}
