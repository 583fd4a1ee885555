package tree

import (
	"bytes"
	"errors"
	"path/filepath"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage/objstorageprovider"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"

	"epochkv/bench/harness"
	"epochkv/bench/workload"
)

// bulkLoad times how long it takes until all pairs are visible and durable, from keys in their order or in none.
type bulkLoad struct {
	load   func(r *harness.Run, d *workload.Data, order []int) (check func() (int, error), err error)
	sorted bool
}

func (b bulkLoad) run(r *harness.Run) error {
	d := workload.NewData(r.Seed, r.Size, spaceShape)
	order := make([]int, d.Count())
	for i := range order {
		order[i] = i
	}
	if b.sorted {
		slices.SortFunc(order, func(i, j int) int { return bytes.Compare(d.Key(i), d.Key(j)) })
	}
	check, err := b.load(r, d, order)
	if err != nil {
		return err
	}
	right, err := check()
	if err != nil {
		return err
	}
	return r.Verified(right, d.Count())
}

// bulkEpochKV loads past log and memtable into an empty store.
func bulkEpochKV(r *harness.Run, d *workload.Data, order []int) (func() (int, error), error) {
	store, err := openStore(r.Dir, 64<<20, 0, 0)
	if err != nil {
		return nil, err
	}
	err = r.Time(d.Count(), func() error {
		load, err := store.BulkLoad()
		if err != nil {
			return err
		}
		value := make([]byte, d.ValueBytes)
		for _, i := range order {
			if err := load.Add(d.Key(i), d.Value(value, i)); err != nil {
				return errors.Join(err, load.Close())
			}
		}
		_, err = load.Commit(r)
		return errors.Join(err, load.Close())
	})
	if err == nil { // all of it is in the tree, and the log knows of nothing
		err = r.Prove("entries in tree", float64(store.Stats().Storage.Tree.Entries), float64(d.Count()), float64(d.Count()))
	}
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return func() (right int, err error) {
		session, err := store.Session()
		if err != nil {
			return 0, err
		}
		expected := make([]byte, d.ValueBytes)
		for i := range d.Count() {
			v, err := session.Get(nil, d.Key(i), 0)
			if err != nil {
				return right, err
			}
			if v.Found && bytes.Equal(v.Data, d.Value(expected, i)) {
				right++
			}
		}
		session.Close()
		return right, store.Close()
	}, nil
}

// bulkPebble writes one sorted table and ingests it, which is Pebble's way past log and memtable.
func bulkPebble(r *harness.Run, d *workload.Data, order []int) (func() (int, error), error) {
	options := &pebble.Options{}
	options.EnsureDefaults()
	db, err := pebble.Open(filepath.Join(r.Dir, "db"), options)
	if err != nil {
		return nil, err
	}
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
		for i := range d.Count() {
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
