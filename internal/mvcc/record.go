package mvcc

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
)

// NewestVersion reads the newest version of an internal key, with a copy of its value if it is a record of the store: those of clients may be
// large, and nothing counts them here. The answer is linearizable. It may be sent once what Await returns is durable.
func (x *Session) NewestVersion(ctx context.Context, internal []byte) (n Newest, err error) {
	err = x.underLatch(ctx, internal, func() error {
		x.slot.Enter()
		defer x.slot.Leave()
		v, ok, err := x.reader.Newest(internal)
		if err != nil || !ok {
			return ofKey(err, internal)
		}
		x.reveals(v.Sync, v.Epoch)
		if n.Epoch, n.Found = v.Epoch, v.Kind.HasValue(); !n.Found {
			return nil
		}
		if n.Metadata, err = v.Metadata(); err == nil && keys.SpaceOf(internal) == keys.SpaceSystem {
			n.Value, err = x.reader.AppendValue(nil, v)
		}
		return err
	})
	return n, err
}

// AwaitCommitted returns when all commits that have held the latch of an internal key so far are visible.
func (x *Session) AwaitCommitted(ctx context.Context, internal []byte) error {
	return x.underLatch(ctx, internal, func() error {
		x.committing.revealed = max(x.committing.revealed, x.store.latches.newest(&x.committing.held))
		return nil
	})
}

// underLatch calls read while it holds the latch of an internal key, and then waits until what read has revealed is visible.
func (x *Session) underLatch(ctx context.Context, internal []byte, read func() error) error {
	x.committing.held.reset()
	x.committing.held.add(x.store.latches, internal)
	if err := x.store.latches.lock(ctx, &x.committing.held, x.parker); err != nil {
		return err
	}
	err := read()
	x.unlock()
	return x.finish(ctx, err)
}

// KeyBytesMax is the longest key that clients may use.
func (s *Store) KeyBytesMax() int { return s.options.Limits.KeyBytes }
