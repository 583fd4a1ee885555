package storage

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/btree"
)

// TestBrokenTreeInvariantStopsTheStore: a second merge would break the same invariant, so writes end.
func TestBrokenTreeInvariantStopsTheStore(t *testing.T) {
	b := newBench(t)
	if err := b.engine.stopIfBroken(btree.ErrInputOrder); !errors.Is(err, btree.ErrInputOrder) || b.engine.Err() != nil {
		t.Fatalf("another error: %v, store: %v", err, b.engine.Err())
	}
	err := b.engine.stopIfBroken(fmt.Errorf("merge into the tree: %w", btree.ErrInvariant))
	if !errors.Is(err, btree.ErrInvariant) || !errors.Is(b.engine.Err(), ErrFailed) {
		t.Fatalf("a broken invariant: %v, store: %v", err, b.engine.Err())
	}
}
