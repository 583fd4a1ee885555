package tree

import (
	"context"
	"errors"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Counters that the figures are about.
const (
	fileOverLive   = "file over live"
	memoryOverLive = "memtables over live"
	shrinkSeconds  = "s to shrink"
)

const (
	plateauRounds = 5
	// spaceGeneration is small against the data, as a memtable is against a database.
	spaceGeneration = 2 << 20
	spaceBatch      = 100
	// spaceKeysMin is the least load: less is nothing beside what an empty store takes.
	spaceKeysMin = 50_000
)

var spaceShape = workload.Shape{KeyBytes: 16, ValueBytes: 100}

// liveBytes is what keys and values take, less anything that the store adds.
func liveBytes(keys int) int64 { return int64(keys * (spaceShape.KeyBytes + spaceShape.ValueBytes)) }

// spaceKeys is how many keys a run loads.
func spaceKeys(r *harness.Run) int {
	if r.Smoke {
		return spaceKeysMin / 10
	}
	return max(r.Size, spaceKeysMin)
}

// runPlateau puts and deletes all keys in rounds and looks at the largest file and the largest memtables after the first round.
func runPlateau(r *harness.Run) (err error) {
	store, err := openSpace(r.Dir, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	d := workload.NewData(r.Seed, spaceKeys(r), spaceShape)
	var file, memory int64
	right := 0
	err = r.Time(2*d.Count()*r.Point, func() error {
		for range r.Point {
			for _, del := range []bool{false, true} {
				if err := writeAll(store.Own, d, d.Count(), del); err != nil {
					return err
				}
				if err := store.Checkpoint(context.Background()); err != nil {
					return err
				}
				s := store.Stats().Storage
				file, memory = max(file, s.Pages.FileBytes), max(memory, s.Memory.Memtables)
			}
			right++
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.Count(fileOverLive, over(file, liveBytes(d.Count())))
	r.Count(memoryOverLive, over(memory, liveBytes(d.Count())))
	if err := r.Prove("entries left", float64(store.Stats().Storage.Tree.Entries), 0, 0); err != nil {
		return err
	}
	return r.Verified(right, r.Point)
}

func openSpace(dir string, checkpointEvery time.Duration) (*workload.Store, error) {
	return openStore(dir, spaceGeneration, 0, checkpointEvery)
}

// writeAll puts or deletes the first so many pairs in batches.
func writeAll(session *mvcc.Session, d *workload.Data, count int, del bool) error {
	var w mvcc.Write
	value := make([]byte, d.ValueBytes)
	for from := 0; from < count; from += spaceBatch {
		w.Reset()
		for i := from; i < min(from+spaceBatch, count); i++ {
			if del {
				w.Delete(d.Key(i))
			} else {
				w.Set(d.Key(i), d.Value(value, i))
			}
		}
		if _, err := session.Commit(context.Background(), &w); err != nil {
			return err
		}
	}
	return nil
}

const (
	lightEvery = 500 * time.Microsecond // between two of the light writes
	lightPart  = 100                    // one light write for so many keys of the load
	lightLook  = 20                     // light writes between two looks at the file
	// shrinkCheckpoint stands for the time that memtables of full size take to fill: the data here is a hundredth.
	shrinkCheckpoint = 100 * time.Millisecond
	// never is what is reported of a file that did not shrink.
	never = time.Hour
)

// runShrink deletes most keys, writes lightly, and notes when the file is at most twice as large as what is left.
func runShrink(r *harness.Run) (err error) {
	store, err := openSpace(r.Dir, shrinkCheckpoint)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	d := workload.NewData(r.Seed, spaceKeys(r), spaceShape)
	cut := d.Count() * r.Point / 100
	if err := errors.Join(writeAll(store.Own, d, d.Count(), false), store.Checkpoint(context.Background())); err != nil {
		return err
	}
	r.Count("file MiB before", float64(store.Stats().Storage.Pages.FileBytes)/(1<<20))
	if err := writeAll(store.Own, d, cut, true); err != nil {
		return err
	}
	recorder, shrunk := harness.NewRecorder(), never
	puts := d.Count() / lightPart
	err = r.Time(puts, func() error {
		began := time.Now()
		for n := range puts {
			if err := lightPut(store.Own, d, cut+n%(d.Count()-cut), recorder); err != nil {
				return err
			}
			time.Sleep(lightEvery)
			if n%lightLook == 0 && shrunk == never && store.Stats().Storage.Pages.FileBytes <= 2*liveBytes(d.Count()-cut) {
				shrunk = time.Since(began)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.Latencies(recorder)
	after := store.Stats().Storage.Pages.FileBytes
	r.Count("file MiB after", float64(after)/(1<<20))
	r.Count(fileOverLive, over(after, liveBytes(d.Count()-cut)))
	r.Count(shrinkSeconds, shrunk.Seconds())
	right := 0
	for i := range d.Count() {
		v, err := store.Own.Get(nil, d.Key(i), 0)
		if err != nil {
			return err
		}
		if v.Found == (i >= cut) {
			right++
		}
	}
	return r.Verified(right, d.Count())
}

func lightPut(session *mvcc.Session, d *workload.Data, i int, recorder *harness.Recorder) error {
	var w mvcc.Write
	w.Set(d.Key(i), d.Value(make([]byte, d.ValueBytes), i))
	began := time.Now()
	_, err := session.Commit(context.Background(), &w)
	recorder.Record(time.Since(began))
	return err
}
