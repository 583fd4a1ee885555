package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/clock"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/wal"
)

// Store is an open database.
type Store struct {
	// Constant after Open.
	engine    *storage.Engine
	registry  *pin.Registry
	latches   *latches
	collector *collector
	options   Options // with their defaults
	recovery  storage.Recovery
	clock     *clock.Clock

	watermark     watermark
	_             [64]byte
	counters      commitCounters
	turns         turns                 // constant
	checkpointErr atomic.Pointer[error] // of the last background checkpoint
	bulk          bulkLoads
	sessions      sessionPool
	probe         *Session // of Probe alone; outside the limit of sessions, so that a probe does not compete with requests
	requests      requestWindow
	expirer       *expirer
	timeline      timeline
	lifecycle     lifecycle
	leaseGuard    atomic.Pointer[LeaseGuard]
}

// ownSessionsMax is how many sessions beside those of clients may commit at once: of bulk loads, the probe, the request window, the
// timeline, the archiver, the revocation of leases, the counting of their keys, and the users (OwnSession), and the workers of the expirer.
const ownSessionsMax = 8 + expiryCommitsLate

// Open opens or creates the store in o.Storage.Dir and recovers what its log holds. Errors: *storage.CorruptionError,
// storage.ErrNewerFormat, vfs.ErrLocked, and those of the file system.
func Open(o Options) (*Store, error) { return OpenContext(context.Background(), o) }

// OpenContext is Open under a context, which ends a long recovery: see storage.Open.
func OpenContext(ctx context.Context, o Options) (*Store, error) {
	o.setDefaults()
	if err := o.Limits.check(o.Storage.PageSize); err != nil {
		return nil, fmt.Errorf("open %s: %w", o.Storage.Dir, err)
	}
	s := &Store{latches: newLatches(o.Storage.Ablation), options: o}
	s.turns.init(o.Owner)
	s.bulk.turn = make(chan struct{}, 1)
	s.sessions.kept.init(o.Storage.MemoryBytes)
	s.registry = pin.NewRegistry(&s.watermark.visible)
	engine, recovery, err := storage.Open(ctx, o.Storage, s.registry)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", o.Storage.Dir, err)
	}
	s.engine, s.recovery, s.clock = engine, recovery, clock.New(o.WallClock, recovery.CommitTime)
	s.watermark.open(recovery.Next-1, s.options.Limits.Sessions+ownSessionsMax)
	s.probe, s.expirer = s.newSession(), newExpirer(s)
	s.timeline.init(&o)
	if err := errors.Join(s.requests.open(s.probe), s.adoptFeatureLevel(ctx), s.timeline.open(ctx, s.probe)); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", o.Storage.Dir, err), engine.Close())
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	s.lifecycle.stop = stop
	s.collector = newCollector(s)
	if err := s.openRemoved(ctx); err != nil {
		stop()
		return nil, errors.Join(fmt.Errorf("open %s: %w", o.Storage.Dir, err), engine.Close())
	}
	record, cancel := context.WithCancel(ctx)
	if s.engine.AwaitsSegment() {
		cancel() // the disk is full: a checkpoint frees a segment, and none is made before the store is open
	}
	s.recordStart(record)
	_ = s.recordRemoved(record, s.probe) // else advanceTimeline does: until then the skip record of a repair tells, while the log has it
	_ = s.endHidden(record, s.probe)     // else advanceTimeline does
	cancel()
	s.collector.refresh(time.Now())
	s.lifecycle.done.Go(func() { s.clock.Run(ctx) })
	s.lifecycle.done.Go(func() { s.collector.run(ctx) })
	s.lifecycle.done.Go(func() { s.runSyncer(ctx) })
	s.lifecycle.done.Go(func() { s.runCheckpoints(ctx) })
	s.lifecycle.done.Go(func() { s.engine.RunPrefetch(ctx) })
	s.lifecycle.done.Go(func() { s.engine.RunTablePool(ctx) })
	s.lifecycle.done.Go(func() { s.engine.RunSpace(ctx) })
	window, timeline := s.newSession(), s.newSession() // here, so that all of the store's own sessions exist when Open returns
	s.lifecycle.done.Go(func() { s.runRequestWindow(ctx, window) })
	s.lifecycle.done.Go(func() { s.runTimeline(ctx, timeline) })
	s.lifecycle.done.Go(func() { s.engine.RunRebuilds(ctx) })
	s.lifecycle.done.Go(func() { s.expirer.run(ctx) })
	return s, nil
}

// ID is the random identity that the store was given when it was created.
func (s *Store) ID() [16]byte { return s.engine.StoreID() }

// Clock is the clock of the store: what commit times are from, and what deadlines are compared with.
func (s *Store) Clock() *clock.Clock { return s.clock }

// Recovery reports what opening found.
func (s *Store) Recovery() storage.Recovery { return s.recovery }

// StopThrottling ends all delays of writers, now and later, so that a store that is about to close need not wait for them.
func (s *Store) StopThrottling() { s.engine.StopThrottling() }

