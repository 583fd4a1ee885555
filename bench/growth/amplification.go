package growth

import (
	"fmt"
	"math/rand/v2"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/lmdb"
	"github.com/epochkv/epochkv/bench/workload"
)

const (
	amplificationTimes  = 10 // the data over the memory
	amplificationMemory = 16 << 20
	writtenByAccepted   = "bytes written for each accepted"
)

// amplification overwrites one part of r.Point of the key range at random.
func amplification() harness.Scenario {
	return harness.Scenario{
		Name: "write-amplification", About: fmt.Sprintf("Bytes that the process writes for each byte of keys and values that it accepts, by the part of the key range in which two writers overwrite random keys: a whole, a quarter, and so on. There is %d times as much data as memory, of which half are write buffers (LMDB has the kernel's page cache). What is in write buffers at the end is not counted. An engine's bytes are those that it passes to system calls. Nothing is synced.", amplificationTimes),
		Unit: "puts", Axis: harness.Axis{Name: "parts of the key range, of which one is overwritten", Points: []int{1, 4, 16, 64, 256}}, Size: 500_000, Load: 1_400_000, Fixed: true, Show: writtenByAccepted,
		Large: harness.Sizes{Size: 4_000_000, Load: 5_800_000, Rounds: 1},
		Arms: []harness.Arm{
			{Name: "epochkv", Run: overwrites("epochkv", engines.EpochKV)},
			{Name: "pebble", Run: overwrites("pebble", engines.Pebble)},
			{Name: "lmdb in C", Run: overwritesOfLMDB, Part: 20},
		},
	}
}

const amplificationWriters = 2

// overwrites is the arm of an engine.
func overwrites(name string, open engines.Open) func(*harness.Run) error {
	return func(r *harness.Run) error {
		e, err := harness.Shared(r, name, func(dir string) (*grown, error) { return loadLarger(r, dir, open) })
		if err != nil {
			return err
		}
		part := max(e.data.Count()/r.Point, 1)
		err = r.Time(r.Size, func() error {
			return workload.Parallel(e, amplificationWriters, func(worker int, s engines.Session) error {
				return overwrite(s, e.data, rand.New(rand.NewPCG(r.Seed, uint64(worker))), part, r.Size/amplificationWriters)
			})
		})
		if err != nil {
			return err
		}
		countAmplification(r)
		if err := verify(r, e, e.data); err != nil {
			return err
		}
		return e.Settle() // the next run counts what the process writes: nothing is left to do of this one
	}
}

func countAmplification(r *harness.Run) {
	accepted := r.Size * (grownShape.KeyBytes + grownShape.ValueBytes)
	r.Count(writtenByAccepted, r.WrittenBytes()/float64(accepted))
}

// loadLarger loads more than memory.
func loadLarger(r *harness.Run, dir string, open engines.Open) (*grown, error) {
	memory := max(int64(r.Load*(grownShape.KeyBytes+grownShape.ValueBytes)/amplificationTimes), amplificationMemory)
	return loaded(workload.NewSorted(r.LoadSeed, r.Load, grownShape), func() (engines.Engine, error) {
		return open(engines.Options{Dir: dir, CacheBytes: memory / 2, BufferBytes: memory / 2 / engines.WriteBuffers})
	})
}

func overwritesOfLMDB(r *harness.Run) error {
	p, err := harness.Shared(r, "lmdb", func(dir string) (*lmdb.Process, error) {
		return lmdb.Start(dir, r.Load, grownShape.ValueBytes)
	})
	if err != nil {
		return err
	}
	if _, err := p.Do(lmdb.Parts, 1, r.Point); err != nil {
		return err
	}
	done, err := p.Time(r, lmdb.Put, amplificationWriters, r.Size/amplificationWriters)
	if err != nil {
		return err
	}
	countAmplification(r)
	return r.Verified(done, r.Size/amplificationWriters*amplificationWriters)
}
