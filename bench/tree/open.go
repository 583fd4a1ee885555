package tree

import (
	"errors"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
)

const msToOpen = "ms to open"

// closedStore is a directory that opens find; nothing is open between them.
type closedStore struct {
	dir   string
	count int
}

func (closedStore) Close() error { return nil }

func makeClosed(r *harness.Run, dir string) (*closedStore, error) {
	store, err := openStore(dir, 32<<20, 0, 0)
	if err != nil {
		return nil, err
	}
	d := workload.NewSorted(r.LoadSeed, r.Load, spaceShape)
	err = store.Bulk(r, d, d.Order())
	return &closedStore{dir, d.Count()}, errors.Join(err, store.Close())
}

// runOpen opens a store that was closed in order.
func runOpen(r *harness.Run) error {
	closed, err := harness.Shared(r, "closed store", func(dir string) (*closedStore, error) { return makeClosed(r, dir) })
	if err != nil {
		return err
	}
	var store *workload.Store
	if err := r.Time(1, func() (err error) { store, err = openStore(closed.dir, 32<<20, 0, 0); return err }); err != nil {
		return err
	}
	r.Count(msToOpen, r.Seconds()*float64(time.Second/time.Millisecond))
	entries := store.Stats().Storage.Tree.Entries
	if err := errors.Join(r.Prove("records replayed", float64(store.Recovery().Records), 0, 0), store.Close()); err != nil {
		return err
	}
	return r.Verified(int(entries), closed.count)
}
