package mvcc

import (
	"context"

	"github.com/epochkv/epochkv/internal/storage"
)

// Shortage is nil, or says that the disk is full, since when, and that only deletions are accepted.
func (s *Store) Shortage() *storage.ShortageError { return s.engine.Shortage() }

// DiskFull is Shortage as an error.
func (s *Store) DiskFull() error {
	if short := s.engine.Shortage(); short != nil {
		return short
	}
	return nil
}

// admit refuses a commit that needs space while the disk is full. Deletions have a reserve.
func (s *Store) admit(w *Write) error {
	if short := s.engine.Shortage(); short != nil && !w.frees() {
		return short
	}
	return nil
}

// frees reports whether the commit may take from the reserve of a full disk: it only deletes. The record by which a request is fenced off frees nothing.
func (w *Write) frees() bool { return w.Batch.OnlyDeletes() && !w.fence }

// awaitSpace is admit before a new memtable begins. It waits first for the check of the disk
// reserve.
func (s *Store) awaitSpace(ctx context.Context, writer *storage.Writer, w *Write) error {
	if !w.frees() {
		if err := s.engine.AwaitReserve(ctx, writer, w.body); err != nil {
			return err
		}
	}
	return s.admit(w)
}
