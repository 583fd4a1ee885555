package scenarios

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"time"

	"epochkv/bench/engines"
	"epochkv/bench/harness"
	"epochkv/bench/workload"
)

// puts is a workload of writes: r.Point writers share r.Size pairs.
type puts struct {
	open       engines.Open
	options    engines.Options
	shape      workload.Shape
	batch      int  // pairs per atomic write; 0: single puts
	latency    bool // record each put; off where two clock readings would be a good part of it
	unreadable bool // the engine keeps no index: its proof has to do
	proof      func(*harness.Run, map[string]float64) error
}

func (p puts) run(r *harness.Run) (err error) {
	o := p.options
	o.Dir = r.Dir
	e, err := p.open(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	d := workload.NewData(r.Seed, r.Size, p.shape)
	recorders := make([]*harness.Recorder, r.Point)
	err = r.Time(r.Size, func() error {
		return workload.Parallel(e, r.Point, func(worker int, s engines.Session) error {
			if p.batch > 0 {
				return p.batches(d, s, worker, r.Point)
			}
			if p.latency {
				recorders[worker] = harness.NewRecorder()
			}
			return p.singles(d, s, worker, r.Point, recorders[worker])
		})
	})
	if err != nil {
		return err
	}
	if p.latency {
		r.Latencies(recorders...)
	}
	if p.proof != nil {
		if err := p.proof(r, e.Counters()); err != nil {
			return err
		}
	}
	if p.unreadable {
		return r.Verified(1, 1)
	}
	right, want, err := d.ReadBack(e)
	if err != nil {
		return err
	}
	return r.Verified(right, want)
}

// singles writes every writers-th pair from worker on.
func (p puts) singles(d *workload.Data, s engines.Session, worker, writers int, recorder *harness.Recorder) error {
	value := make([]byte, d.ValueBytes)
	var began time.Time
	for i := worker; i < d.Count(); i += writers {
		if recorder != nil {
			began = time.Now()
		}
		if err := s.Put(d.Key(i), d.Value(value, i)); err != nil {
			return err
		}
		if recorder != nil {
			recorder.Record(time.Since(began))
		}
	}
	return nil
}

// batches writes the worker's part in atomic batches.
func (p puts) batches(d *workload.Data, s engines.Session, worker, writers int) error {
	keys, values := make([][]byte, 0, p.batch), make([][]byte, p.batch)
	for i := range values {
		values[i] = make([]byte, d.ValueBytes)
	}
	for i := worker; i < d.Count(); i += writers {
		d.Value(values[len(keys)], i)
		keys = append(keys, d.Key(i))
		if len(keys) == p.batch || i+writers >= d.Count() {
			if err := s.PutAll(keys, values[:len(keys)]); err != nil {
				return err
			}
			keys = keys[:0]
		}
	}
	return nil
}

// overwrites is a workload of puts to keys that exist. Worker w owns the keys i with i % writers == w, so that the last value
// of each key is known.
type overwrites struct {
	open  engines.Open
	shape workload.Shape
}

// overwriteRounds is how often each key is overwritten on average.
const overwriteRounds = 10

func (o overwrites) run(r *harness.Run) (err error) {
	e, err := o.open(engines.Options{Dir: r.Dir})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	d := workload.NewData(r.Seed, max(r.Size/overwriteRounds, r.Point), o.shape)
	if err := d.Load(e); err != nil {
		return err
	}
	last := make([]uint32, d.Count()) // the number that the key's value begins with
	for i := range last {
		last[i] = uint32(i)
	}
	err = r.Time(r.Size, func() error {
		return workload.Parallel(e, r.Point, func(worker int, s engines.Session) error {
			random := rand.New(rand.NewPCG(r.Seed, uint64(worker)))
			value := make([]byte, d.ValueBytes)
			for n := range r.Size / r.Point {
				i := random.IntN(d.Count()/r.Point)*r.Point + worker
				last[i] = uint32(n)
				if err := s.Put(d.Key(i), d.Value(value, n)); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	right, err := o.check(e, d, last)
	if err != nil {
		return err
	}
	return r.Verified(right, d.Count())
}

// check counts the keys that hold their last value.
func (o overwrites) check(e engines.Engine, d *workload.Data, last []uint32) (right int, err error) {
	s, err := e.Session()
	if err != nil {
		return 0, err
	}
	var buffer []byte
	expected := make([]byte, d.ValueBytes)
	for i := range last {
		got, found, err := s.Get(buffer[:0], d.Key(i))
		if err != nil {
			return right, err
		}
		if found && bytes.Equal(got, d.Value(expected, int(last[i]))) {
			right++
		}
		buffer = got
	}
	return right, s.Close()
}
