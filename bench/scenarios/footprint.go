package scenarios

import (
	"bytes"
	"errors"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
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
