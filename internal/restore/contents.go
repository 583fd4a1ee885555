package restore

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Checksums prove that a backup and an archive are what was written; they do not prove that it was the right thing. So a drill that is
// made beside the running store compares what a client sees of both, at one epoch.

// Contents sums up what a client sees of a store at an epoch. Two stores with the same contents have the same keys, with the same values,
// metadata and epochs.
type Contents struct {
	Epoch keys.Epoch
	// Until is up to which time deadlines are not compared: a key with such a deadline may have been deleted since.
	Until time.Time
	Keys  uint64
	Sum   [sha256.Size]byte
}

// ContentsError means that a restored store does not have what the original has.
type ContentsError struct{ Want, Got Contents }

func (e *ContentsError) Error() string {
	return fmt.Sprintf("the restored store differs from the original at epoch %d: it has %d keys with the checksum %x, and the original has %d keys with %x. "+
		"Every file was intact, so the archive or the restore has lost or changed a commit: keep the archive and the server's data, and report it", e.Want.Epoch, e.Got.Keys, e.Got.Sum[:8], e.Want.Keys, e.Want.Sum[:8])
}

// deadlineSlack is how long after the look at the original a key must live to be compared: the clock of a restored store begins at its
// newest commit, and goes on.
const deadlineSlack = time.Minute

// ContentsOf sums up a store at its newest epoch. It reads all keys, in a snapshot that keeps their versions meanwhile.
func ContentsOf(ctx context.Context, store *mvcc.Store) (Contents, error) {
	return contentsUntil(ctx, store, time.UnixMicro(int64(store.Clock().Now())).Add(deadlineSlack))
}

func contentsUntil(ctx context.Context, store *mvcc.Store, until time.Time) (c Contents, err error) {
	x, err := store.Session()
	if err != nil {
		return c, err
	}
	defer x.Close()
	c.Until = until
	if c.Epoch, err = x.OpenSnapshot(0); err != nil {
		return c, err
	}
	cursor, err := x.Scan(mvcc.ScanOptions{Context: ctx})
	if err != nil {
		return c, err
	}
	defer cursor.Close()
	h, buf := sha256.New(), []byte(nil)
	for cursor.Next() {
		m, err := cursor.Metadata()
		if err != nil {
			return c, err
		}
		if m.ExpiresAt != 0 && m.ExpiresAt <= uint64(until.UnixMilli()) {
			continue
		}
		key, value := cursor.Key(), cursor.Value()
		buf = binary.LittleEndian.AppendUint64(buf[:0], uint64(cursor.Epoch()))
		buf = append(binary.AppendUvarint(buf, uint64(len(key))), key...)
		buf = binary.AppendUvarint(m.Append(buf), uint64(len(value)))
		h.Write(buf) // never fails
		h.Write(value)
		c.Keys++
	}
	h.Sum(c.Sum[:0])
	return c, cursor.Err()
}

// compareContents compares a restored store with the original.
func compareContents(ctx context.Context, store *mvcc.Store, want *Contents) error {
	got, err := contentsUntil(ctx, store, want.Until)
	if err != nil {
		return fmt.Errorf("read the restored store: %w", err)
	}
	if got.Keys != want.Keys || got.Sum != want.Sum {
		return &ContentsError{Want: *want, Got: got}
	}
	return nil
}

// errOtherEpoch refuses a comparison that says nothing.
var errOtherEpoch = errors.New("restore: contents of one epoch are compared with another target")
