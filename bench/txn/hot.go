package txn

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Counters that the figures are about.
const (
	grownMiB     = "MiB grown"
	restVersions = "versions at rest"
	restSeconds  = "s to rest"
)

// hot overwrites one key, with or without a snapshot of its first version open.
type hot struct{ held bool }

// watchEvery is how often the size of the memtable is looked at: often enough to see a chain run away, which takes milliseconds.
const watchEvery = 2 * time.Millisecond

var hotKeyName, hotFirst = []byte("hot"), []byte("the first value")

func (h hot) run(r *harness.Run) (err error) {
	store, err := open(r.Dir, ablation.Baseline{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	writer, err := store.Session()
	if err != nil {
		return err
	}
	defer writer.Close()
	reader, err := store.Session()
	if err != nil {
		return err
	}
	defer reader.Close()
	if err := put(writer, hotFirst); err != nil {
		return err
	}
	if h.held {
		if _, err := reader.OpenSnapshot(0); err != nil {
			return err
		}
	}
	before := store.Stats().Storage.Generations[0].MemtableBytes // the index included, which is laid out for a full table
	stop := watch(store)
	value := make([]byte, 100)
	err = r.Time(r.Size, func() error {
		for n := range r.Size {
			binary.LittleEndian.PutUint64(value, uint64(n))
			if err := put(writer, value); err != nil {
				return err
			}
		}
		return nil
	})
	peak := stop()
	if err != nil {
		return err
	}
	r.Count(grownMiB, float64(peak.bytes-before)/(1<<20))
	r.Count("versions under load", float64(peak.versions))
	if err := h.checkSnapshot(reader); err != nil {
		return err
	}
	reader.CloseSnapshot()
	if err := rest(r, store); err != nil {
		return err
	}
	v, err := reader.Get(nil, hotKeyName, 0)
	if err != nil || !bytes.Equal(v.Data, value) {
		return errors.Join(err, r.Verified(0, 1))
	}
	return r.Verified(1, 1)
}

func put(x *mvcc.Session, value []byte) error {
	t, err := x.Begin(mvcc.TxnOptions{Isolation: mvcc.IsolationSnapshot, Durability: mvcc.DurabilityAsync})
	if err == nil {
		err = t.Set(hotKeyName, value)
	}
	if err == nil {
		_, err = t.Commit(context.Background())
	}
	return err
}

// checkSnapshot makes sure that an old snapshot reads its value still.
func (h hot) checkSnapshot(reader *mvcc.Session) error {
	if !h.held {
		return nil
	}
	v, err := reader.Read(nil, hotKeyName)
	if err == nil && !bytes.Equal(v.Data, hotFirst) {
		err = fmt.Errorf("the old snapshot reads %q", v.Data)
	}
	return err
}

// sizes are the largest that one generation was seen to have.
type sizes struct{ bytes, versions int64 }

// watch samples the memtables until the returned function is called, which tells the peak.
func watch(store *mvcc.Store) func() sizes {
	stop, peak := make(chan struct{}), make(chan sizes)
	go func() {
		var most sizes
		tick := time.NewTicker(watchEvery)
		defer tick.Stop()
		for {
			for _, g := range store.Stats().Storage.Generations {
				most.bytes, most.versions = max(most.bytes, g.MemtableBytes), max(most.versions, g.Versions)
			}
			select {
			case <-stop:
				peak <- most
				return
			case <-tick.C:
			}
		}
	}()
	return func() sizes {
		close(stop)
		return <-peak
	}
}

// rest waits until the collector has nothing left to do with the active memtable, and counts how long that took and what remained.
func rest(r *harness.Run, store *mvcc.Store) error {
	began := time.Now()
	var left int64
	for {
		generations := store.Stats().Storage.Generations
		left = generations[len(generations)-1].Versions // immutable generations are left to checkpoints
		if left <= 2*64 || time.Since(began) > 3*time.Second {
			break
		}
		time.Sleep(time.Millisecond)
	}
	r.Count(restSeconds, time.Since(began).Seconds())
	r.Count(restVersions, float64(left))
	if err := store.Checkpoint(r); err != nil {
		return err
	}
	s := store.Stats().Storage
	dropped := s.Pruning.Pruned + s.Checkpoints.VersionsDropped // by a checkpoint, of generations that became immutable when the log was rotated
	return r.Prove("versions dropped", float64(dropped), float64(r.Size)-3*64, float64(r.Size))
}
