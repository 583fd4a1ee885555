package growth

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
)

func open(dir string) (*workload.Store, error) {
	return workload.OpenStore(mvcc.Options{
		Durability: mvcc.DurabilityAsync, Limits: mvcc.Limits{Sessions: 16_384}, // more than there are snapshots
		Storage: storage.Options{Dir: dir, MemoryBytes: 4 << 30, CacheBytes: 64 << 20, MemtableBytes: 256 << 20, SegmentBytes: 64 << 20},
	})
}

// snapshotOp is what is done beside so many snapshots.
type snapshotOp uint8

const (
	getNewest snapshotOp = iota
	getOldest
	putNewest
)

// snapshotted overwrites a few keys once for each snapshot, so that every version is seen by one.
type snapshotted struct{ do snapshotOp }

const snapshotKeys = 64

func key(dst []byte, i int) []byte { return binary.BigEndian.AppendUint64(dst, uint64(i)) }

func (o snapshotted) run(r *harness.Run) (err error) {
	store, err := open(r.Dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	readers := make([]*mvcc.Session, r.Point)
	for i := range readers {
		if err := writeEach(store.Own, uint64(i)); err != nil {
			return err
		}
		if readers[i], err = store.Session(); err != nil {
			return err
		}
		defer readers[i].Close()
		if _, err := readers[i].OpenSnapshot(0); err != nil {
			return err
		}
	}
	versions := store.Stats().Storage.Generations[0].Versions
	if err := r.Prove("versions a key", float64(versions)/snapshotKeys, float64(r.Point), float64(r.Point)); err != nil {
		return err
	}
	var w mvcc.Write
	reads := func(v mvcc.Value, err error) ([]byte, bool, error) { return v.Data, v.Found, err }
	err = o.time(r, versioned{
		newest: func(dst, name []byte) ([]byte, bool, error) { return reads(store.Own.Get(dst, name, 0)) },
		oldest: func(dst, name []byte) ([]byte, bool, error) { return reads(readers[0].Read(dst, name)) },
		put: func(name, value []byte) error {
			w.Reset()
			w.Set(name, value)
			_, err := store.Own.Commit(context.Background(), &w)
			return err
		},
	})
	if err != nil {
		return err
	}
	right := 0
	for i, reader := range readers {
		v, err := reader.Read(nil, key(nil, i%snapshotKeys))
		if err != nil {
			return err
		}
		if v.Found && binary.LittleEndian.Uint64(v.Data) == uint64(i) {
			right++
		}
	}
	return r.Verified(right, len(readers))
}

// writeEach gives every key a version.
func writeEach(session *mvcc.Session, number uint64) error {
	var w mvcc.Write
	for i := range snapshotKeys {
		w.Set(key(nil, i), binary.LittleEndian.AppendUint64(nil, number))
	}
	_, err := session.Commit(context.Background(), &w)
	return err
}

// versioned is an engine with as many versions of each key as it has snapshots.
type versioned struct {
	newest, oldest func(dst, name []byte) (value []byte, found bool, err error)
	put            func(name, value []byte) error
}

func (o snapshotted) time(r *harness.Run, e versioned) error {
	return r.Time(r.Size, func() (err error) {
		choice := rand.New(rand.NewPCG(r.Seed, 1))
		var name, buffer []byte
		for n := range r.Size {
			name = key(name[:0], choice.IntN(snapshotKeys))
			found, want := true, uint64(0)
			switch o.do {
			case getNewest:
				want = uint64(r.Point - 1)
				buffer, found, err = e.newest(buffer[:0], name)
			case getOldest:
				buffer, found, err = e.oldest(buffer[:0], name)
			case putNewest:
				want = uint64(r.Point + n)
				buffer = binary.LittleEndian.AppendUint64(buffer[:0], want)
				err = e.put(name, buffer)
			}
			if err != nil {
				return err
			}
			if !found || binary.LittleEndian.Uint64(buffer) != want {
				return fmt.Errorf("key %x reads %x, want number %d", name, buffer, want)
			}
		}
		return nil
	})
}

// transacted reads and writes r.Point neighbouring keys in each transaction.
type transacted struct{ isolation mvcc.Isolation }

const transactedKeys = 100_000

func (o transacted) run(r *harness.Run) (err error) {
	store, err := open(r.Dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	count := max(r.Size/r.Point, 1)
	last := map[int]uint64{} // by the first key of a transaction's neighbours
	err = r.Time(count*r.Point, func() error {
		choice := rand.New(rand.NewPCG(r.Seed, 1))
		for n := range count {
			first := choice.IntN(transactedKeys/r.Point) * r.Point
			if err := o.transact(store.Own, first, r.Point, uint64(n)); err != nil {
				return err
			}
			last[first] = uint64(n)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := r.Prove("commits", float64(store.Stats().Commits), float64(count), float64(count)); err != nil {
		return err
	}
	right := 0
	for first, n := range last {
		v, err := store.Own.Get(nil, key(nil, first+r.Point-1), 0)
		if err != nil {
			return err
		}
		if v.Found && binary.LittleEndian.Uint64(v.Data) == n {
			right++
		}
	}
	return r.Verified(right, len(last))
}

func (o transacted) transact(session *mvcc.Session, first, count int, number uint64) error {
	t, err := session.Begin(mvcc.TxnOptions{Isolation: o.isolation, Durability: mvcc.DurabilityAsync})
	if err != nil {
		return err
	}
	var name, value [8]byte
	var buffer [16]byte
	binary.LittleEndian.PutUint64(value[:], number)
	for i := range count {
		binary.BigEndian.PutUint64(name[:], uint64(first+i))
		if _, err := t.Get(buffer[:0], name[:]); err != nil {
			return err
		}
		if err := t.Set(name[:], value[:]); err != nil {
			return err
		}
	}
	_, err = t.Commit(context.Background())
	return err
}
