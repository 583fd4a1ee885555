package tree

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"epochkv/bench/engines"
	"epochkv/bench/harness"
	"epochkv/bench/workload"
	"epochkv/internal/mvcc"
	"epochkv/internal/storage"
	"epochkv/internal/storage/btree"
)

// openStore opens a store whose generations are so small that scaled-down data goes through several of them.
func openStore(dir string, generation int64, pageSize int, checkpointEvery time.Duration) (*mvcc.Store, error) {
	return mvcc.Open(mvcc.Options{
		Durability: mvcc.DurabilityAsync, CheckpointInterval: checkpointEvery,
		Storage: storage.Options{
			Dir: dir, PageSize: pageSize, MemoryBytes: 1 << 30, CacheBytes: 256 << 20, MemtableBytes: generation, SegmentBytes: generation,
		},
	})
}

// commits writes rows through the engine, so many in a commit.
type commits struct{ rows int }

func (c commits) run(r *harness.Run) (err error) {
	store, err := openStore(r.Dir, 2*rowBytesMax, batchPageSize, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	session, err := store.Session()
	if err != nil {
		return err
	}
	defer session.Close()
	count := rowCount(r)
	fresh := rows(r.Seed, count, shortest[r.Point], r.Point, 1)
	// The first batch makes the buffers nearly as large as they get.
	var w mvcc.Write
	if err := c.write(session, &w, rows(r.Seed+1, rowsPerBatch, shortest[r.Point], r.Point, 1)); err != nil {
		return err
	}
	err = r.Time(count, func() error { return c.write(session, &w, fresh) })
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
	r.Count("file over live", over(s.Pages.FileBytes, s.Tree.EntryBytes+s.Rows.Bytes))
	if s.Rows.DataPages > 0 {
		r.Count("row fill factor", s.Rows.FillFactor)
	}
	right, err := countRight(session, fresh)
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
			w.Set(e.Key, e.Value)
		}
		if _, err := session.Commit(w); err != nil {
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

// overwrites has one writer overwrite random keys out of r.Size, r.Size times, with write buffers so small that there are
// several checkpoints, or compactions, meanwhile.
type overwrites struct {
	open  engines.Open
	shape workload.Shape
}

const overwriteBuffer = 8 << 20

func (o overwrites) run(r *harness.Run) (err error) {
	e, err := o.open(engines.Options{Dir: r.Dir, BufferBytes: overwriteBuffer})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	d := workload.NewData(r.Seed, r.Size, o.shape)
	if err := errors.Join(d.Load(e), e.Settle()); err != nil {
		return err
	}
	before := e.Counters()["rotations"]
	last := make([]int, d.Count()) // the number in the key's value
	for i := range last {
		last[i] = i
	}
	recorder := harness.NewRecorder()
	err = r.Time(r.Size, func() error {
		return workload.Parallel(e, 1, func(_ int, s engines.Session) error { return o.work(s, d, last, r.Seed, recorder) })
	})
	if err != nil {
		return err
	}
	r.Latencies(recorder)
	r.Count("write amplification", r.WrittenBytes()/float64(r.Size*(o.shape.KeyBytes+o.shape.ValueBytes)))
	if rotations, ours := e.Counters()["rotations"]; ours {
		enough := float64(r.Size * (o.shape.KeyBytes + o.shape.ValueBytes) / overwriteBuffer / 2)
		if err := r.Prove("rotations", rotations-before, enough, 1e9); err != nil {
			return err
		}
	}
	right, err := o.check(e, d, last)
	if err != nil {
		return err
	}
	return r.Verified(right, d.Count())
}

func (o overwrites) work(s engines.Session, d *workload.Data, last []int, seed uint64, recorder *harness.Recorder) error {
	random := rand.New(rand.NewPCG(seed, 1))
	value := make([]byte, o.shape.ValueBytes)
	for n := range d.Count() {
		i := random.IntN(d.Count())
		last[i] = n
		began := time.Now()
		if err := s.Put(d.Key(i), d.Value(value, n)); err != nil {
			return fmt.Errorf("put %d: %w", n, err)
		}
		recorder.Record(time.Since(began))
	}
	return nil
}

// check counts the keys that hold their last value.
func (o overwrites) check(e engines.Engine, d *workload.Data, last []int) (right int, err error) {
	s, err := e.Session()
	if err != nil {
		return 0, err
	}
	var buffer []byte
	expected := make([]byte, o.shape.ValueBytes)
	for i, n := range last {
		got, found, err := s.Get(buffer[:0], d.Key(i))
		if err != nil {
			return right, err
		}
		if found && bytes.Equal(got, d.Value(expected, n)) {
			right++
		}
		buffer = got
	}
	return right, s.Close()
}
