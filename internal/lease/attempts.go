package lease

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// A client whose request to acquire a lock has ended without an answer does not know whether it has the lock. Each request is an
// attempt with a number, and the attachment of a lock has the attempts that have been told its token. To undo an attempt removes it;
// the lock is released with the last one.
//
//	Acquire(1) ─► lock, attachment [1]     Acquire(2), same lease ─► attachment [1 2]
//	Undo(1)    ─► attachment [2]           Undo(2) ─► lock and attachment deleted
//
// An attempt that is undone before it is executed is remembered for a while, and refused. Undo notes the attempt in memory before
// it takes the latch of the lock, and Acquire looks there while it holds the latch: one of the two sees the other.

// ErrUndone means that an attempt to acquire a lock was undone.
var ErrUndone = errors.New("the request to acquire the lock was undone")

const (
	// UndoMax is how many attempts are undone at once.
	UndoMax = 64
	// attemptsMax bounds the attempts of an attachment. With more, the lock is as if an attempt had acquired it that cannot be
	// undone; that takes as many concurrent calls with one lease for one lock.
	attemptsMax = 8
)

// NewAttempt is a number for an attempt that has none.
func NewAttempt() uint64 { return rand.Uint64() | 1 }

// encodeAttempts is the value of a lock's attachment; nothing if there is an attempt that cannot be undone.
func encodeAttempts(numbers []uint64) (value []byte) {
	if len(numbers) > attemptsMax {
		return nil
	}
	for _, number := range numbers {
		value = binary.LittleEndian.AppendUint64(value, number)
	}
	return value
}

// decodeAttempts returns nil if there is an attempt that cannot be undone.
func decodeAttempts(value []byte) (numbers []uint64) {
	for ; len(value) >= 8; value = value[8:] {
		numbers = append(numbers, binary.LittleEndian.Uint64(value))
	}
	return numbers
}

// lockAttachment is the key of the attachment of a lock, without the keyspace.
func lockAttachment(id uint64, internal []byte) []byte {
	return keys.AppendOwned(nil, keys.SystemAttachment, id, internal)
}

// Undo undoes attempts of a lease to acquire a lock, whether they were executed, wait, or arrive later. It reports whether the lock
// was released; the epoch is that of the commit, and the answer may be sent once it is durable.
func (m *Manager) Undo(ctx context.Context, name []byte, id ID, attempts []uint64) (released bool, epoch keys.Epoch, err error) {
	if err := m.checkLock(name, nil); err != nil {
		return false, 0, err
	}
	m.locks.undo(name, id, attempts)
	x, err := m.store.SessionOf(ctx)
	if err != nil {
		return false, 0, err
	}
	defer x.Close()
	w, key, internal := lockWrite(name)
	w.Under(func(l *mvcc.Latched) error {
		released = false
		n, err := l.Newest(internal)
		if err != nil || !n.Found || n.Metadata.Lease != uint64(id) {
			return err
		}
		attachment := lockAttachment(uint64(id), internal)
		record, err := l.Newest(keys.Append(nil, keys.SpaceSystem, attachment))
		if err != nil {
			return err
		}
		all := decodeAttempts(record.Value)
		left := slices.DeleteFunc(slices.Clone(all), func(a uint64) bool { return slices.Contains(attempts, a) })
		switch {
		case len(left) == len(all):
		case len(left) > 0:
			l.Write().Batch.SetRecord(keys.SpaceSystem, attachment, encodeAttempts(left))
		default:
			released = true
			l.Write().Batch.DeleteRecord(keys.SpaceSystem, key)
			l.Write().Batch.DeleteRecord(keys.SpaceSystem, attachment)
		}
		return nil
	})
	if epoch, err = x.Commit(ctx, w); err != nil {
		return false, 0, err
	}
	if released {
		m.locks.changed(name, Held{}, epoch)
	}
	return released, max(epoch, x.Await()), nil
}
