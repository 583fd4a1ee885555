package engines

import (
	"errors"

	"github.com/dgraph-io/badger/v4"
)

type badgerEngine struct{ db *badger.DB }

// Badger opens Badger v4. Compression is off, as in the other engines' settings here; the rest is default.
func Badger(o Options) (Engine, error) {
	o.setDefaults()
	options := badger.DefaultOptions(o.Dir).WithLogger(nil).WithSyncWrites(o.Sync).WithMemTableSize(o.BufferBytes).
		WithBlockCacheSize(o.CacheBytes).WithCompression(0)
	db, err := badger.Open(options)
	if err != nil {
		return nil, err
	}
	return &badgerEngine{db}, nil
}

func (e *badgerEngine) Session() (Session, error)    { return &badgerSession{e}, nil }
func (e *badgerEngine) Counters() map[string]float64 { return nil }

// The levels below the write buffer are merged into one; Badger offers no way to flush the buffer itself.
func (e *badgerEngine) Settle() error { return e.db.Flatten(2) }

func (e *badgerEngine) Close() error { return e.db.Close() }

type badgerSession struct{ *badgerEngine }

func (s *badgerSession) Close() error { return nil }

func (s *badgerSession) Put(key, value []byte) error {
	// Badger keeps what it is given until the commit, and its value log even longer.
	return s.db.Update(func(txn *badger.Txn) error {
		return txn.Set(append([]byte(nil), key...), append([]byte(nil), value...))
	})
}

func (s *badgerSession) PutAll(keys, values [][]byte) error {
	return s.db.Update(func(txn *badger.Txn) error {
		for i := range keys {
			if err := txn.Set(append([]byte(nil), keys[i]...), append([]byte(nil), values[i]...)); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *badgerSession) Get(dst, key []byte) (value []byte, found bool, err error) {
	err = s.db.View(func(txn *badger.Txn) error {
		item, err := txn.Get(key)
		if err != nil {
			return err
		}
		return item.Value(func(v []byte) error {
			dst = append(dst, v...)
			return nil
		})
	})
	if errors.Is(err, badger.ErrKeyNotFound) {
		return dst, false, nil
	}
	return dst, err == nil, err
}

func (s *badgerSession) Scan(dst, start []byte, limit int) (count int, err error) {
	err = s.db.View(func(txn *badger.Txn) error {
		options := badger.DefaultIteratorOptions
		options.PrefetchSize = min(limit, options.PrefetchSize)
		it := txn.NewIterator(options)
		defer it.Close()
		for it.Seek(start); it.Valid() && count < limit; it.Next() {
			item := it.Item()
			dst = append(dst[:0], item.Key()...)
			if err := item.Value(func(v []byte) error { dst = append(dst, v...); return nil }); err != nil {
				return err
			}
			count++
		}
		return nil
	})
	return count, err
}
