package mvcc

import (
	"context"

	"github.com/epochkv/epochkv/internal/storage/inspect"
)

// Verify checks the newest durable state of the files while the store works. See inspect.Verify.
func (s *Store) Verify(ctx context.Context, o inspect.VerifyOptions) (*inspect.VerifyReport, error) {
	if s.lifecycle.closing.Load() {
		return nil, ErrClosed
	}
	return inspect.Verify(ctx, s.engine, o)
}

// Space reads the tree of the newest durable state and sums up its keys by prefix.
func (s *Store) Space(ctx context.Context, o inspect.SpaceOptions) (*inspect.SpaceReport, error) {
	if s.lifecycle.closing.Load() {
		return nil, ErrClosed
	}
	return inspect.Space(ctx, s.engine, o)
}
