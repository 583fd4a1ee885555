package mvcc

import "github.com/epochkv/epochkv/internal/storage"

// prune queues the version chains that the session's last commit made long for the collector, and returns the length
// of the longest. A writer prunes a chain itself once the chain has twice the length at which it is queued.
//
// It runs after the commit is marked as installed, inside the session's guard.
func (x *Session) prune() (longest int) {
	if x.baseline.prune(x) {
		return 0
	}
	s := x.store
	if longest = s.engine.QueueLongChains(&x.committing.writer); longest >= storage.AssistLength {
		s.engine.PruneLongChains(&x.committing.writer, storage.AssistLength)
	}
	return longest
}
