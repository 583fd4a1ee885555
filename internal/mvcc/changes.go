package mvcc

import (
	"context"
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// Changes is what a reader of committed changes sees of a store: the log up to the stable epoch.
type Changes struct{ store *Store }

// Changes returns the store's committed changes.
func (s *Store) Changes() *Changes { return &Changes{store: s} }

// Stable is the largest epoch such that every commit up to it is visible and durable. No crash takes back what is at or
// before it.
func (c *Changes) Stable() keys.Epoch { return min(c.store.Visible(), c.store.Durable()) }

// Await returns when the stable epoch is after another. If a visible commit is not durable after syncAfter, it requests a sync:
// nothing else may do so for a commit that was acknowledged without one.
func (c *Changes) Await(ctx context.Context, after keys.Epoch, syncAfter time.Duration) error {
	s := c.store
	for c.Stable() <= after {
		if err := s.watermark.waitAlone(ctx, after+1); err != nil {
			return err
		}
		err := c.awaitDurable(ctx, after+1, syncAfter)
		if err != nil {
			return err
		}
	}
	return nil
}

// awaitDurable waits for a visible epoch to become durable, for so long at most before it requests that.
func (c *Changes) awaitDurable(ctx context.Context, e keys.Epoch, syncAfter time.Duration) error {
	waiting, cancel := context.WithTimeout(ctx, syncAfter)
	defer cancel()
	err := c.store.engine.ObserveDurable(waiting, e)
	if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		c.store.RequestDurable(c.store.Visible())
		err = c.store.engine.ObserveDurable(ctx, e)
	}
	return err
}

// ReadLog reads the log from an epoch on. mark is where an earlier reader was, or zero.
func (c *Changes) ReadLog(next keys.Epoch, mark wal.TailMark) *wal.TailReader {
	return c.store.engine.ReadLog(next, mark)
}

// OldestInLog is the first epoch that the log has.
func (c *Changes) OldestInLog() keys.Epoch { return c.store.engine.OldestLogEpoch() }

// Hold keeps the log for a reader.
func (c *Changes) Hold(o wal.HolderOptions) *wal.Holder { return c.store.engine.HoldLog(o) }

// LogHolder is the holder of the log with a name that options of the store named, or nil.
func (c *Changes) LogHolder(name string) *wal.Holder { return c.store.engine.LogHolder(name) }

// BulkLoads are the bulk loads with epochs after one epoch and up to another. It reports false if it does not know all of
// them: the log has no record of a bulk load.
func (c *Changes) BulkLoads(after, through keys.Epoch) (list []keys.LoadedRange, complete bool) {
	return c.store.engine.LoadedRanges(after, through)
}

// Secure brings every commit of the log segment that has an epoch into the tree, because the segment is damaged, and
// returns the first epoch of the next segment. It reports false if there is none yet.
func (c *Changes) Secure(ctx context.Context, at keys.Epoch) (next keys.Epoch, ok bool, err error) {
	e := c.store.engine
	if next, ok = e.LogSegmentAfter(at); ok && next-1 <= e.TreeEpoch() {
		return next, true, nil
	}
	if err := c.store.Checkpoint(ctx); err != nil {
		return 0, false, err
	}
	next, ok = e.LogSegmentAfter(at)
	return next, ok, nil
}
