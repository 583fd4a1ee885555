package lease

import (
	"bytes"
	"context"
	"runtime"

	"github.com/epochkv/epochkv/internal/keys"
)

// checkLive refuses a lease that has ended or is being revoked. The caller holds the latch of the lease.
func (m *Manager) checkLive(id ID) error { return m.admit(id, 0) }

// admit is checkLive for a commit that attaches so many keys to the lease.
func (m *Manager) admit(id ID, keys int) error {
	e, err := m.find(id)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.revoking {
		return &Error{ID: id, Err: ErrRevoking}
	}
	return m.admitKeysLocked(e, keys)
}

// keysBytesMax bounds the keys of one answer.
const keysBytesMax = 1 << 20

// keysPerTurn is how many keys are read in a row, before others run.
const keysPerTurn = 128

// Keys are up to limit user keys that are attached to a lease, in order, after a key, but not many more bytes than
// keysBytesMax; more says that there may be others.
// The answer may be sent once await is durable.
func (m *Manager) Keys(ctx context.Context, id ID, after []byte, limit int) (found [][]byte, more bool, await keys.Epoch, err error) {
	if after != nil {
		after = keys.AppendOwned(nil, keys.SystemAttachment, uint64(id), keys.Append(nil, keys.SpaceUser, after))
	} else { // after the locks
		after = keys.AppendOwned(nil, keys.SystemAttachment, uint64(id), []byte{byte(keys.SpaceUser)})
	}
	return m.held(ctx, id, after, limit, func(internal []byte) ([]byte, bool) { return keys.User(internal), true })
}

// Locks are names of locks that a lease holds, like Keys.
func (m *Manager) Locks(ctx context.Context, id ID, after []byte, limit int) (found [][]byte, more bool, await keys.Epoch, err error) {
	if after != nil {
		after = lockAttachment(uint64(id), keys.Append(nil, keys.SpaceSystem, lockKey(after)))
	}
	return m.held(ctx, id, after, limit, lockName)
}

// held are what name returns for up to limit internal keys that belong to a lease, after an attachment, until name returns false.
func (m *Manager) held(
	ctx context.Context, id ID, after []byte, limit int, name func(internal []byte) ([]byte, bool),
) (found [][]byte, more bool, await keys.Epoch, err error) {
	x, err := m.store.SessionOf(ctx)
	if err != nil {
		return nil, false, 0, err
	}
	defer x.Close()
	for size := 0; ; {
		step, stepMore, err := m.attachments(ctx, x, id, after, limit-len(found), min(m.options.StepBytes, keysBytesMax), nil)
		if err != nil {
			return nil, false, 0, err
		}
		for i, attachment := range step {
			if i%keysPerTurn == keysPerTurn-1 { // a walk over a lease with many keys waits for nothing
				runtime.Gosched()
			}
			internal := attached(attachment)
			named, ok := name(internal)
			if !ok {
				return found, false, x.Await(), nil
			}
			n, err := x.NewestVersion(ctx, internal)
			if err != nil {
				return nil, false, 0, err
			}
			if belongs(&n, id) {
				found, size = append(found, bytes.Clone(named)), size+len(internal)
			}
			after = attachment
		}
		if !stepMore || len(found) >= limit || size >= keysBytesMax {
			return found, stepMore, x.Await(), nil
		}
	}
}
