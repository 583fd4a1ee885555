package engines

import (
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

type epochEngine struct {
	store      *mvcc.Store
	files      *vfs.OS
	durability mvcc.Durability
}

// EpochKV opens our engine, without the server around it.
func EpochKV(o Options) (Engine, error) {
	o.setDefaults()
	files, err := vfs.OpenOS(vfs.IOAuto)
	if err != nil {
		return nil, err
	}
	baseline, err := ablation.New(ablation.Baseline{OneMutex: o.OneMutex})
	if err != nil {
		return nil, errors.Join(err, files.Close())
	}
	options := storage.Options{
		Dir: o.Dir, FS: files, MemoryBytes: o.CacheBytes + o.Buffers*o.BufferBytes, CacheBytes: o.CacheBytes, MemtableBytes: o.Memtable, SegmentBytes: o.Memtable,
		Ablation: baseline,
	}
	if o.Direct {
		options.DataFS = files.Direct()
	}
	store, err := mvcc.Open(mvcc.Options{Storage: options})
	if err != nil {
		return nil, errors.Join(err, files.Close())
	}
	e := &epochEngine{store: store, files: files, durability: mvcc.DurabilityAsync}
	if o.Sync {
		e.durability = mvcc.DurabilitySync
	}
	return e, nil
}

func (e *epochEngine) Session() (Session, error) {
	session, err := e.store.Session()
	return &epochSession{engine: e, session: session}, err
}

// One checkpoint merges everything that was written into the tree.
func (e *epochEngine) Settle() error { return e.store.Checkpoint(context.Background()) }

func (e *epochEngine) Counters() map[string]float64 {
	s := e.store.Stats()
	inMemtables := 0.0
	for _, g := range s.Storage.Generations {
		inMemtables += float64(g.Keys)
	}
	return map[string]float64{
		"commits": float64(s.Commits), "rotations": float64(s.Storage.Rotations), "log syncs": float64(s.Storage.Log.Syncs),
		"log records": float64(s.Storage.Log.Records), "keys in memtables": inMemtables, "keys in tree": float64(s.Storage.Tree.Entries),
	}
}

func (e *epochEngine) Close() error { return errors.Join(e.store.Close(), e.files.Close()) }

type epochSession struct {
	engine  *epochEngine
	session *mvcc.Session
	write   mvcc.Write
}

func (s *epochSession) Close() error {
	s.session.Close()
	return nil
}

func (s *epochSession) Put(key, value []byte) error {
	s.write.Reset()
	s.write.Set(key, value)
	return s.commit()
}

func (s *epochSession) PutAll(keys, values [][]byte) error {
	s.write.Reset()
	for i := range keys {
		s.write.Set(keys[i], values[i])
	}
	return s.commit()
}

// commit returns when the commit may be acknowledged.
func (s *epochSession) commit() error {
	s.write.Durability = s.engine.durability
	epoch, err := s.session.Commit(context.Background(), &s.write)
	if err != nil {
		return err
	}
	return s.engine.store.Wait(context.Background(), epoch, s.engine.durability)
}

func (s *epochSession) Get(dst, key []byte) ([]byte, bool, error) {
	v, err := s.session.Get(dst, key, 0)
	return v.Data, v.Found, err
}

func (s *epochSession) Scan(dst, start []byte, limit int) (int, error) {
	if _, err := s.session.OpenSnapshot(0); err != nil {
		return 0, err
	}
	defer s.session.CloseSnapshot()
	cursor, err := s.session.Scan(mvcc.ScanOptions{Lower: start, Limit: limit})
	if err != nil {
		return 0, err
	}
	defer cursor.Close()
	count := 0
	for count < limit && cursor.Next() {
		dst = append(append(dst[:0], cursor.Key()...), cursor.Value()...)
		count++
	}
	return count, cursor.Err()
}
