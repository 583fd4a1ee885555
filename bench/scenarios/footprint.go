package scenarios

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"epochkv/bench/engines"
	"epochkv/bench/harness"
	"epochkv/bench/workload"
	"epochkv/internal/mvcc"
	"epochkv/internal/storage"
)

// footprint is what each engine takes of memory and disk for the same work, each run in a process of its own.
func footprint() harness.Scenario {
	arm := func(c contender) harness.Arm {
		return harness.Arm{Name: c.name, Isolated: true, Run: occupied{c}.run}
	}
	return harness.Scenario{
		Name: "footprint", About: "Random keys put in batches of 100 and each read once, with 64 MiB of cache and buffers of 16 MiB: memory, files and bytes written.",
		Unit: "keys", Axis: harness.Axis{Name: "processes", Points: []int{1}}, Size: million, Weight: 2, Show: harness.MeasureResident,
		Arms: []harness.Arm{arm(ours), arm(pebble), arm(badger), arm(bbolt)},
	}
}

type occupied struct{ contender }

func (o occupied) run(r *harness.Run) (err error) {
	e, err := o.open(engines.Options{Dir: r.Dir, CacheBytes: 64 << 20, BufferBytes: 16 << 20})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	d := workload.NewData(r.Seed, r.Size, standard)
	right := 0
	err = r.Time(r.Size, func() error {
		return workload.Parallel(e, 1, func(_ int, s engines.Session) error {
			if err := (puts{shape: standard, batch: 100}).batches(d, s, 0, 1); err != nil {
				return err
			}
			var buffer []byte
			expected := make([]byte, d.ValueBytes)
			for i := range d.Count() {
				got, found, err := s.Get(buffer[:0], d.Key(i))
				if err != nil {
					return err
				}
				if found && bytes.Equal(got, d.Value(expected, i)) {
					right++
				}
				buffer = got
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	r.Count("written over data", r.WrittenBytes()/float64(r.Size*(standard.KeyBytes+standard.ValueBytes)))
	return r.Verified(right, r.Size)
}

const (
	budgetMiB  = 256
	budgetOpen = "ms to open"
)

// budget is a database that is larger than what its memory is bounded to.
func budget() harness.Scenario {
	const arm = "epochkv"
	return harness.Scenario{
		Name: "memory-budget", About: fmt.Sprintf("Random keys loaded, all read back, scanned, and the store opened again, with memory bounded to %d MiB (10 M keys with -large).", budgetMiB),
		Unit: "keys", Axis: harness.Axis{Name: "MiB", Points: []int{budgetMiB}}, Size: 2 * million, Weight: 4, Show: harness.MeasureResident,
		Large: harness.Sizes{Size: 10 * million},
		Arms:  []harness.Arm{{Name: arm, Isolated: true, Run: runBudget}},
		Figures: []harness.Figure{
			{Arm: arm, Measure: harness.MeasureResident, AtMost: 1.25 * budgetMiB, Source: "peak resident memory at most 1.25 times the budget throughout"},
			{Arm: arm, Measure: budgetOpen, AtMost: 200, Source: "clean open under 200 ms"},
		},
	}
}

// computedKey is key i: computed, since a table of ten million would itself break the budget.
func computedKey(dst []byte, seed uint64, i int) []byte {
	x := mix(seed<<32 + uint64(i))
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(dst, x), mix(x))
}

// mix is the finalizer of splitmix64: a permutation, so that no two keys are the same.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func openBudget(r *harness.Run) (*workload.Store, error) {
	return workload.OpenStore(mvcc.Options{Durability: mvcc.DurabilityAsync, Storage: storage.Options{Dir: r.Dir, MemoryBytes: int64(r.Point) << 20}})
}

func runBudget(r *harness.Run) (err error) {
	store, err := openBudget(r)
	if err != nil {
		return err
	}
	right, visited := 0, 0
	err = r.Time(r.Size, func() (err error) {
		if err := fillBudget(store, r); err != nil {
			return err
		}
		if right, err = readBudget(store, r); err != nil {
			return err
		}
		visited, err = scanAll(store)
		return err
	})
	if err := errors.Join(err, store.Close()); err != nil {
		return err
	}
	began := time.Now()
	if store, err = openBudget(r); err != nil {
		return err
	}
	r.Count(budgetOpen, time.Since(began).Seconds()*1000)
	if err := errors.Join(r.Prove("records replayed", float64(store.Recovery().Records), 0, 0), store.Close()); err != nil {
		return err
	}
	return r.Verified(right+visited, 2*r.Size)
}

func fillBudget(store *workload.Store, r *harness.Run) error {
	var w mvcc.Write
	var name []byte
	value := make([]byte, standard.ValueBytes)
	for i := 0; i < r.Size; {
		w.Reset()
		for n := 0; n < 100 && i < r.Size; n, i = n+1, i+1 {
			name = computedKey(name[:0], r.Seed, i)
			binary.LittleEndian.PutUint64(value, uint64(i))
			w.Set(name, value)
		}
		if _, err := store.Own.Commit(&w); err != nil {
			return err
		}
	}
	return nil
}

func readBudget(store *workload.Store, r *harness.Run) (right int, err error) {
	var name, buffer []byte
	for i := range r.Size {
		name = computedKey(name[:0], r.Seed, i)
		v, err := store.Own.Get(buffer[:0], name, 0)
		if err != nil {
			return right, err
		}
		if buffer = v.Data; v.Found && binary.LittleEndian.Uint64(buffer) == uint64(i) {
			right++
		}
	}
	return right, nil
}

func scanAll(store *workload.Store) (count int, err error) {
	if _, err := store.Own.View(0); err != nil {
		return 0, err
	}
	defer store.Own.Done()
	cursor, err := store.Own.Scan(mvcc.ScanOptions{})
	if err != nil {
		return 0, err
	}
	defer cursor.Close()
	for cursor.Next() {
		count++
	}
	return count, cursor.Err()
}
