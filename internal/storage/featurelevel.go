package storage

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/wal"
)

// The feature level of a store says which formats it writes. The superblock has it: so the level is durable before anything
// is written in its formats, and a program that does not know it refuses the store before it reads anything else.

// dataFormats are the versions of the data file's format by feature level.
var dataFormats = map[keys.FeatureLevel]uint32{
	keys.FeatureLevelOldest:  pager.FormatOldest,
	keys.FeatureLevelHistory: historyFormat,
}

// checkFeatureLevel refuses a state of a newer level.
func checkFeatureLevel(s *pager.State) error {
	if level := featureLevel(s); level > keys.FeatureLevelNewest {
		return fmt.Errorf("%w: feature level %d, this program knows up to %d", pager.ErrNewerFormat, level, keys.FeatureLevelNewest)
	}
	return nil
}

// created are the pager's options for a new store.
func (o *Options) created(options pager.Options, segments []wal.SegmentInfo) pager.Options {
	var state pager.State
	setFeatureLevel(&state, o.FeatureLevel, newLineage(segments))
	setSystemKeys(&state, 0)
	options.Format, options.Engine = state.Format, state.Engine
	return options
}

// newLineage draws a lineage. If a log exists without its data file, and begins at the first epoch, the store is made again
// from it: the new lineage begins like that of the log, because it names the same history.
func newLineage(segments []wal.SegmentInfo) (l keys.Lineage) {
	_, _ = rand.Read(l[:]) // never fails: it ends the program instead
	for i := range segments {
		if prefix, ok := segments[i].LineagePrefix(); ok {
			copy(l[:], prefix)
		}
	}
	return l
}

// FeatureLevel is the level of the store.
func (e *Engine) FeatureLevel() keys.FeatureLevel {
	return keys.FeatureLevel(e.checkpoints.featureLevel.Load())
}

// History names the history of a store and what the data file knows of it.
type History struct {
	Lineage    keys.Lineage // zero at the oldest feature level
	Parent     keys.Epoch   // of another lineage, at which this one began; zero if the store was created with it
	Term       keys.Term    // of the epoch of the newest durable state
	CommitTime time.Time    // the latest of all commits up to that epoch; zero if it is not known
}

// History is that of the newest durable state.
func (e *Engine) History() History {
	state := e.pager.State()
	return historyOf(&state)
}

func historyOf(state *pager.State) History {
	h := History{Lineage: lineageOf(state), Parent: parentEpoch(state), Term: termOf(state)}
	if at := commitTime(state); at != 0 {
		h.CommitTime = time.UnixMicro(int64(at))
	}
	return h
}

// RaiseFeatureLevel lets the store write the formats of a level, and returns when programs that do not know it refuse the
// store. Without an error the level is durable. A level that is not newer changes nothing.
func (e *Engine) RaiseFeatureLevel(ctx context.Context, level keys.FeatureLevel) error {
	if level > keys.FeatureLevelNewest {
		return fmt.Errorf("storage: feature level %d is not known", level)
	}
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return err
	}
	defer e.checkpoints.mu.Unlock()
	if level <= e.FeatureLevel() {
		return nil
	}
	state := e.pager.State()
	setFeatureLevel(&state, level, newLineage(nil))
	if err := e.countSystemKeys(&state); err != nil {
		return fmt.Errorf("raise the feature level: %w", err)
	}
	// Both superblocks have the level before anything else is written in its formats: if the newer one is lost with its copy,
	// the older one knows the lineage of the log, too.
	for range 2 {
		if err := e.commitState(state); err != nil {
			return fmt.Errorf("raise the feature level: %w", err)
		}
	}
	e.useFeatureLevel()
	return nil
}

// countSystemKeys counts the records of a store whose level is raised: it has one at most. Damage leaves their number unknown, and
// so do skipped pages, whose records are in the repair tree.
func (e *Engine) countSystemKeys(state *pager.State) error {
	root, _, err := repairTreeRoots(&e.pager.Reader)
	if err != nil || !root.Empty() {
		return err
	}
	var c btree.Cursor
	n := uint64(0)
	c.Reset(pagesource.WholeTree{Pager: &e.pager.Reader}, rootOf(*state), keys.MaxEpoch, nil, []byte{byte(keys.SpaceUser)})
	for ok := c.First(); ok; ok = c.Next() {
		if c.Version().Kind.HasValue() {
			n++
		}
	}
	if err := c.Err(); err != nil {
		if IsDamage(err) {
			return nil
		}
		return err
	}
	setSystemKeys(state, n)
	return nil
}

// useFeatureLevel lets the log write the formats of the data file's level.
func (e *Engine) useFeatureLevel() {
	state := e.pager.State()
	if e.log != nil {
		e.log.SetLineage(lineageOf(&state))
	}
	e.checkpoints.featureLevel.Store(uint32(featureLevel(&state)))
}
