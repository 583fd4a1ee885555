package scenarios

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
)

// puts is a workload of writes: r.Point writers share r.Size pairs.
type puts struct {
	contender
	options    engines.Options
	shape      workload.Shape
	batch      int  // pairs per atomic write; 0: single puts
	latency    bool // record each put; off where two clock readings would be a good part of it
	unreadable bool // the engine keeps no index: its proof has to do
	proof      func(*harness.Run, map[string]float64) error
	merges     string // the counter of merges of write buffers, of which a run must have some; empty: what merges is not in question
}

// fills is how many write buffers a run fills: what a put costs includes what becomes of it.
const fills = 8

const bufferStep = 1 << 20

func (p puts) bytes(r *harness.Run) int64 {
	return int64(r.Size) * int64(p.shape.KeyBytes+p.shape.ValueBytes)
}

// buffer is the size of write buffers of which a run of r.Size pairs fills so many.
func (p puts) buffer(r *harness.Run) int64 {
	return min(max(p.bytes(r)/fills/bufferStep, 1)*bufferStep, 64*bufferStep)
}

// proveMerges fails a run in which too little was merged. Runs of a few megabytes, to warm up, need not merge; Pebble flushes several buffers at once.
func (p puts) proveMerges(r *harness.Run, counters map[string]float64) error {
	if p.merges == "" || p.bytes(r) < fills*bufferStep {
		return nil
	}
	r.Count("write buffers, MiB", float64(p.buffer(r)*engines.WriteBuffers>>20))
	least := 2.0
	if p.merges == "rotations" {
		least = fills / 2
	}
	return r.Prove(p.merges, counters[p.merges], least, math.MaxFloat64)
}

func (p puts) run(r *harness.Run) (err error) {
	o := p.options
	o.Dir = r.Dir
	switch {
	case p.merges != "":
		o.BufferBytes = p.buffer(r)
	case r.Smoke:
		o.BufferBytes = smokeBuffer
	}
	e, err := p.open(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	d := workload.NewData(r.Seed, r.Size, p.shape)
	recorders := make([]*harness.Recorder, r.Point)
	r.Quiet()
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
	if err := p.proveMerges(r, e.Counters()); err != nil {
		return err
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

// overwrites is a workload of puts to random keys of those that are loaded, which round after round goes on where the last
// ended. Worker w owns the keys i with i % writers == w, so that the last value of each key is known.
type overwrites struct{ contender }

// overwriteBuffer is so small that a run goes through several checkpoints, or compactions.
const overwriteBuffer = 16 << 20

func (o overwrites) run(r *harness.Run) error {
	l, err := loadedEngine(r, o.contender, engines.Options{BufferBytes: overwriteBuffer}, standard)
	if err != nil {
		return err
	}
	before := l.Counters()["rotations"]
	share := max(r.Size/r.Point, 1)
	recorders := make([]*harness.Recorder, r.Point)
	err = r.Time(share*r.Point, func() error {
		return workload.Parallel(l, r.Point, func(worker int, s engines.Session) error {
			recorders[worker] = harness.NewRecorder()
			return l.overwrite(s, l.owned(r, worker), share, recorders[worker])
		})
	})
	if err != nil {
		return err
	}
	r.Latencies(recorders...)
	r.Count("write amplification", r.WrittenBytes()/float64(share*r.Point*(l.data.KeyBytes+l.data.ValueBytes)))
	r.Count("rotations", l.Counters()["rotations"]-before)
	return l.verify(r)
}

// owned draws from the keys of one worker.
func (l *loaded) owned(r *harness.Run, worker int) func() int {
	random := rand.New(rand.NewPCG(r.Seed, uint64(worker)))
	return func() int { return random.IntN(l.data.Count()/r.Point)*r.Point + worker }
}

func (l *loaded) overwrite(s engines.Session, next func() int, count int, recorder *harness.Recorder) error {
	value := make([]byte, l.data.ValueBytes)
	for n := range count {
		i := next()
		l.last[i] = uint32(n)
		began := time.Now()
		if err := s.Put(l.data.Key(i), l.data.Value(value, n)); err != nil {
			return fmt.Errorf("put %d: %w", n, err)
		}
		recorder.Record(time.Since(began))
	}
	return nil
}

// arrivals is a workload of puts and gets that arrive at a fixed rate whatever the engine does: an open loop.
type arrivals struct{ contender }

// arrivingCallers take the arrivals from one queue.
const arrivingCallers = 4

// run has r.Size operations arrive in each second for the run's window, nine gets in ten.
func (o arrivals) run(r *harness.Run) error {
	l, err := loadedEngine(r, o.contender, engines.Options{BufferBytes: overwriteBuffer}, standard)
	if err != nil {
		return err
	}
	callers := make([]*caller, arrivingCallers)
	for i := range callers {
		s, err := l.Session()
		if err != nil {
			return err
		}
		defer func() { _ = s.Close() }() // its work is done
		callers[i] = &caller{loaded: l, session: s, random: rand.New(rand.NewPCG(r.Seed, uint64(i))), number: i, value: make([]byte, l.data.ValueBytes)}
	}
	var latencies []*harness.Recorder
	var late *harness.Recorder
	rate := float64(r.Point) * 1000
	err = r.Time(max(int(rate*r.Window.Seconds()), 1), func() (err error) {
		latencies, late, err = harness.OpenLoop(rate, r.Window, arrivingCallers, func(i int) error { return callers[i].call() })
		return err
	})
	if err != nil {
		return err
	}
	r.Latencies(latencies...)
	r.Lateness(late)
	return l.verify(r)
}

// caller does one of nine gets and a put after the other.
type caller struct {
	*loaded
	session engines.Session
	random  *rand.Rand
	number  int
	calls   int
	value   []byte
}

func (c *caller) call() error {
	c.calls++
	i := c.random.IntN(c.data.Count()/arrivingCallers)*arrivingCallers + c.number // its own keys: what they hold is known
	if c.calls%10 == 0 {
		c.last[i] = uint32(c.calls)
		return c.session.Put(c.data.Key(i), c.data.Value(c.value, c.calls))
	}
	got, found, err := c.session.Get(c.value[:0], c.data.Key(i))
	if err == nil && (!found || binary.LittleEndian.Uint64(got) != uint64(c.last[i])) {
		err = fmt.Errorf("key %d: wrong value", i)
	}
	return err
}
