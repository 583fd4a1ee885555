package tree

import (
	"bytes"
	"errors"
	"iter"
	"math/rand/v2"
	"path/filepath"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage/objstorageprovider"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// bulkLoad times how long it takes until all pairs are visible and durable, from keys in their order or in none.
type bulkLoad struct {
	load   func(r *harness.Run, d *workload.Data, order []int) (check func() (int, error), err error)
	sorted bool
}

func (b bulkLoad) run(r *harness.Run) error {
	d := workload.NewSorted(r.Seed, r.Size, spaceShape)
	order := d.Order()
	if !b.sorted {
		rand.New(rand.NewPCG(r.Seed, 1)).Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	check, err := b.load(r, d, order)
	if err != nil {
		return err
	}
	right, err := check()
	if err != nil {
		return err
	}
	return r.Verified(right, (d.Count()+sampleStep-1)/sampleStep)
}

// bulkEpochKV loads past log and memtable into an empty store.
func bulkEpochKV(r *harness.Run, d *workload.Data, order []int) (func() (int, error), error) {
	store, err := openStore(r.Dir, 64<<20, 0, 0)
	if err != nil {
		return nil, err
	}
	r.Quiet()
	err = r.Time(d.Count(), func() error { return store.Bulk(r, d, order) })
	if err == nil { // all of it is in the tree, and the log knows of nothing
		err = r.Prove("entries in tree", float64(store.Stats().Storage.Tree.Entries), float64(d.Count()), float64(d.Count()))
	}
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return readBack(d, store), nil
}

// plainRows is how many pairs a plain import commits at once.
const plainRows = 1000

// plainEpochKV imports with batches, as kvctl import does without a bulk load, until all of it is in
// the tree, as after a bulk load.
func plainEpochKV(r *harness.Run, d *workload.Data, order []int) (func() (int, error), error) {
	store, err := openStore(r.Dir, 64<<20, 0, 0)
	if err != nil {
		return nil, err
	}
	r.Quiet()
	err = r.Time(d.Count(), func() error {
		w, value := mvcc.Write{Durability: mvcc.DurabilityAsync}, make([]byte, d.ValueBytes)
		for rows := range slices.Chunk(order, plainRows) {
			w.Reset()
			for _, i := range rows {
				w.Set(d.Key(i), d.Value(value, i))
			}
			if _, err := store.Own.Commit(r, &w); err != nil {
				return err
			}
		}
		return store.Checkpoint(r)
	})
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return readBack(d, store), nil
}

// readBack returns a function that counts which of the sampled pairs are right, and closes the store.
func readBack(d *workload.Data, store *workload.Store) func() (int, error) {
	return func() (right int, err error) {
		expected := make([]byte, d.ValueBytes)
		for i := range sampled(d) {
			v, err := store.Own.Get(nil, d.Key(i), 0)
			if err != nil {
				return right, err
			}
			if v.Found && bytes.Equal(v.Data, d.Value(expected, i)) {
				right++
			}
		}
		return right, store.Close()
	}
}

// sampled are the numbers of the pairs that are read back.
func sampled(d *workload.Data) iter.Seq[int] {
	return func(yield func(int) bool) {
		for i := 0; i < d.Count(); i += sampleStep {
			if !yield(i) {
				return
			}
		}
	}
}

const sampleStep = 16

// bulkPebble writes one sorted table and ingests it, which is Pebble's way past log and memtable.
func bulkPebble(r *harness.Run, d *workload.Data, order []int) (func() (int, error), error) {
	options := &pebble.Options{}
	options.ApplyCompressionSettings(func() pebble.DBCompressionSettings { return pebble.DBCompressionNone }) // as engines.Pebble
	options.EnsureDefaults()
	db, err := pebble.Open(filepath.Join(r.Dir, "db"), options)
	if err != nil {
		return nil, err
	}
	r.Quiet()
	err = r.Time(d.Count(), func() error {
		name := filepath.Join(r.Dir, "load.sst")
		file, err := vfs.Default.Create(name, vfs.WriteCategoryUnspecified)
		if err != nil {
			return err
		}
		format := db.FormatMajorVersion().MaxTableFormat()
		w := sstable.NewWriter(objstorageprovider.NewFileWritable(file), options.MakeWriterOptions(0, format))
		value := make([]byte, d.ValueBytes)
		for _, i := range order {
			if err := w.Set(d.Key(i), d.Value(value, i)); err != nil {
				return errors.Join(err, w.Close())
			}
		}
		if err := w.Close(); err != nil {
			return err
		}
		return db.Ingest(r, []string{name})
	})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return func() (right int, err error) {
		expected := make([]byte, d.ValueBytes)
		for i := range sampled(d) {
			value, closer, err := db.Get(d.Key(i))
			if err != nil {
				return right, errors.Join(err, db.Close())
			}
			if bytes.Equal(value, d.Value(expected, i)) {
				right++
			}
			if err := closer.Close(); err != nil {
				return right, err
			}
		}
		return right, db.Close()
	}, nil
}
