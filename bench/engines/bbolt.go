package engines

import (
	"path/filepath"

	"go.etcd.io/bbolt"
)

var bboltBucket = []byte("b")

type bboltEngine struct{ db *bbolt.DB }

// Bbolt opens bbolt. Its free list is the map, which its users are advised to take for large files.
func Bbolt(o Options) (Engine, error) {
	db, err := bbolt.Open(filepath.Join(o.Dir, "bolt.db"), 0o600, &bbolt.Options{NoSync: !o.Sync, FreelistType: bbolt.FreelistMapType})
	if err != nil {
		return nil, err
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(bboltBucket)
		return err
	})
	return &bboltEngine{db}, err
}

func (e *bboltEngine) Session() (Session, error)    { return &bboltSession{e}, nil }
func (e *bboltEngine) Counters() map[string]float64 { return nil }

// bbolt has no write buffer, so there is nothing to do.
func (e *bboltEngine) Settle() error { return nil }

func (e *bboltEngine) Close() error { return e.db.Close() }

type bboltSession struct{ *bboltEngine }

func (s *bboltSession) Close() error { return nil }

func (s *bboltSession) Put(key, value []byte) error {
	return s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bboltBucket).Put(key, value) })
}

func (s *bboltSession) PutAll(keys, values [][]byte) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bboltBucket)
		for i := range keys {
			if err := b.Put(keys[i], values[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *bboltSession) Get(dst, key []byte) (value []byte, found bool, err error) {
	err = s.db.View(func(tx *bbolt.Tx) error {
		v := tx.Bucket(bboltBucket).Get(key)
		dst, found = append(dst, v...), v != nil
		return nil
	})
	return dst, found, err
}

func (s *bboltSession) Scan(dst, start []byte, limit int) (count int, err error) {
	err = s.db.View(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bboltBucket).Cursor()
		for k, v := c.Seek(start); k != nil && count < limit; k, v = c.Next() {
			dst = append(append(dst[:0], k...), v...)
			count++
		}
		return nil
	})
	return count, err
}
