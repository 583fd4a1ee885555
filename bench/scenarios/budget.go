package scenarios

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
)

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
		Large: harness.Sizes{Size: 10 * million, Rounds: 3},
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

// openBudget gives the Go heap what kvserver gives it beside the budget.
func openBudget(r *harness.Run) (*workload.Store, error) {
	debug.SetMemoryLimit(int64(r.Point) << 20 / 4)
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
		if _, err := store.Own.Commit(context.Background(), &w); err != nil {
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
	if _, err := store.Own.OpenSnapshot(0); err != nil {
		return 0, err
	}
	defer store.Own.CloseSnapshot()
	return workload.CountScan(store.Own, mvcc.ScanOptions{})
}

const (
	mixedWorkers    = 4
	mixedValueBytes = 1000
	mixedTimes      = 20 // the data over the budget, at full size
)

// mixed is a database far larger than its memory under everything at once.
func mixed() harness.Scenario {
	const arm = "epochkv"
	full := mixedTimes * budgetMiB << 20 / (standard.KeyBytes + mixedValueBytes)
	return harness.Scenario{
		Name: "mixed-budget", About: fmt.Sprintf("Gets, puts of both durabilities, batches and scans at once, with memory bounded to %d MiB and twice as much data (twenty times, for 5 minutes, with -large).", budgetMiB),
		Unit: "operations", Axis: harness.Axis{Name: "MiB", Points: []int{budgetMiB}}, Size: 1, Window: 5 * time.Second, Load: full / 10, Weight: 4, Show: harness.MeasureMax,
		Large: harness.Sizes{Load: full, Window: 5 * time.Minute, Rounds: 1},
		Arms:  []harness.Arm{{Name: arm, Isolated: true, Run: runMixed}},
		Figures: []harness.Figure{
			{Arm: arm, Measure: harness.MeasureResident, AtMost: 1.25 * budgetMiB, Source: "20 times the budget under mixed load for 5 minutes: resident memory at most 1.25 times the budget"},
			{Arm: arm, Measure: harness.MeasureMax, AtMost: 200, Source: "no stall above 200 ms"},
		},
	}
}

func runMixed(r *harness.Run) (err error) {
	store, err := openBudget(r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	workers := make([]*mixer, mixedWorkers)
	for i := range workers {
		session, err := store.Session()
		if err != nil {
			return err
		}
		defer session.Close()
		workers[i] = &mixer{
			Run: r, store: store, session: session, random: rand.New(rand.NewPCG(r.Seed, uint64(i))), value: make([]byte, mixedValueBytes),
			recorder: harness.NewRecorder(),
		}
	}
	for from := 0; from < r.Load; from += 100 {
		if err := workers[0].putAll(from, min(from+100, r.Load)); err != nil {
			return err
		}
	}
	ctx, stop := context.WithTimeout(r, r.Window)
	defer stop()
	errs, count := make([]error, mixedWorkers), 0
	err = r.TimeCounted(func() (int, error) {
		var wait sync.WaitGroup
		for i, w := range workers {
			wait.Go(func() { errs[i] = w.work(ctx) })
		}
		wait.Wait()
		for _, w := range workers {
			count += w.done
		}
		return count, errors.Join(errs...)
	})
	if err != nil {
		return err
	}
	recorders := make([]*harness.Recorder, mixedWorkers)
	for i, w := range workers {
		recorders[i] = w.recorder
	}
	r.Latencies(recorders...)
	r.Count("data over budget", float64(r.Load*(standard.KeyBytes+mixedValueBytes))/float64(r.Point<<20))
	visited, err := scanAll(store)
	if err != nil {
		return err
	}
	return r.Verified(visited, r.Load)
}

// mixer does one worker's part. The value of key i never changes: what is read can be checked.
type mixer struct {
	*harness.Run
	store    *workload.Store
	session  *mvcc.Session
	random   *rand.Rand
	write    mvcc.Write
	recorder *harness.Recorder

	done                int
	name, value, buffer []byte
}

func (m *mixer) work(ctx context.Context) error {
	for ; ctx.Err() == nil; m.done++ {
		i, began := m.random.IntN(m.Load), time.Now()
		var err error
		switch kind := m.random.IntN(100); {
		case kind < 60:
			err = m.get(i)
		case kind < 85:
			err = m.putAll(i, i+1)
		case kind < 90:
			if err = m.putAll(i, i+1); err == nil {
				err = m.store.Wait(m, m.store.Visible(), mvcc.DurabilitySync)
			}
		case kind < 95:
			err = m.putAll(i, min(i+100, m.Load))
		default:
			err = m.scan(i)
		}
		if err != nil {
			return err
		}
		m.recorder.Record(time.Since(began))
	}
	return nil
}

func (m *mixer) get(i int) error {
	m.name = computedKey(m.name[:0], m.Seed, i)
	v, err := m.session.Get(m.buffer[:0], m.name, 0)
	if err != nil {
		return err
	}
	if m.buffer = v.Data; !v.Found || binary.LittleEndian.Uint64(m.buffer) != uint64(i) {
		return fmt.Errorf("key %d: wrong value", i)
	}
	return nil
}

func (m *mixer) putAll(from, to int) error {
	m.write.Reset()
	for i := from; i < to; i++ {
		m.name = computedKey(m.name[:0], m.Seed, i)
		binary.LittleEndian.PutUint64(m.value, uint64(i))
		m.write.Set(m.name, m.value)
	}
	_, err := m.session.Commit(context.Background(), &m.write)
	return err
}

func (m *mixer) scan(i int) error {
	if _, err := m.session.OpenSnapshot(0); err != nil {
		return err
	}
	defer m.session.CloseSnapshot()
	cursor, err := m.session.Scan(mvcc.ScanOptions{Lower: computedKey(m.name[:0], m.Seed, i)})
	if err != nil {
		return err
	}
	defer cursor.Close()
	for n := 0; n < 100 && cursor.Next(); n++ {
		m.buffer = append(m.buffer[:0], cursor.Value()...)
	}
	return cursor.Err()
}
