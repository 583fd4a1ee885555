package storage

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/wal"
)

// Restored is what Restore has made.
type Restored struct {
	Epoch       keys.Epoch // of the state
	CommitTime  time.Time  // the latest of all commits up to it; zero if it is not known
	Lineage     keys.Lineage
	StoreID     [16]byte
	Checkpoints int // made meanwhile because memory was full
}

// Restore brings commits that are not in a log into the data file in o.Dir, which is created if there is none, and makes the
// result another store: with a new identity and a new lineage, which began at its epoch, and a log that skips the epochs which the
// original may have used since. The directory has no log before. records calls
// apply with the records after the epoch of the data file, in order; a bulk load is several with one epoch, of which each but the first
// continues the one before. It may end early with an error; the files are of no use then.
//
// It is a recovery: what memory cannot hold is merged into the tree meanwhile.
func Restore(ctx context.Context, o Options, records func(apply func(c wal.Commit, continues bool) error) error) (_ Restored, err error) {
	o.setDefaults()
	if err := o.FS.MkdirAll(o.Dir); err != nil {
		return Restored{}, err
	}
	lock, err := o.FS.Lock(o.lockPath())
	if err != nil {
		return Restored{}, err
	}
	e := newEngine(&o, pin.NewRegistry(new(atomic.Uint64)), lock)
	defer func() { err = errors.Join(err, e.release()) }()
	if segments, err := wal.Segments(o.FS, o.Dir); err != nil || len(segments) > 0 {
		return Restored{}, errors.Join(err, fmt.Errorf("storage: %s has a log: nothing can be restored there", o.Dir))
	}
	if err := e.openTree(ctx); err != nil {
		return Restored{}, err
	}
	if err := e.writeRepaired(); err != nil {
		return Restored{}, err
	}
	e.useFeatureLevel()
	state := e.pager.State()
	r := replayer{ctx: ctx, engine: e, root: rootOf(state), after: state.Epoch, newest: state.Epoch, term: termOf(&state), commitTime: commitTime(&state), segments: []wal.SegmentInfo{}}
	if err := r.restore(records); err != nil {
		return Restored{}, errors.Join(err, r.free())
	}
	return e.beginLineage(&r)
}

// restore merges records into the tree.
func (r *replayer) restore(records func(apply func(c wal.Commit, continues bool) error) error) error {
	err := records(func(c wal.Commit, continues bool) error {
		if continues != (c.Epoch == r.newest) || c.Epoch < r.newest {
			return fmt.Errorf("storage: epoch %d is restored after epoch %d", c.Epoch, r.newest)
		}
		r.continues = continues
		return r.apply(c)
	})
	if err != nil {
		return err
	}
	state := r.engine.pager.State()
	if parts := logProof(&state).Durable; r.newest < parts { // a merge in steps was under way
		return fmt.Errorf("storage: the data file has parts of commits up to epoch %d, and nothing after epoch %d is restored", parts, r.newest)
	}
	if r.seal(r.newest + 1); len(r.filled) == 0 {
		return nil
	}
	return r.merge()
}

// beginLineage makes the state that was restored that of a store of its own. Both superblocks get it. At the oldest feature level a store has no
// lineage, but an identity.
func (e *Engine) beginLineage(r *replayer) (out Restored, err error) {
	_, _ = rand.Read(out.StoreID[:]) // never fails: it ends the program instead
	state := e.pager.State()
	state.Epoch = r.newest
	setEpochHistory(&state, r.term, r.commitTime)
	if featureLevel(&state) > keys.FeatureLevelOldest {
		_, _ = rand.Read(out.Lineage[:])
		setNewLineage(&state, out.Lineage)
	}
	e.pager.SetStoreID(out.StoreID)
	for range 2 {
		if err := e.commitState(state); err != nil {
			return out, fmt.Errorf("begin a lineage: %w", err)
		}
	}
	if err := wal.Begin(e.fs, e.options.Dir, state.Epoch, r.term, logProof(&state).Lineage); err != nil {
		return out, err
	}
	out.Epoch, out.Checkpoints = state.Epoch, r.merges
	if at := commitTime(&state); at != 0 {
		out.CommitTime = time.UnixMicro(int64(at))
	}
	return out, nil
}
