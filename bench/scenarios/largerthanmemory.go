package scenarios

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
)

const (
	largerBuffers = 8
	largerBuffer  = budgetMiB << 20 / 2 / largerBuffers
	largerTimes   = 10 // the data over the memory, at full size
	largerBatch   = 1000
	largerSample  = 100_000 // keys that are read back
)

// putLargerThanMemory are puts that outlast every buffer: what is written in five minutes has to be merged in them.
func putLargerThanMemory() harness.Scenario {
	full := largerTimes * budgetMiB << 20 / (standard.KeyBytes + standard.ValueBytes)
	run := func(c contender) func(*harness.Run) error { return largerPuts{c}.run }
	return harness.Scenario{
		Name: "put-async-larger", About: fmt.Sprintf("Random overwrites, acknowledged when visible, of as much data as each engine has memory, %d MiB, of which half are write buffers (ten times, for 5 minutes, with -large).", budgetMiB),
		Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{2}}, Size: 1, Window: 5 * time.Second, Load: full / 10, Weight: 3, Show: harness.MeasureP9999,
		Large: harness.Sizes{Load: full, Window: 5 * time.Minute, Rounds: 1},
		Arms:  arms(run, ours, pebble),
		Figures: []harness.Figure{
			{Arm: ours.name, Against: pebble.name, AtLeast: 2, Source: "sustained for 5 minutes at 10 times the memory: at least 2 times Pebble v2"},
		},
	}
}

type largerPuts struct{ contender }

func (p largerPuts) run(r *harness.Run) (err error) {
	e, err := p.open(engines.Options{Dir: r.Dir, CacheBytes: budgetMiB << 20 / 2, BufferBytes: largerBuffer, Buffers: largerBuffers})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	if err := workload.Parallel(e, 1, func(_ int, s engines.Session) error { return fillLarger(r, s) }); err != nil {
		return err
	}
	recorders, counts := make([]*harness.Recorder, r.Point), make([]int, r.Point)
	err = r.TimeCounted(func() (count int, err error) {
		until := time.Now().Add(r.Window)
		err = workload.Parallel(e, r.Point, func(worker int, s engines.Session) (err error) {
			recorders[worker] = harness.NewRecorder()
			counts[worker], err = overwriteLarger(r, s, worker, until, recorders[worker])
			return err
		})
		for _, n := range counts {
			count += n
		}
		return count, err
	})
	if err != nil {
		return err
	}
	r.Latencies(recorders...)
	return workload.Parallel(e, 1, func(_ int, s engines.Session) error { return verifyLarger(r, s) })
}

// fillLarger puts every key.
func fillLarger(r *harness.Run, s engines.Session) error {
	keys, values := make([][]byte, largerBatch), make([][]byte, largerBatch)
	for i := range keys {
		values[i] = make([]byte, standard.ValueBytes)
	}
	for from := 0; from < r.Load; from += largerBatch {
		n := min(largerBatch, r.Load-from)
		for i := range n {
			keys[i] = computedKey(keys[i][:0], r.Seed, from+i)
			binary.LittleEndian.PutUint64(values[i], uint64(from+i))
		}
		if err := s.PutAll(keys[:n], values[:n]); err != nil {
			return err
		}
	}
	return nil
}

// overwriteLarger overwrites random keys. A value begins with its key's number, and goes on with that of its put.
func overwriteLarger(r *harness.Run, s engines.Session, worker int, until time.Time, recorder *harness.Recorder) (count int, err error) {
	random := rand.New(rand.NewPCG(r.Seed, uint64(worker)))
	value := make([]byte, standard.ValueBytes)
	var name []byte
	for began := time.Now(); began.Before(until); count++ {
		i := random.IntN(r.Load)
		name = computedKey(name[:0], r.Seed, i)
		binary.LittleEndian.PutUint64(value, uint64(i))
		binary.LittleEndian.PutUint64(value[8:], uint64(count+1))
		if err := s.Put(name, value); err != nil {
			return count, err
		}
		now := time.Now()
		recorder.Record(now.Sub(began))
		began = now
	}
	return count, nil
}

// verifyLarger reads a sample of the keys.
func verifyLarger(r *harness.Run, s engines.Session) error {
	random := rand.New(rand.NewPCG(r.Seed, 1<<32))
	sample, right := min(largerSample, r.Load), 0
	var name, value []byte
	for range sample {
		i := random.IntN(r.Load)
		name = computedKey(name[:0], r.Seed, i)
		v, found, err := s.Get(value[:0], name)
		if err != nil {
			return err
		}
		if value = v; found && binary.LittleEndian.Uint64(value) == uint64(i) {
			right++
		}
	}
	return r.Verified(right, sample)
}
