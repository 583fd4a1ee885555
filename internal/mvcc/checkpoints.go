package mvcc

import (
	"context"
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// checkpointRetry is how long a checkpoint that met a full disk waits before the next attempt.
const checkpointRetry = time.Second

// largeWaitPart divides the checkpoint interval: so long waits an active memtable that is large in
// proportion to the tree, ten seconds by default.
const largeWaitPart = 30

// runCheckpoints makes a checkpoint when storage requests one and when its schedule has work, and a
// checkpoint of everything at an interval.
func (s *Store) runCheckpoints(ctx context.Context) {
	interval := time.NewTicker(s.options.CheckpointInterval)
	defer interval.Stop()
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-s.engine.CheckpointRequests():
			err = s.mergeImmutables(ctx)
		case <-second.C:
			user, _ := s.collector.snapshotEpochs()
			switch s.engine.Schedule(s.options.CheckpointInterval/largeWaitPart, user) {
			case storage.WorkRotateAndMerge:
				err = s.Checkpoint(ctx)
			case storage.WorkMerge:
				err = s.mergeImmutables(ctx)
			case storage.WorkNone:
				_ = s.engine.TruncateLog() // the next checkpoint tries it again; a failure that is final is kept by the engine
				continue
			}
		case <-interval.C:
			err = s.Checkpoint(ctx)
		}
		s.noteCheckpoint(err)
		if errors.Is(err, vfs.ErrNoSpace) {
			// The durable state is unchanged; the memtables and the log have everything.
			select {
			case <-ctx.Done():
				return
			case <-time.After(checkpointRetry):
				s.engine.RequestCheckpoint()
			}
		}
	}
}

// noteCheckpoint keeps the result of a background checkpoint, for CheckpointErr. A checkpoint that
// closing ended is not a failure.
func (s *Store) noteCheckpoint(err error) {
	if err == nil || s.lifecycle.closing.Load() {
		s.checkpointErr.Store(nil)
		return
	}
	s.checkpointErr.Store(&err)
}

// CheckpointErr is nil, or why the last background checkpoint failed. The store tries it again,
// unless Err says that the store has failed.
func (s *Store) CheckpointErr() error {
	if p := s.checkpointErr.Load(); p != nil {
		return *p
	}
	return nil
}

// Checkpoint merges everything committed so far into the tree and returns when it is durable there.
func (s *Store) Checkpoint(ctx context.Context) error {
	rotated := s.rotate(ctx)
	if errors.Is(rotated, vfs.ErrNoSpace) { // immutable generations may keep the log files that the rotation needs
		if err := s.mergeImmutables(ctx); err != nil {
			return errors.Join(rotated, err)
		}
		rotated = s.rotate(ctx)
	}
	if rotated != nil {
		return rotated
	}
	return s.mergeImmutables(ctx)
}

// rotate is Engine.Rotate, with the merges that it needs first.
func (s *Store) rotate(ctx context.Context) error {
	for {
		rotated := s.engine.Rotate(ctx)
		if !errors.Is(rotated, storage.ErrMergeFirst) {
			return rotated
		}
		if err := s.mergeImmutables(ctx); err != nil {
			return err
		}
	}
}

// mergeImmutables waits until the immutable generations are complete and merges them.
func (s *Store) mergeImmutables(ctx context.Context) error {
	if err := s.watermark.waitAlone(ctx, s.engine.SealedEpoch()); err != nil {
		return err
	}
	return s.engine.Checkpoint(ctx, s.gcWatermarks())
}

// gcWatermarks are the watermarks for a merge that begins now.
func (s *Store) gcWatermarks() storage.GCWatermarks {
	visible := s.Visible()
	s.requests.merging()
	user, system := s.collector.snapshotEpochs()
	return storage.GCWatermarks{Visible: visible, Snapshots: user, System: system, Expired: s.requests.durable.expired(s.engine.TreeEpoch())}
}

// snapshotEpochs refreshes the GC watermarks and returns the epochs for which versions must be
// kept, in new slices: of user data, and of the store's own records.
func (c *collector) snapshotEpochs() (user, system []keys.Epoch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refresh(time.Now())
	return append([]keys.Epoch(nil), c.live...), c.store.registry.SystemEpochs(nil)
}
