package mvcc

import (
	"context"
	"errors"

	"epochkv/internal/storage"
	"epochkv/internal/storage/keys"
)

// ErrLoadBusy means that another bulk load is under way.
var ErrLoadBusy = storage.ErrLoadBusy

// errSerialLoad: the benchmark's baseline takes no latches, which a load relies on.
var errSerialLoad = errors.New("mvcc: no bulk load with SerialAppend")

// Load is a bulk load under way: everything in it becomes visible and durable at once, at one epoch, or not at all. How is described in
// storage/bulk.go. It is for one goroutine and not bounded by the limits of a batch.
type Load struct {
	store *Store
	load  *storage.Load
	key   []byte
}

// Loaded is the outcome of a load.
type Loaded struct {
	Epoch keys.Epoch
	Keys  uint64 // distinct ones
}

// BulkLoad begins a load. It ends with Close, which comes before the store's. There is one at a time: ErrLoadBusy.
func (s *Store) BulkLoad() (*Load, error) {
	if s.closing.Load() {
		return nil, ErrClosed
	}
	if err := s.engine.Err(); err != nil {
		return nil, err
	}
	if s.serial {
		return nil, errSerialLoad
	}
	load, err := s.engine.NewLoad()
	if err != nil {
		return nil, err
	}
	return &Load{store: s, load: load}, nil
}

// Add puts a key. Of several values of one key the last one counts. It keeps neither slice. Errors: *LimitError, ErrEmptyKey,
// and those of the file system, among them vfs.ErrNoSpace.
func (l *Load) Add(key, value []byte) error {
	if err := l.store.checkKey(key); err != nil {
		return err
	}
	if limit := l.store.limits.ValueBytes; len(value) > limit {
		return &LimitError{What: "value bytes", Limit: limit, Got: len(value)}
	}
	l.key = keys.Append(l.key[:0], keys.SpaceUser, key)
	return l.load.Add(l.key, value)
}

// Close ends the load. Without a Commit before, nothing of it has happened.
func (l *Load) Close() error { return l.load.Close() }

// Commit makes everything that was added visible and durable. An error means that nothing happened, unless it is ErrFailed: then only the
// next start knows. Commits that come in meanwhile wait for the merge.
func (l *Load) Commit(ctx context.Context) (Loaded, error) {
	n, err := l.load.Prepare(ctx)
	if err != nil || n == 0 {
		return Loaded{Epoch: l.store.Visible()}, err
	}
	// What is in memtables would be merged anyway; before the epoch is taken nobody has to wait for it.
	if err := l.store.Checkpoint(ctx); err != nil {
		return Loaded{}, err
	}
	epoch, err := l.reserve(ctx)
	if err != nil {
		return Loaded{}, err
	}
	err = l.publish(ctx, epoch)
	// In this order: who finds that no load is under way finds its outcome in the tree.
	l.store.loading.Store(0)
	l.store.horizon.done(epoch)
	if err != nil && !l.load.Published() {
		return Loaded{}, err
	}
	return Loaded{Epoch: epoch, Keys: n}, nil // visible: everything before it was, and done has moved visible over it
}

// publish merges the load. Its epoch is reserved.
func (l *Load) publish(ctx context.Context, epoch keys.Epoch) error {
	s := l.store
	if err := s.horizon.waitAlone(ctx, epoch-1); err != nil {
		return err
	}
	return s.engine.PublishLoad(ctx, l.load, storage.Horizon{Visible: epoch - 1, Live: s.collector.horizon()})
}

// reserve takes the load's epoch in a moment in which nobody holds a latch: no commit is between its check and its install.
func (l *Load) reserve(ctx context.Context) (keys.Epoch, error) {
	s := l.store
	for {
		if err := s.lockAll(ctx); err != nil {
			return 0, err
		}
		epoch, room, err := s.engine.ReserveLoad(l.load)
		s.loading.Store(uint64(epoch))
		if epoch != 0 {
			s.voids.Add(1)
		}
		s.unlockAll(epoch)
		if err != nil || room == nil {
			return epoch, err
		}
		select {
		case <-room:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// lockAll takes every latch, or none if the context ends before.
func (s *Store) lockAll(ctx context.Context) error {
	w := newWaiter()
	for i := range s.latches.table {
		if err := s.latches.table[i].lock(ctx, w); err != nil {
			for j := range i {
				s.latches.table[j].unlock()
			}
			return err
		}
	}
	return nil
}

// unlockAll gives the latches back, under which a load wrote at an epoch; zero if it did not.
func (s *Store) unlockAll(wrote keys.Epoch) {
	for i := range s.latches.table {
		stripe := &s.latches.table[i]
		stripe.newest = max(stripe.newest, wrote)
		stripe.unlock()
	}
}

// looks reports whether the commit reads before it writes.
func (w *Write) looks() bool { return len(w.Conditions) > 0 || w.firstWins || w.reads != nil }

// lock takes the latches of x.held, or none if the context ends before. Whoever will look at what is there before he writes, and will get an epoch behind a load's,
// must see the load: he waits for it, without latches. A load takes its epoch under every latch, so that none can start between this test
// and the commit.
func (x *Session) lock(ctx context.Context, looks bool) error {
	s := x.store
	if s.serial {
		s.serialMu.Lock()
		return nil // there are no loads
	}
	for {
		if err := s.latches.lock(ctx, &x.held, x.parker); err != nil || !looks {
			return err
		}
		epoch := s.loading.Load()
		if epoch == 0 {
			return nil
		}
		s.latches.unlock(&x.held)
		if err := s.horizon.wait(ctx, keys.Epoch(epoch), x.parker); err != nil {
			return err
		}
	}
}

// unlock ends what lock began.
func (x *Session) unlock() {
	if x.store.serial {
		x.store.serialMu.Unlock()
		return
	}
	x.store.latches.unlock(&x.held)
}