// Err is nil, or why the store stopped accepting writes.
func (s *Store) Err() error { return s.engine.Err() }

// Damage is nil, or damage that checkpoints have met. The store continues without the damaged
// pages.
func (s *Store) Damage() error { return s.engine.Damage() }

// TableBytes is the memory that the indirection table of large values takes, as of the newest checkpoint.
func (s *Store) TableBytes() int64 { return s.engine.TableBytes() }

// Visible is the newest epoch that new snapshots see.
func (s *Store) Visible() keys.Epoch { return keys.Epoch(s.watermark.visible.Load()) }

// Durable is the newest epoch on stable storage, as all before it.
func (s *Store) Durable() keys.Epoch { return s.engine.Durable() }

// MinVisible is the oldest epoch that a reader may still read, as of the last collection.
func (s *Store) MinVisible() keys.Epoch { return s.registry.MinVisible() }

func (s *Store) isSync(d Durability) bool {
	if d == DurabilityDefault {
		d = s.options.Durability
	}
	return d == DurabilitySync
}

// Wait returns when a commit with this epoch and durability may be acknowledged: it is visible, and durable if it has to be. An
// error means that its fate is unknown (the context ended) or that it may be lost (ErrFailed).
//
// For a SYNC commit it parks once, for durable: meanwhile visible nearly always reaches the epoch. Before that it gives
// the commits before this one a moment to be complete, so that one sync has all of them.
func (s *Store) Wait(ctx context.Context, e keys.Epoch, d Durability) error {
	if s.isSync(d) {
		s.watermark.spin(e)
		if err := s.engine.WaitDurable(ctx, e); err != nil {
			return err
		}
	}
	return s.watermark.waitAlone(ctx, e)
}

// WaitWritten is Wait for the writer of the commit: unless the context has ended, its error is *OutcomeUnknownError.
func (s *Store) WaitWritten(ctx context.Context, e keys.Epoch, d Durability) error {
	err := s.Wait(ctx, e, d)
	if err == nil || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return err
	}
	return &OutcomeUnknownError{Epoch: e, Cause: err}
}

// Acknowledgeable reports whether Wait would return nil at once.
func (s *Store) Acknowledgeable(e keys.Epoch, d Durability) bool {
	return e <= s.Visible() && (!s.isSync(d) || e <= s.engine.Durable())
}

// AwaitBriefly waits busily until e is visible, for a few microseconds at most, and reports whether it is.
func (s *Store) AwaitBriefly(e keys.Epoch) bool { return s.watermark.spin(e) }

// RequestDurable starts what Wait waits for, and does not wait.
func (s *Store) RequestDurable(e keys.Epoch) { s.engine.RequestDurable(e) }

// AwaitDurable returns when e is on stable storage.
func (s *Store) AwaitDurable(ctx context.Context, e keys.Epoch) error {
	return s.engine.WaitDurable(ctx, e)
}

// LeaseSnapshot keeps the epoch of a session's snapshot readable for ttl after the snapshot ends,
// for a client that will go on with a resume token. If there are more than Limits.SnapshotLeases,
// it may end earlier: the client with the most leases loses the one that ends first. The store's
// own leases count as those of a client without a name.
func (s *Store) LeaseSnapshot(at keys.Epoch, client string, ttl time.Duration) {
	s.registry.AddLease(at, client, time.Now().Add(ttl), s.options.Limits.SnapshotLeases)
}

// NextSnapshotID is a number for a snapshot, or anything else that keeps versions, so that an
// operator can name it. No number is returned twice, and none is that of a lease.
func (s *Store) NextSnapshotID() uint64 { return s.registry.NextID() }

// SnapshotLeases lists the leases.
func (s *Store) SnapshotLeases() []pin.Lease { return s.registry.Leases() }

// EndSnapshotLease ends a lease before its deadline. It reports false if no lease has this id.
func (s *Store) EndSnapshotLease(id uint64) (pin.Lease, bool) { return s.registry.EndLease(id) }

// EndedLogHolders are the holders of the log that ended after the first n did; see wal.Log.EndedHolders.
func (s *Store) EndedLogHolders(n uint64) (list []wal.EndedHolder, total uint64) {
	return s.engine.EndedLogHolders(n)
}

// LowWatermark is the epoch from which on every epoch is readable.
func (s *Store) LowWatermark() keys.Epoch { return s.registry.LowWatermark() }

// everyTick calls do at an interval until ctx ends.
func everyTick(ctx context.Context, interval time.Duration, do func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			do()
		}
	}
}

// runSyncer makes async commits durable at the configured interval.
func (s *Store) runSyncer(ctx context.Context) {
	tick := time.NewTicker(s.options.SyncInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if e := s.Visible(); e > s.engine.Durable() {
			// A failure is final and kept by the engine: every writer and the health check see it.
			if err := s.engine.WaitDurable(ctx, e); err != nil && !errors.Is(err, context.Canceled) {
				return
			}
		}
	}
}
