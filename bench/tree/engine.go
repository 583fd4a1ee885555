package tree

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/btree"
)

// openStore opens a store whose generations are so small that scaled-down data goes through several of them.
func openStore(dir string, generation int64, pageSize int, checkpointEvery time.Duration) (*workload.Store, error) {
	return workload.OpenStore(mvcc.Options{
		Durability: mvcc.DurabilityAsync, CheckpointInterval: checkpointEvery,
		Storage: storage.Options{
			Dir: dir, PageSize: pageSize, MemoryBytes: 1 << 30, CacheBytes: 256 << 20, MemtableBytes: generation, SegmentBytes: generation,
		},
	})
}

// commits writes rows through the engine, so many in a commit.
type commits struct{ rows int }

func (c commits) run(r *harness.Run) (err error) {
	generation := int64(2 * rowBytesMax)
	if r.Smoke {
		generation /= 8
	}
	store, err := openStore(r.Dir, generation, batchPageSize, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	count := rowCount(r)
	fresh := rows(r.Seed, count, shortest[r.Point], r.Point, 1)
	// The first batch makes the buffers nearly as large as they get.
	var w mvcc.Write
	if err := c.write(store.Own, &w, rows(r.Seed+1, rowsPerBatch, shortest[r.Point], r.Point, 1)); err != nil {
		return err
	}
	err = r.Time(count, func() error { return c.write(store.Own, &w, fresh) })
	if err != nil {
		return err
	}
	want := float64((count + rowsPerBatch) / c.rows)
	if err := r.Prove("commits", float64(store.Stats().Commits), want, want); err != nil {
		return err
	}
	if err := store.Checkpoint(context.Background()); err != nil {
		return err
	}
	s := store.Stats().Storage
	r.Count("file over live", over(s.Pages.FileBytes, s.Tree.EntryBytes+s.Blobs.Bytes))
	if s.Blobs.BlobPages > 0 {
		r.Count("row fill factor", s.Blobs.FillFactor)
	}
	right, err := countRight(store.Own, fresh)
	if err != nil {
		return err
	}
	return r.Verified(right, count)
}

// write commits the rows. Their keys begin with the byte of the key space, which is a part of a client's key here.
func (c commits) write(session *mvcc.Session, w *mvcc.Write, fresh []btree.Entry) error {
	for len(fresh) > 0 {
		w.Reset()
		for _, e := range fresh[:c.rows] {
			w.SetShared(e.Key, e.Value)
		}
		if _, err := session.Commit(context.Background(), w); err != nil {
			return err
		}
		fresh = fresh[c.rows:]
	}
	return nil
}

func countRight(session *mvcc.Session, fresh []btree.Entry) (right int, err error) {
	var buffer []byte
	for _, e := range fresh {
		v, err := session.Get(buffer[:0], e.Key, 0)
		if err != nil {
			return right, err
		}
		if v.Found && bytes.Equal(v.Data, e.Value) {
			right++
		}
		buffer = v.Data
	}
	return right, nil
}

func over[A, B int64 | uint64](a A, b B) float64 { return float64(a) / max(float64(b), 1) }
