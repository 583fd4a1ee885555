package origin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// cold reads data that is larger than the cache, past the page cache.
type cold struct {
	way      vfs.IO
	prefetch bool
	ahead    bool // prefetch, if it is on, has something to read ahead here
	read     func(*coldRun) error
	writers  bool // the point is the number of writers beside
}

const (
	coldKeys    = 300_000
	coldKeysMin = 20_000 // larger than the cache still
	coldCache   = 1 << 20
	scanLength  = 1000
	putRate     = "puts per s"
)

// coldRun is a run under way.
type coldRun struct {
	*harness.Run
	session *mvcc.Session
	data    *workload.Data
	order   []int // of the pairs, by key
	random  *rand.Rand
	wrong   int
}

// coldStore is a closed store on disk: each run opens it in its own way. Its values never change.
type coldStore struct {
	dir   string
	data  *workload.Data
	order []int
}

func (coldStore) Close() error { return nil }

func (o cold) run(r *harness.Run) (err error) {
	files, err := vfs.OpenOS(o.way)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, files.Close()) }()
	closed, err := harness.Shared(r, "cold", func(dir string) (*coldStore, error) { return writeCold(r, dir) })
	if err != nil {
		return err
	}
	d, order := closed.data, closed.order
	store, err := openCold(closed.dir, directReads{files}, o.prefetch)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	c := &coldRun{Run: r, session: store.Own, data: d, order: order, random: rand.New(rand.NewPCG(r.Seed, 1))}
	if err := o.time(c, store); err != nil {
		return err
	}
	if err := o.prove(r, store.Stats().Storage, files.Stats()); err != nil {
		return err
	}
	return r.Verified(r.Size-c.wrong, r.Size)
}

func openCold(dir string, files vfs.FS, prefetch bool) (*workload.Store, error) {
	baseline, err := ablation.New(ablation.Baseline{NoPrefetch: !prefetch})
	if err != nil {
		return nil, err
	}
	return workload.OpenStore(mvcc.Options{Durability: mvcc.DurabilityAsync, Storage: storage.Options{
		Dir: dir, FS: files, MemoryBytes: 1 << 30, CacheBytes: coldCache, MemtableBytes: 16 << 20, SegmentBytes: 16 << 20, Ablation: baseline,
	}})
}

// writeCold makes the store and closes it.
func writeCold(r *harness.Run, dir string) (*coldStore, error) {
	d := workload.NewSorted(r.LoadSeed, max(r.Load, coldKeysMin), workload.Shape{KeyBytes: 16, ValueBytes: 100})
	store, err := openCold(dir, vfs.NewOS(), true)
	if err != nil {
		return nil, err
	}
	order := d.Order()
	var w mvcc.Write
	value := make([]byte, d.ValueBytes)
	for batch := range slices.Chunk(order, 1000) {
		w.Reset()
		for _, i := range batch {
			w.Set(d.Key(i), d.Value(value, i))
		}
		if _, err = store.Own.Commit(context.Background(), &w); err != nil {
			break
		}
	}
	return &coldStore{dir, d, order}, errors.Join(err, store.Close())
}

// time runs the reads, and r.Point writers beside them if the scenario has any.
func (o cold) time(c *coldRun, store *workload.Store) error {
	writers := 0
	if o.writers {
		writers = c.Point
	}
	ctx, stop := context.WithCancel(c)
	defer stop()
	counts, errs := make([]int, writers), make([]error, writers)
	var wait sync.WaitGroup
	began := time.Now()
	for i := range writers {
		wait.Go(func() { counts[i], errs[i] = c.write(ctx, store, i) })
	}
	err := c.Time(c.Size, func() error { return o.read(c) })
	stop()
	wait.Wait()
	puts := 0
	for _, n := range counts {
		puts += n
	}
	if o.writers {
		c.Count(putRate, float64(puts)/time.Since(began).Seconds())
	}
	return errors.Join(err, errors.Join(errs...))
}

