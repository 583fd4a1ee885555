package engines

import (
	"bytes"
	"context"
	"errors"
	"runtime"

	"github.com/cockroachdb/pebble/v2"
)

type pebbleEngine struct {
	db    *pebble.DB
	write *pebble.WriteOptions
}

// Pebble opens Pebble v2. Beyond the shared settings it may run compactions on every core and stalls writers later
// than by default, which helps it: its default memtable is 4 MiB. Compression is off, as in the other engines: the workloads' values are
// mostly one filler, which would make its files a quarter of their size, and of anybody's real ones.
func Pebble(o Options) (Engine, error) {
	o.setDefaults()
	cache := pebble.NewCache(o.CacheBytes)
	defer cache.Unref()
	options := &pebble.Options{
		Cache: cache, MemTableSize: uint64(o.BufferBytes), MemTableStopWritesThreshold: int(o.Buffers),
		L0CompactionThreshold: 4, L0StopWritesThreshold: 24,
		CompactionConcurrencyRange: func() (lower, upper int) { return 1, runtime.GOMAXPROCS(0) },
		Logger:                     quiet{},
	}
	options.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return pebble.DBCompressionNone })
	db, err := pebble.Open(o.Dir, options)
	if err != nil {
		return nil, err
	}
	e := &pebbleEngine{db: db, write: pebble.NoSync}
	if o.Sync {
		e.write = pebble.Sync
	}
	return e, nil
}

// quiet drops Pebble's log of its background work; errors come back from its calls.
type quiet struct{}

func (quiet) Infof(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}

// Fatalf must not return: Pebble calls it where it cannot go on.
func (quiet) Fatalf(format string, _ ...any) { panic("pebble: " + format) }

func (e *pebbleEngine) Session() (Session, error) { return &pebbleSession{e}, nil }

func (e *pebbleEngine) Counters() map[string]float64 {
	m := e.db.Metrics()
	return map[string]float64{"flushes": float64(m.Flush.Count), "compactions": float64(m.Compact.Count)}
}

// Everything is flushed and compacted to the last level, from which Pebble reads fastest.
func (e *pebbleEngine) Settle() error {
	return errors.Join(e.db.Flush(), e.db.Compact(context.Background(), []byte{0}, bytes.Repeat([]byte{0xff}, 32), true))
}

func (e *pebbleEngine) Close() error { return e.db.Close() }

// Snapshot implements Snapshots.
func (e *pebbleEngine) Snapshot() Snapshot { return pebbleSnapshot{e.db.NewSnapshot()} }

type pebbleSnapshot struct{ *pebble.Snapshot }

func (s pebbleSnapshot) Get(dst, key []byte) ([]byte, bool, error) {
	return pebbleGet(s.Snapshot, dst, key)
}

type pebbleSession struct{ *pebbleEngine }

func (s *pebbleSession) Close() error { return nil }

func (s *pebbleSession) Put(key, value []byte) error { return s.db.Set(key, value, s.write) }

func (s *pebbleSession) PutAll(keys, values [][]byte) error {
	b := s.db.NewBatch()
	for i := range keys {
		if err := b.Set(keys[i], values[i], nil); err != nil {
			return errors.Join(err, b.Close())
		}
	}
	return errors.Join(b.Commit(s.write), b.Close())
}

func (s *pebbleSession) Get(dst, key []byte) ([]byte, bool, error) { return pebbleGet(s.db, dst, key) }

func pebbleGet(from pebble.Reader, dst, key []byte) ([]byte, bool, error) {
	value, closer, err := from.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return dst, false, nil
	}
	if err != nil {
		return dst, false, err
	}
	dst = append(dst, value...)
	return dst, true, closer.Close()
}

func (s *pebbleSession) Scan(dst, start []byte, limit int) (int, error) {
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: start})
	if err != nil {
		return 0, err
	}
	count := 0
	for ok := it.First(); ok && count < limit; ok = it.Next() {
		dst = append(append(dst[:0], it.Key()...), it.Value()...)
		count++
	}
	return count, it.Close()
}
