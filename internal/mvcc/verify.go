package mvcc

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
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

// PinCopy pins the newest durable state for a copy, after a checkpoint if later commits exist. See storage.CopyState.
func (s *Store) PinCopy(ctx context.Context, lifetime time.Duration) (*storage.CopyState, error) {
	if s.lifecycle.closing.Load() {
		return nil, ErrClosed
	}
	if err := s.Checkpoint(ctx); err != nil {
		return nil, err
	}
	return s.engine.PinCopy(ctx, lifetime)
}
