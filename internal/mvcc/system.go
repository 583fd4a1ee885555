package mvcc

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
)

// ScanSystem visits the records of the store with keys in [lower, upper), in key order, in a snapshot of its own. Keys are
// without their keyspace; key and value are valid until visit returns, which reports whether to go on. A nil upper is
// the end of the keyspace. A value that is stored outside of its leaf is empty: no record is that long.
func (x *Session) ScanSystem(ctx context.Context, lower, upper []byte, visit func(key, value []byte, epoch keys.Epoch) (more bool)) error {
	at, err := x.OpenSnapshot(0)
	if err != nil {
		return err
	}
	defer x.CloseSnapshot()
	from := keys.Append(nil, keys.SpaceSystem, lower)
	end := []byte{byte(keys.SpaceSystem) + 1}
	if upper != nil {
		end = keys.Append(nil, keys.SpaceSystem, upper)
	}
	for more := true; more; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if from, more, err = x.scanSystem(at, from, end, visit); err != nil {
			return err
		}
	}
	return nil
}

// scanSystem is one part of a ScanSystem: what is visited inside one guard. It returns where the next part begins.
func (x *Session) scanSystem(
	at keys.Epoch, from, end []byte, visit func(key, value []byte, epoch keys.Epoch) bool,
) (next []byte, more bool, err error) {
	x.slot.Enter()
	defer x.slot.Leave()
	c := &x.buffers.system
	x.reader.OpenCursor(c, at, from, end, 0)
	defer c.Close()
	steps := 0
	for c.SeekGE(from); c.Valid(); c.Next() {
		if v := c.Version(); v.Kind.HasValue() && !visit(keys.User(c.Key()), v.Inline(), v.Epoch) {
			return nil, false, nil
		}
		if steps++; steps == stepsPerGuard || c.Full() {
			return append(append(from[:0], c.Key()...), 0), true, nil
		}
	}
	if c.Paused() {
		return append(from[:0], c.Resume()...), true, nil
	}
	return nil, false, c.Err()
}
