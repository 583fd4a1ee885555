package txn

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
)

// load is a workload of transactions of one operation each.
type load struct {
	keys     int
	reads    int     // percent
	skew     float64 // of the choice of keys; 0 is uniform
	retry    bool    // until it commits; else an abort is the end of it
	readOnly bool

	baseline ablation.Baseline
}

// open opens an empty store. Segments are zeroed when they are made, which larger ones would have every run wait for.
func open(dir string, baseline ablation.Baseline) (*mvcc.Store, error) {
	switches, err := ablation.New(baseline)
	if err != nil {
		return nil, err
	}
	return mvcc.Open(mvcc.Options{Durability: mvcc.DurabilityAsync, Storage: storage.Options{
		Dir: dir, MemoryBytes: 4 << 30, CacheBytes: 16 << 20, MemtableBytes: 64 << 20, SegmentBytes: 64 << 20, Ablation: switches,
	}})
}

// worker is one goroutine's part of the load, and what it knows of the outcome.
type worker struct {
	load
	number  uint64
	session *mvcc.Session
	names   [][]byte
	pick    func() int
	random  *rand.Rand
	last    []written // by key
	aborts  int
	buffer  []byte
}

// written is the newest commit of a worker to a key.
type written struct {
	epoch keys.Epoch
	value uint64
}

// run is one section on the arm's store. The runs of an arm share it: a new one spends its first half second with making the segments
// that it keeps in reserve, and a section in memory is shorter than that.
func (l load) run(r *harness.Run) error {
	name := fmt.Sprintf("%d keys, %+v", l.keys, l.baseline)
	store, err := harness.Shared(r, name, func(dir string) (*mvcc.Store, error) {
		store, err := open(dir, l.baseline)
		if err == nil {
			err = l.fill(store)
		}
		return store, err
	})
	if err != nil {
		return err
	}
	before, err := l.state(store)
	if err != nil {
		return err
	}
	pruning := store.Stats().Storage.Pruning
	workers := make([]*worker, r.Point)
	for i := range workers {
		if workers[i], err = l.worker(r, store, i); err != nil {
			return err
		}
		defer workers[i].session.Close()
	}
	share := max(r.Size/r.Point, 1)
	if err := r.Time(share*r.Point, func() error { return together(workers, func(w *worker) error { return w.work(share) }) }); err != nil {
		return err
	}
	lag := float64(store.Visible()) - float64(store.MinVisible())
	aborts := 0
	for _, w := range workers {
		aborts += w.aborts
	}
	r.Count("aborts per commit", float64(aborts)/float64(share*r.Point))
	if err := l.prove(r, pruning, store.Stats().Storage.Pruning, lag); err != nil {
		return err
	}
	for i := range before {
		for _, w := range workers {
			if w.last[i].epoch > before[i].epoch {
				before[i] = w.last[i]
			}
		}
	}
	return l.check(r, store, before)
}

// together runs work for each of the workers in a goroutine of its own.
func together[W any](workers []W, work func(W) error) error {
	errs := make([]error, len(workers))
	var wait sync.WaitGroup
	for i := range workers {
		wait.Go(func() { errs[i] = work(workers[i]) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

func (l load) worker(r *harness.Run, store *mvcc.Store, number int) (*worker, error) {
	session, err := store.Session()
	if err != nil {
		return nil, err
	}
	w := &worker{
		load: l, number: uint64(number), session: session, random: rand.New(rand.NewPCG(r.Seed, uint64(number))), last: make([]written, l.keys),
		buffer: make([]byte, 0, 16),
	}
	for i := range l.keys {
		w.names = append(w.names, key(i))
	}
	w.pick = func() int { return w.random.IntN(l.keys) }
	if l.skew > 0 {
		w.pick = workload.NewZipf(w.random, l.keys, l.skew).Next
	}
	return w, nil
}

// fill writes every key once.
func (l load) fill(store *mvcc.Store) error {
	session, err := store.Session()
	if err != nil {
		return err
	}
	defer session.Close()
	var w mvcc.Write
	for i := range l.keys {
		w.Set(key(i), make([]byte, 16))
	}
	_, err = session.Commit(context.Background(), &w)
	return err
}

// state is what each key holds.
func (l load) state(store *mvcc.Store) ([]written, error) {
	session, err := store.Session()
	if err != nil {
		return nil, err
	}
	defer session.Close()
	state := make([]written, l.keys)
	for i := range state {
		v, err := session.Get(nil, key(i), 0)
		if err != nil {
			return nil, fmt.Errorf("key %d: %w", i, err)
		}
		if v.Found {
			state[i] = written{v.Epoch, binary.LittleEndian.Uint64(v.Data)}
		}
	}
	return state, nil
}

func key(i int) []byte { return binary.BigEndian.AppendUint64(nil, uint64(i)) }

func (w *worker) work(count int) error {
	value := make([]byte, 16)
	for n := range count {
		i, read := w.pick(), w.random.IntN(100) < w.reads
		number := w.number<<40 | uint64(n)
		binary.LittleEndian.PutUint64(value, number)
		for {
			epoch, err := w.transact(w.names[i], value, read)
			if err == nil {
				if !read {
					w.last[i] = written{epoch, number}
				}
				break
			}
			if _, lost := errors.AsType[*mvcc.ConflictError](err); !lost {
				return err
			}
			w.aborts++
			if !w.retry {
				break
			}
		}
	}
	return nil
}

// errMissing means that a read did not find its key.
var errMissing = errors.New("txn: a key that was written is missing")

// transact is one attempt.
func (w *worker) transact(key, value []byte, read bool) (keys.Epoch, error) {
	t, err := w.session.Begin(mvcc.TxnOptions{Isolation: mvcc.IsolationSnapshot, Durability: mvcc.DurabilityAsync, ReadOnly: w.readOnly})
	if err != nil {
		return 0, err
	}
	if read {
		v, err := t.Get(w.buffer[:0], key)
		if err != nil {
			return 0, err
		}
		if !v.Found {
			return 0, errMissing
		}
		w.buffer = v.Data
	} else if err := t.Set(key, value); err != nil {
		return 0, err
	}
	return t.Commit(context.Background())
}

// lagMax is how far the min-visible epoch may lag right after the last commit when every write has just refreshed it.
const lagMax = 64

// prove shows with counters whether writers or the collector pruned.
func (l load) prove(r *harness.Run, before, after storage.PruneStats, lag float64) error {
	r.Count("pruned", float64(after.Pruned-before.Pruned))
	r.Count("assisted", float64(after.Assisted-before.Assisted))
	queued := float64(after.Queued - before.Queued)
	if l.baseline.ScanPerWrite {
		if err := r.Prove("min-visible lag", lag, 0, lagMax); err != nil {
			return err
		}
	}
	if l.baseline.Pruning != ablation.PruneInBackground {
		return r.Prove("queued", queued, 0, 0)
	}
	r.Count("queued", queued)
	return nil
}

// check compares what every key holds with the newest of the commits to it.
func (l load) check(r *harness.Run, store *mvcc.Store, want []written) error {
	got, err := l.state(store)
	if err != nil {
		return err
	}
	right := 0
	for i := range got {
		if got[i] == want[i] {
			right++
		}
	}
	return r.Verified(right, l.keys)
}
