package mvcc

import (
	"context"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// FeatureLevel is the level of the store: which formats it writes.
func (s *Store) FeatureLevel() keys.FeatureLevel { return s.engine.FeatureLevel() }

// History names the history of the store.
func (s *Store) History() storage.History { return s.engine.History() }

// FinalizeUpgrade raises the store to the newest feature level of this program, and returns the level before. From then on
// programs that do not know the level refuse the store. The level is a system record, durable before the files change; if
// they cannot be changed, the next start or the next call does it.
func (s *Store) FinalizeUpgrade(ctx context.Context) (before keys.FeatureLevel, err error) {
	before = s.FeatureLevel()
	if before == keys.FeatureLevelNewest {
		return before, nil
	}
	x, err := s.Session()
	if err != nil {
		return before, err
	}
	defer x.Close()
	w := &Write{Durability: DurabilitySync}
	w.Batch.Set(keys.SpaceSystem, []byte(keys.SystemFeatureLevel), keys.AppendFeatureLevel(nil, keys.FeatureLevelNewest))
	if _, err := x.commitDurably(ctx, w); err != nil {
		return before, err
	}
	return before, s.engine.RaiseFeatureLevel(ctx, keys.FeatureLevelNewest)
}

// adoptFeatureLevel refuses a store with the record of a newer level, and completes a FinalizeUpgrade that was interrupted.
// Nothing was written in the formats of a level before the data file had it, so a store that can be read is changed at most
// by the next FinalizeUpgrade if the level cannot be raised now.
func (s *Store) adoptFeatureLevel(ctx context.Context) error {
	s.probe.key = keys.Append(s.probe.key[:0], keys.SpaceSystem, []byte(keys.SystemFeatureLevel))
	value, found, _, err := s.probe.newestValue(&s.probe.buffers.invoked, 0, nil)
	if err != nil || !found { // a damaged page: the data file has the level, too
		return nil //nolint:nilerr // see above
	}
	level := keys.ReadFeatureLevel(value)
	if level > keys.FeatureLevelNewest {
		return fmt.Errorf("%w: feature level %d, this program knows up to %d", storage.ErrNewerFormat, level, keys.FeatureLevelNewest)
	}
	_ = s.engine.RaiseFeatureLevel(ctx, level)
	return nil
}
