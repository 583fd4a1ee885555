package storage

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/storage/pager"
)

const (
	// mergeSyncBytes is how much a merge writes before it is synced. With one sync after the merge,
	// the device was idle during the merge and the processors during the sync, a fifth of a load of
	// 2 million keys; and commits to the log waited for all that was written at once.
	mergeSyncBytes = 16 << 20
	// mergeSyncEvery is how often the goroutine looks how much was written.
	mergeSyncEvery = 10 * time.Millisecond
)

// syncWhile begins to sync what is written, and does so until stop is called, which returns the first
// error. The caller syncs the rest.
func (e *Engine) syncWhile(ctx context.Context, ck *pager.Checkpoint) (stop func() error) {
	done, result := make(chan struct{}), make(chan error, 1)
	go func() { result <- e.runSyncs(ctx, ck, done) }()
	return func() error {
		close(done)
		return <-result
	}
}

func (e *Engine) runSyncs(ctx context.Context, ck *pager.Checkpoint, done <-chan struct{}) error {
	ticker := time.NewTicker(mergeSyncEvery)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return nil
		case <-ticker.C:
		}
		if e.pager.BytesUnsynced() < mergeSyncBytes {
			continue
		}
		if err := ck.Sync(ctx); err != nil {
			return err
		}
	}
}
