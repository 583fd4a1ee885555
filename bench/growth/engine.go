package growth

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
)

// random works on random keys of a store of r.Load times r.Point keys.
type random struct {
	peer  engines.Open // nil: EpochKV, bulk-loaded
	name  string       // of the peer
	first work         // what is done before, and not timed; nil: nothing
	timed work
	once  bool // what is timed is one operation, whatever r.Size is
}

// work is what a run does with a store.
type work func(g *grown, r *harness.Run) error

// alone does work in one session.
func alone(do func(engines.Session, *workload.Data, *harness.Run) error) work {
	return func(g *grown, r *harness.Run) error {
		return workload.Parallel(g, 1, func(_ int, s engines.Session) error { return do(s, g.data, r) })
	}
}

const scanned = 100

var grownShape = workload.Shape{KeyBytes: 16, ValueBytes: 100}

// grown is an engine whose tree holds the keys, and whose cache holds the tree.
type grown struct {
	engines.Engine
	data *workload.Data
	open func() (engines.Engine, error)
}

// stop closes the engine, which start opens again.
func (g *grown) stop(*harness.Run) error { return g.Engine.Close() }

// start opens the engine again and reads a key.
func (g *grown) start(r *harness.Run) (err error) {
	if g.Engine, err = g.open(); err != nil {
		return err
	}
	return workload.Parallel(g, 1, func(_ int, s engines.Session) error { return get(s, g.data, r.Seed, 1) })
}

// fillCache reads everything.
func (g *grown) fillCache() error {
	return workload.Parallel(g, 1, func(_ int, s engines.Session) error {
		_, err := s.Scan(nil, nil, g.data.Count())
		return err
	})
}

// merge merges what was put before.
func (g *grown) merge(*harness.Run) error { return g.Settle() }

func grownOptions(r *harness.Run, dir string) engines.Options {
	o := engines.Options{Dir: dir, CacheBytes: 4 << 30}
	if r.Smoke {
		o.CacheBytes, o.BufferBytes = 32<<20, 8<<20
	}
	return o
}

