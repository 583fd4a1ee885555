package blob

import "fmt"

// Assertions of a batch. They are in all builds, and stop the store before the checkpoint commits.

// noteBroken records the first invariant that is found broken; Finish returns it.
func (b *Batch) noteBroken(format string, args ...any) {
	if b.broken == nil {
		b.broken = fmt.Errorf("%w: %w", ErrAccounts, fmt.Errorf(format, args...))
	}
}

// check compares the accounts of a batch that is about to be stored with each other.
func (b *Batch) check() error {
	for id, p := range b.changes {
		if p == locationQueued {
			b.noteBroken("fragment %d is still queued and has no page", id)
		}
	}
	ids := b.state.Blobs + uint64(b.dropped.count)
	for _, d := range b.s.dropped {
		ids += uint64(d.count())
	}
	if used := uint64(b.s.used.Count()); used != ids {
		b.noteBroken("%d blob ids are in use, and blobs have %d live and dropped ones", used, ids)
	}
	return b.broken
}
