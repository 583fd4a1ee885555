package mvcc

import (
	"context"

	"github.com/epochkv/epochkv/internal/storage"
)

// Verify checks the newest durable state of the files while the store works. See storage.Engine.Verify.
func (s *Store) Verify(ctx context.Context, o storage.VerifyOptions) (*storage.VerifyReport, error) {
	if s.closing.Load() {
		return nil, ErrClosed
	}
	return s.engine.Verify(ctx, o)
}

// Space reads the tree of the newest durable state and sums up its keys by prefix.
func (s *Store) Space(ctx context.Context, o storage.SpaceOptions) (*storage.SpaceReport, error) {
	if s.closing.Load() {
		return nil, ErrClosed
	}
	return s.engine.Space(ctx, o)
}
