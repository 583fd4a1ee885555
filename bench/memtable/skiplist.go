// Package memtable sets the memtable beside others': Badger's skiplist for speed, Pebble for what iteration yields (a test).
package memtable

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/dgraph-io/badger/v4/skl"
	"github.com/dgraph-io/badger/v4/y"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

const (
	entries    = 500_000
	valueBytes = 100
)

// Scenarios lists them in the order in which they run.
func Scenarios() []harness.Scenario {
	const epochkv, badger = "epochkv", "badger skl"
	scenario := func(name, about string, get bool, figures ...harness.Figure) harness.Scenario {
		arm := func(name string, open func(count int) (table, error)) harness.Arm {
			return harness.Arm{Name: name, Run: trial{open, get}.run}
		}
		return harness.Scenario{
			Name: name, About: about, Unit: "entries", Axis: harness.Axis{Name: "goroutines", Points: []int{1, 2, 8}}, Size: entries, Weight: 1.5,
			Arms: []harness.Arm{arm(epochkv, newOurs), arm(badger, newBadger)}, Figures: figures,
		}
	}
	twice := harness.Figure{Arm: epochkv, Against: badger, AtLeast: 2}
	inserts, gets := twice, twice
	inserts.Source = "insert at least 2 times Badger's skl package [1352, 779, 711 ns]"
	gets.Source = "lookup at least 2 times Badger's skl package [1808, 830, 760 ns]"
	return []harness.Scenario{
		scenario("memtable-insert", "Random keys into an empty memtable, without log or commit.", false, inserts),
		scenario("memtable-get", "Every key of a memtable looked up in another random order.", true, gets,
			harness.Figure{Arm: epochkv, Measure: harness.MeasureAllocs, AtMost: 0.01, Source: "get 0 allocations"}),
	}
}

// input is what both arms insert: the same random keys, in the form that each takes without further work.
type input struct {
	bodies []*batch.Body // single-put bodies, as the log holds them
	keys   [][]byte      // internal keys: keyspace byte and 16 random bytes
	badger [][]byte      // the same keys with Badger's timestamp suffix
}

func makeInput(seed uint64, count int) (*input, error) {
	random := rand.New(rand.NewPCG(seed, 2))
	in := &input{}
	var b batch.Builder
	value := make([]byte, valueBytes)
	for i := range count {
		var user [16]byte
		binary.BigEndian.PutUint64(user[:], random.Uint64())
		binary.BigEndian.PutUint64(user[8:], random.Uint64())
		b.Reset()
		b.Set(keys.SpaceUser, user[:], value)
		body, err := b.Finish()
		if err != nil {
			return nil, err
		}
		key := keys.Append(nil, keys.SpaceUser, user[:])
		in.bodies = append(in.bodies, batch.Contiguous(bytes.Clone(body.Bytes())))
		in.keys = append(in.keys, key)
		in.badger = append(in.badger, y.KeyWithTs(key, uint64(i+1)))
	}
	return in, nil
}

// table is one memtable under test.
type table interface {
	insert(in *input, from, to int) error
	get(in *input, i int) bool
	free() error
}

type ours struct{ t *memtable.Table }

func newOurs(count int) (table, error) {
	t, err := memtable.New(memtable.Config{Bytes: max(count*256, 1<<20), Prefix: []byte{byte(keys.SpaceUser)}})
	return ours{t}, err
}

func (a ours) insert(in *input, from, to int) error {
	var w memtable.Inserter
	for i := from; i < to; i++ {
		body := in.bodies[i]
		if err := a.t.Secure(&w, memtable.MaxSize(body)); err != nil {
			return err
		}
		if err := a.t.Apply(&w, body, keys.Epoch(i+1), false); err != nil {
			return err
		}
	}
	return nil
}

func (a ours) get(in *input, i int) bool {
	v, ok := a.t.Get(in.keys[i], keys.MaxEpoch)
	return ok && len(v.Value) == valueBytes
}

func (a ours) free() error { return a.t.Free() }

type badger struct{ s *skl.Skiplist }

func newBadger(count int) (table, error) {
	return badger{skl.NewSkiplist(max(int64(count)*512, 1<<20))}, nil
}

func (a badger) insert(in *input, from, to int) error {
	value := make([]byte, valueBytes)
	for i := from; i < to; i++ {
		a.s.Put(in.badger[i], y.ValueStruct{Value: value})
	}
	return nil
}

func (a badger) get(in *input, i int) bool { return len(a.s.Get(in.badger[i]).Value) == valueBytes }

func (a badger) free() error {
	a.s.DecrRef()
	return nil
}

// trial times inserts, or gets.
type trial struct {
	open func(count int) (table, error)
	gets bool
}

func (o trial) run(r *harness.Run) (err error) {
	in, err := makeInput(r.Seed, r.Size)
	if err != nil {
		return err
	}
	t, err := o.open(r.Size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.free()) }()
	order := rand.New(rand.NewPCG(r.Seed, 3)).Perm(r.Size)
	insert := func() error {
		return parallel(r.Point, r.Size, func(from, to int) error { return t.insert(in, from, to) })
	}
	get := func() error {
		return parallel(r.Point, r.Size, func(from, to int) error {
			for _, i := range order[from:to] {
				if !t.get(in, i) {
					return fmt.Errorf("entry %d is lost", i)
				}
			}
			return nil
		})
	}
	first, then := insert, get // both are done, and one is timed; the other is the check, or what there is to look up
	if o.gets {
		err = errors.Join(first(), r.Time(r.Size, then))
	} else {
		err = errors.Join(r.Time(r.Size, first), then())
	}
	if err != nil {
		return err
	}
	return r.Verified(r.Size, r.Size)
}

// parallel cuts [0, n) into parts for g goroutines and waits for them.
func parallel(g, n int, work func(from, to int) error) error {
	errs := make([]error, g)
	var wait sync.WaitGroup
	for p := range g {
		wait.Go(func() { errs[p] = work(p*n/g, (p+1)*n/g) })
	}
	wait.Wait()
	return errors.Join(errs...)
}
