package scenarios

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"epochkv/bench/engines"
	"epochkv/bench/harness"
	"epochkv/bench/workload"
)

// loaded is how many keys the read scenarios load.
const loaded = 500_000

// loadedEngine opens an engine, loads it, and lets it settle, so that reads meet tables and trees and not write buffers.
func loadedEngine(r *harness.Run, open engines.Open, s workload.Shape) (engines.Engine, *workload.Data, error) {
	e, err := open(engines.Options{Dir: r.Dir})
	if err != nil {
		return nil, nil, err
	}
	d := workload.NewData(r.Seed, min(loaded, r.Size*10), s) // a smoke run loads less
	err = d.Load(e)
	if err == nil {
		err = e.Settle()
	}
	if err == nil {
		err = proveSettled(r, e.Counters(), d.Count())
	}
	if err != nil {
		return nil, nil, errors.Join(err, e.Close())
	}
	return e, d, nil
}

// proveSettled proves, for our engine, that every key is read from the tree.
func proveSettled(r *harness.Run, counters map[string]float64, count int) error {
	inTree, ours := counters["keys in tree"]
	if !ours {
		return nil
	}
	return errors.Join(r.Prove("keys in tree", inTree, float64(count), float64(count)),
		r.Prove("keys in memtables", counters["keys in memtables"], 0, 0))
}

// gets is a workload of point reads, every one checked against the key's number: the check is a part of what all arms pay.
type gets struct {
	open  engines.Open
	shape workload.Shape
	zipf  bool // a few keys get most of the reads
}

func (g gets) run(r *harness.Run) (err error) {
	e, d, err := loadedEngine(r, g.open, g.shape)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	orders := make([]func() int, r.Point)
	for worker := range orders {
		orders[worker] = g.order(r, worker, d.Count())
	}
	err = r.Time(r.Size, func() error {
		return workload.Parallel(e, r.Point, func(worker int, s engines.Session) error {
			next := orders[worker]
			buffer, expected := make([]byte, 0, d.ValueBytes), make([]byte, d.ValueBytes)
			for range r.Size / r.Point {
				i := next()
				got, found, err := s.Get(buffer[:0], d.Key(i))
				if err != nil {
					return err
				}
				if !found || !bytes.Equal(got[:8], d.Value(expected, i)[:8]) {
					return fmt.Errorf("key %d: wrong value", i)
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	right, want, err := d.ReadBack(e)
	if err != nil {
		return err
	}
	return r.Verified(right, want)
}

// order is the generator of the keys that one worker reads.
func (g gets) order(r *harness.Run, worker, count int) func() int {
	random := rand.New(rand.NewPCG(r.Seed, uint64(worker)))
	if g.zipf {
		return workload.NewZipf(random, count, workload.SkewYCSB).Next
	}
	return func() int { return random.IntN(count) }
}

// scans is a workload of short scans from random keys that exist.
type scans struct {
	open  engines.Open
	shape workload.Shape
}

// scanEntries is the length of a scan.
const scanEntries = 100

// whole has each thread visit everything once, and counts entries.
func (g scans) whole(r *harness.Run) (err error) {
	e, d, err := loadedEngine(r, g.open, g.shape)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	counts := make([]int, r.Point)
	err = r.Time(d.Count()*r.Point, func() error {
		return workload.Parallel(e, r.Point, func(worker int, s engines.Session) (err error) {
			counts[worker], err = s.Scan(nil, nil, d.Count()+1)
			return err
		})
	})
	if err != nil {
		return err
	}
	return r.Verified(slices.Min(counts), d.Count())
}

func (g scans) run(r *harness.Run) (err error) {
	e, d, err := loadedEngine(r, g.open, g.shape)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	err = r.Time(r.Size, func() error {
		return workload.Parallel(e, r.Point, func(worker int, s engines.Session) error {
			random := rand.New(rand.NewPCG(r.Seed, uint64(worker)))
			buffer := make([]byte, 0, d.KeyBytes+d.ValueBytes)
			for range r.Size / r.Point {
				if _, err := s.Scan(buffer, d.Key(random.IntN(d.Count())), scanEntries); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	s, err := e.Session()
	if err != nil {
		return err
	}
	count, err := s.Scan(nil, nil, d.Count()+1)
	if err := errors.Join(err, s.Close()); err != nil {
		return err
	}
	return r.Verified(count, d.Count())
}