// write gives random keys the values that they have, until ctx ends.
func (c *coldRun) write(ctx context.Context, store *workload.Store, number int) (count int, err error) {
	session, err := store.Session()
	if err != nil {
		return 0, err
	}
	defer session.Close()
	choice, value := rand.New(rand.NewPCG(c.Seed, uint64(number)+2)), make([]byte, c.data.ValueBytes)
	var w mvcc.Write
	for ; ctx.Err() == nil; count++ {
		i := choice.IntN(c.data.Count())
		w.Reset()
		w.Set(c.data.Key(i), c.data.Value(value, i))
		if _, err := session.Commit(context.Background(), &w); err != nil {
			return count, err
		}
	}
	return count, nil
}

// readBatches reads r.Point random keys at a time, together.
func readBatches(c *coldRun) error {
	keys, numbers, expected := make([][]byte, c.Point), make([]int, c.Point), make([]byte, c.data.ValueBytes)
	for range max(c.Size/c.Point, 1) {
		for i := range keys {
			numbers[i] = c.random.IntN(c.data.Count())
			keys[i] = c.data.Key(numbers[i])
		}
		if _, err := c.session.OpenSnapshot(0); err != nil {
			return err
		}
		err := c.session.ReadAll(context.Background(), keys, func(i int, v mvcc.Value) error {
			if !v.Found || !bytes.Equal(v.Data, c.data.Value(expected, numbers[i])) {
				c.wrong++
			}
			return nil
		})
		c.session.CloseSnapshot()
		if err != nil {
			return err
		}
	}
	return nil
}

// readSingles reads random keys one by one.
func readSingles(c *coldRun) error {
	buffer, expected := make([]byte, 0, c.data.ValueBytes), make([]byte, c.data.ValueBytes)
	for range c.Size {
		i := c.random.IntN(c.data.Count())
		v, err := c.session.Get(buffer[:0], c.data.Key(i), 0)
		if err != nil {
			return err
		}
		if buffer = v.Data; !v.Found || !bytes.Equal(buffer, c.data.Value(expected, i)) {
			c.wrong++
		}
	}
	return nil
}

// readScans reads scanLength neighbours from random places, with the bound that tells how far to read ahead.
func readScans(c *coldRun) error {
	for range c.Size {
		first := c.random.IntN(c.data.Count() - scanLength)
		if _, err := c.session.OpenSnapshot(0); err != nil {
			return err
		}
		count, err := c.scan(c.data.Key(c.order[first]), c.data.Key(c.order[first+scanLength]))
		c.session.CloseSnapshot()
		if err != nil {
			return err
		}
		if count != scanLength {
			return fmt.Errorf("a scan from pair %d found %d entries", first, count)
		}
	}
	return nil
}

// readAll visits everything in order, without a bound.
func readAll(c *coldRun) error {
	if _, err := c.session.OpenSnapshot(0); err != nil {
		return err
	}
	defer c.session.CloseSnapshot()
	count, err := c.scan(nil, nil)
	if err == nil && count != c.data.Count() {
		err = fmt.Errorf("a scan of everything found %d of %d entries", count, c.data.Count())
	}
	return err
}

func (c *coldRun) scan(lower, upper []byte) (count int, err error) {
	return workload.CountScan(c.session, mvcc.ScanOptions{Lower: lower, Upper: upper})
}

// prove shows which way the reads went.
func (o cold) prove(r *harness.Run, s storage.Stats, device vfs.Stats) error {
	r.Count("pages missed", float64(s.Cache.Misses))
	r.Count("ring reads", float64(device.RingReads))
	r.Count("pool reads", float64(device.PoolReads))
	r.Count("single reads", float64(device.SingleReads))
	r.Count("pages in batches", float64(s.Cache.BatchPages))
	r.Count("prefetched and used", float64(s.Cache.PrefetchedUsed))
	least, most := 0.0, 0.0
	if o.prefetch && o.ahead {
		least, most = 1, math.Inf(1)
	}
	return r.Prove("prefetched", float64(s.Cache.Prefetched), least, most)
}
