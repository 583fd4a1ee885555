package lease

import (
	"bytes"
	"context"
	"errors"
	"runtime"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
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
	return m.held(ctx, id, afterKey(id, after), limit, userKey, nil)
}

// afterKey is the attachment of a key to a lease; without a key it is before all of them, after the locks.
func afterKey(id ID, key []byte) []byte {
	internal := []byte{byte(keys.SpaceUser)}
	if key != nil {
		internal = keys.Append(nil, keys.SpaceUser, key)
	}
	return keys.AppendOwned(nil, keys.SystemAttachment, uint64(id), internal)
}

func userKey(internal []byte) ([]byte, bool) { return keys.User(internal), true }

// ReadableKeys are Keys without those that a damaged page hides. A key of which only the attachment can be read is one of them.
func (m *Manager) ReadableKeys(ctx context.Context, id ID, after []byte, limit int) (found [][]byte, more bool, await keys.Epoch, err error) {
	return m.held(ctx, id, afterKey(id, after), limit, userKey, skipHidden)
}

// Locks are names of locks that a lease holds, like Keys.
func (m *Manager) Locks(ctx context.Context, id ID, after []byte, limit int) (found [][]byte, more bool, await keys.Epoch, err error) {
	return m.held(ctx, id, afterLock(id, after), limit, lockName, nil)
}

// afterLock is the attachment of a lock to a lease; without a name it is before all of them.
func afterLock(id ID, name []byte) []byte {
	if name == nil {
		return nil
	}
	return lockAttachment(uint64(id), keys.Append(nil, keys.SpaceSystem, lockKey(name)))
}

// ReadableLocks are Locks as ReadableKeys are Keys.
func (m *Manager) ReadableLocks(ctx context.Context, id ID, after []byte, limit int) (found [][]byte, more bool, await keys.Epoch, err error) {
	return m.held(ctx, id, afterLock(id, after), limit, lockName, skipHidden)
}

func skipHidden(_, _ []byte, _ error) {}

// held are what name returns for up to limit internal keys that belong to a lease, after an attachment, until name returns false. Damage is an error, unless
// it is told to hidden; then a key of which the newest version cannot be read belongs to the lease.
func (m *Manager) held(
	ctx context.Context, id ID, after []byte, limit int, name func(internal []byte) ([]byte, bool), hidden func(lower, upper []byte, err error),
) (found [][]byte, more bool, await keys.Epoch, err error) {
	x, err := m.store.SessionOf(ctx)
	if err != nil {
		return nil, false, 0, err
	}
	defer x.Close()
	for size := 0; ; {
		step, stepMore, err := m.attachments(ctx, x, id, after, limit-len(found), min(m.options.StepBytes, keysBytesMax), hidden)
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
			damaged := hidden != nil && errors.Is(err, mvcc.ErrDamaged)
			if err != nil && !damaged {
				return nil, false, 0, err
			}
			if damaged || belongs(&n, id) {
				found, size = append(found, bytes.Clone(named)), size+len(internal)
			}
			after = attachment
		}
		if !stepMore || len(found) >= limit || size >= keysBytesMax {
			return found, stepMore, x.Await(), nil
		}
	}
}
