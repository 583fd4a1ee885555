package workload

import (
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// Store is our engine with a session, for scenarios about what only it has.
type Store struct {
	*mvcc.Store
	Own *mvcc.Session
}

// OpenStore opens the engine and its session.
func OpenStore(o mvcc.Options) (*Store, error) {
	store, err := mvcc.Open(o)
	if err != nil {
		return nil, err
	}
	session, err := store.Session()
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return &Store{store, session}, nil
}

// Bulk loads the pairs in the given order past log and memtable.
func (s *Store) Bulk(ctx context.Context, d *Data, order []int) error {
	load, err := s.BeginBulkLoad()
	if err != nil {
		return err
	}
	value := make([]byte, d.ValueBytes)
	for _, i := range order {
		if err := load.Add(d.Key(i), d.Value(value, i)); err != nil {
			return errors.Join(err, load.Close())
		}
	}
	_, err = load.Commit(ctx)
	return errors.Join(err, load.Close())
}

// Close ends the session and closes the store.
func (s *Store) Close() error {
	s.Own.Close()
	return s.Store.Close()
}

// CountScan visits what a scan finds in the session's view, and counts it.
func CountScan(x *mvcc.Session, o mvcc.ScanOptions) (count int, err error) {
	cursor, err := x.Scan(o)
	if err != nil {
		return 0, err
	}
	defer cursor.Close()
	for cursor.Next() {
		count++
	}
	return count, cursor.Err()
}
