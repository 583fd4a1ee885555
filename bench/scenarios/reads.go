package scenarios

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"epochkv/bench/engines"
	"epochkv/bench/harness"
)

// loaded is how many keys the read scenarios load.
const loaded = 200_000

// loadedEngine opens an engine and loads it; a smoke run loads less.
func loadedEngine(r *harness.Run, open engines.Open, s shape) (engines.Engine, *data, error) {
	e, err := open(engines.Options{Dir: r.Dir})
	if err != nil {
		return nil, nil, err
	}
	d := newData(r.Seed, min(loaded, r.Size*10), s)
	if err := d.load(e); err != nil {
		return nil, nil, errors.Join(err, e.Close())
	}
	return e, d, nil
}

// gets is a workload of point reads, every one checked against the key's number: the check is a part of what all arms pay.
type gets struct {
	open  engines.Open
	shape shape
}

func (g gets) run(r *harness.Run) (err error) {
	e, d, err := loadedEngine(r, g.open, g.shape)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	err = r.Time(r.Size, func() error {
		return parallel(e, r.Point, func(worker int, s engines.Session) error {
			random := rand.New(rand.NewPCG(r.Seed, uint64(worker)))
			buffer, expected := make([]byte, 0, d.valueBytes), make([]byte, d.valueBytes)
			for range r.Size / r.Point {
				i := random.IntN(d.count())
				got, found, err := s.Get(buffer[:0], d.key(i))
				if err != nil {
					return err
				}
				if !found || !bytes.Equal(got[:8], d.value(expected, i)[:8]) {
					return fmt.Errorf("key %d: wrong value", i)
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	right, want, err := d.readBack(e)
	if err != nil {
		return err
	}
	return r.Verified(right, want)
}

// scans is a workload of short scans from random keys that exist.
type scans struct {
	open  engines.Open
	shape shape
}

// scanEntries is the length of a scan.
const scanEntries = 100

func (g scans) run(r *harness.Run) (err error) {
	e, d, err := loadedEngine(r, g.open, g.shape)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	err = r.Time(r.Size, func() error {
		return parallel(e, r.Point, func(worker int, s engines.Session) error {
			random := rand.New(rand.NewPCG(r.Seed, uint64(worker)))
			buffer := make([]byte, 0, d.keyBytes+d.valueBytes)
			for range r.Size / r.Point {
				if _, err := s.Scan(buffer, d.key(random.IntN(d.count())), scanEntries); err != nil {
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
	count, err := s.Scan(nil, nil, d.count()+1)
	if err := errors.Join(err, s.Close()); err != nil {
		return err
	}
	return r.Verified(count, d.count())
}
