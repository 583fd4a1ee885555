package scenarios

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
)

// contender is an engine as an arm: its name in results, and how to open it.
type contender struct {
	name string
	open engines.Open
}

// Contenders, ours first.
var (
	ours    = contender{"epochkv", engines.EpochKV}
	pebble  = contender{"pebble", engines.Pebble}
	badger  = contender{"badger", engines.Badger}
	bbolt   = contender{"bbolt", engines.Bbolt}
	bareLog = contender{"bare loop", engines.BareLog}
)

// arms makes one arm of each contender.
func arms(run func(contender) func(*harness.Run) error, contenders ...contender) (out []harness.Arm) {
	for _, c := range contenders {
		out = append(out, harness.Arm{Name: c.name, Run: run(c)})
	}
	return out
}

// loaded is an engine with data, shared by the runs of a stage.
type loaded struct {
	engines.Engine
	data *workload.Data
	last []uint32       // the number that each key's value begins with
	zipf *workload.Zipf // draws of the keys with YCSB's skew
}

// smokeBuffer is less to lay out than the buffers are that a measurement needs.
const smokeBuffer = 8 << 20

// loadedEngine opens an engine, loads r.Load pairs, and empties its write buffers, so that reads find the pairs in tables and trees.
func loadedEngine(r *harness.Run, c contender, o engines.Options, s workload.Shape) (*loaded, error) {
	if r.Smoke {
		o.BufferBytes = smokeBuffer
	}
	key := fmt.Sprintf("%s with %d keys", c.name, r.Load)
	if o.CacheBytes+o.BufferBytes > 0 {
		key += fmt.Sprintf(", cache %d MiB, buffers %d MiB", o.CacheBytes>>20, o.BufferBytes>>20)
	}
	return harness.Shared(r, key, func(dir string) (*loaded, error) {
		o.Dir = dir
		e, err := c.open(o)
		if err != nil {
			return nil, err
		}
		l := &loaded{Engine: e, data: workload.NewSorted(r.LoadSeed, r.Load, s), last: make([]uint32, r.Load)}
		l.zipf = workload.NewZipf(nil, r.Load, workload.SkewYCSB) // the sum that it takes is long
		for i := range l.last {
			l.last[i] = uint32(i)
		}
		if err := errors.Join(l.data.Load(e), e.Settle()); err != nil {
			return nil, errors.Join(err, e.Close())
		}
		return l, nil
	})
}

// proveSettled proves, for our engine, that every key is read from the tree.
func (l *loaded) proveSettled(r *harness.Run) error {
	counters := l.Counters()
	inTree, known := counters["keys in tree"]
	if !known {
		return nil
	}
	count := float64(l.data.Count())
	return errors.Join(r.Prove("keys in tree", inTree, count, count), r.Prove("keys in memtables", counters["keys in memtables"], 0, 0))
}

// verify compares a spread of the keys with their last values.
func (l *loaded) verify(r *harness.Run) (err error) {
	s, err := l.Session()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	const sampled = 5000
	buffer, expected := make([]byte, 0, l.data.ValueBytes), make([]byte, l.data.ValueBytes)
	right, want := 0, 0
	for i := 0; i < len(l.last); i += max(len(l.last)/sampled, 1) {
		got, found, err := s.Get(buffer[:0], l.data.Key(i))
		if err != nil {
			return err
		}
		want++
		if found && bytes.Equal(got, l.data.Value(expected, int(l.last[i]))) {
			right++
		}
		buffer = got
	}
	return r.Verified(right, want)
}

// draw makes the generator of the keys that one worker asks for.
func (l *loaded) draw(r *harness.Run, worker int, zipf bool) func() int {
	random := rand.New(rand.NewPCG(r.Seed, uint64(worker)))
	if zipf {
		return l.zipf.With(random).Next
	}
	return func() int { return random.IntN(l.data.Count()) }
}