func makeGrown(r *harness.Run, dir string) (*grown, error) {
	d := workload.NewSorted(r.LoadSeed, r.Load*r.Point, grownShape)
	store, err := open(dir)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(store.Bulk(r, d, d.Order()), store.Close()); err != nil {
		return nil, err
	}
	g := &grown{data: d, open: func() (engines.Engine, error) { return engines.EpochKV(grownOptions(r, dir)) }}
	if g.Engine, err = g.open(); err != nil {
		return nil, err
	}
	if err := g.fillCache(); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

func (o random) run(r *harness.Run) error {
	e, err := harness.Shared(r, fmt.Sprint(o.name, r.Point), func(dir string) (*grown, error) {
		if o.peer != nil {
			d := workload.NewSorted(r.LoadSeed, r.Load*r.Point, grownShape)
			return loaded(d, func() (engines.Engine, error) { return o.peer(grownOptions(r, dir)) })
		}
		return makeGrown(r, dir)
	})
	if err != nil {
		return err
	}
	d := e.data
	if o.peer == nil {
		if err := r.Prove("keys in tree", e.Counters()["keys in tree"], float64(d.Count()), float64(d.Count())); err != nil {
			return err
		}
	}
	if o.first != nil {
		if err := o.first(e, r); err != nil {
			return err
		}
	}
	count := r.Size
	if o.once {
		count = 1
	}
	if err := r.Time(count, func() error { return o.timed(e, r) }); err != nil {
		return err
	}
	if o.once { // others find the cache as it was
		if err := e.fillCache(); err != nil {
			return err
		}
	}
	if o.peer != nil { // to compact all of a large store after each run would take longer than the runs
		return verify(r, e, d)
	}
	return errors.Join(verify(r, e, d), e.Settle())
}

// loaded loads an engine in key order and moves everything out of its write buffers.
func loaded(d *workload.Data, open func() (engines.Engine, error)) (*grown, error) {
	e, err := open()
	if err != nil {
		return nil, err
	}
	if err = errors.Join(d.Load(e), e.Settle()); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return &grown{Engine: e, data: d, open: open}, nil
}

// scan reads entries from random keys on. An operation is one scan.
func scan(s engines.Session, d *workload.Data, r *harness.Run) error {
	choice, buffer := rand.New(rand.NewPCG(r.Seed, 1)), make([]byte, 0, 1024)
	for range r.Size {
		if _, err := s.Scan(buffer, d.Key(choice.IntN(d.Count())), scanned); err != nil {
			return err
		}
	}
	return nil
}

// putAll is put in batches, whose keys are spread over all.
func putAll(s engines.Session, d *workload.Data, r *harness.Run) error {
	const batch = scanned
	choice := rand.New(rand.NewPCG(r.Seed, 1))
	names, values := make([][]byte, batch), make([][]byte, batch)
	for i := range values {
		values[i] = make([]byte, d.ValueBytes)
	}
	for left := r.Size; left > 0; left -= batch {
		n, first := min(batch, left), choice.IntN(d.Count())
		for j := range n {
			i := (first + j*(d.Count()/batch)) % d.Count() // a batch names each key once
			names[j] = d.Key(i)
			d.Value(values[j], i)
		}
		if err := s.PutAll(names[:n], values[:n]); err != nil {
			return err
		}
	}
	return nil
}

// put overwrites as many keys as the run asks for.
func put(s engines.Session, d *workload.Data, r *harness.Run) error {
	return overwrite(s, d, rand.New(rand.NewPCG(r.Seed, 1)), d.Count(), r.Size)
}

// overwrite gives random ones of the first keys the value that they have: what the pair is stays a function of the seed.
func overwrite(s engines.Session, d *workload.Data, choice *rand.Rand, first, count int) error {
	value := make([]byte, d.ValueBytes)
	for range count {
		i := choice.IntN(first)
		if err := s.Put(d.Key(i), d.Value(value, i)); err != nil {
			return err
		}
	}
	return nil
}

// getEach is get of as many keys as the run asks for.
func getEach(s engines.Session, d *workload.Data, r *harness.Run) error {
	return get(s, d, r.Seed, r.Size)
}

// get reads random keys and checks each.
func get(s engines.Session, d *workload.Data, seed uint64, count int) error {
	choice := rand.New(rand.NewPCG(seed, 1))
	buffer, expected := make([]byte, 0, d.ValueBytes), make([]byte, d.ValueBytes)
	for range count {
		i := choice.IntN(d.Count())
		got, found, err := s.Get(buffer[:0], d.Key(i))
		if err != nil {
			return err
		}
		if !found || !bytes.Equal(got[:8], d.Value(expected, i)[:8]) {
			return fmt.Errorf("key %d: wrong value", i)
		}
		buffer = got
	}
	return nil
}

func verify(r *harness.Run, e engines.Engine, d *workload.Data) error {
	right, want, err := d.ReadBack(e)
	if err != nil {
		return err
	}
	return r.Verified(right, want)
}

// inserts puts new keys.
type inserts struct {
	shape   workload.Shape
	options engines.Options
	peer    engines.Open // nil: EpochKV
	gets    bool         // time reads of them instead
}

func (o inserts) byWriters(r *harness.Run) error { return o.run(r, r.Point) }

// valueBytesMax bounds what a run writes.
const valueBytesMax = 32 << 20

// operations is how many operations on values of that size fit into a run.
func operations(size, valueBytes int) int { return min(size, max(valueBytesMax/valueBytes, 64)) }

func (o inserts) byValue(r *harness.Run) error {
	o.shape = workload.Shape{KeyBytes: 16, ValueBytes: r.Point}
	return o.run(r, 1)
}

func (o inserts) run(r *harness.Run, writers int) (err error) {
	o.options.Dir = r.Dir
	if r.Smoke {
		o.options.BufferBytes = 8 << 20
	}
	open := o.peer
	if open == nil {
		open = engines.EpochKV
	}
	e, err := open(o.options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	d := workload.NewData(r.Seed, operations(r.Size, o.shape.ValueBytes), o.shape)
	write := func() error {
		return workload.Parallel(e, writers, func(worker int, s engines.Session) error {
			value := make([]byte, d.ValueBytes)
			for i := worker; i < d.Count(); i += writers {
				if err := s.Put(d.Key(i), d.Value(value, i)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	section := write
	if o.gets {
		if err := errors.Join(write(), e.Settle()); err != nil {
			return err
		}
		section = func() error {
			return workload.Parallel(e, 1, func(_ int, s engines.Session) error { return get(s, d, r.Seed, d.Count()) })
		}
	}
	if err := r.Time(d.Count(), section); err != nil {
		return err
	}
	return verify(r, e, d)
}
