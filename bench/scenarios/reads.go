package scenarios

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/lmdb"
	"github.com/epochkv/epochkv/bench/workload"
)

// reading is a workload that leaves what is loaded as it is.
type reading struct {
	contender
	options engines.Options
	cold    bool // the data is larger than the cache, and the OS page cache is dropped before
	zipf    bool // a few keys get most of the reads
	scan    int  // entries of a scan; 0 reads single keys
}

func (g reading) run(r *harness.Run) error {
	l, err := g.prepare(r)
	if err != nil {
		return err
	}
	share := max(r.Size/r.Point, 1)
	draws := make([]func() int, r.Point)
	for worker := range draws {
		draws[worker] = l.draw(r, worker, g.zipf)
	}
	err = r.Time(share*r.Point, func() error {
		return workload.Parallel(l, r.Point, func(worker int, s engines.Session) error {
			if g.scan > 0 {
				return l.scans(s, draws[worker], share, g.scan)
			}
			return l.gets(s, draws[worker], share)
		})
	})
	if err != nil {
		return err
	}
	return l.verify(r)
}

// whole has each thread visit everything, as often as the size says; or the beginning of it.
func (g reading) whole(r *harness.Run) error {
	l, err := g.prepare(r)
	if err != nil {
		return err
	}
	entries, rounds := min(r.Size, l.data.Count()), max(r.Size/l.data.Count(), 1)
	counts := make([]int, r.Point)
	err = r.Time(rounds*entries*r.Point, func() error {
		return workload.Parallel(l, r.Point, func(worker int, s engines.Session) (err error) {
			for range rounds {
				if counts[worker], err = s.Scan(nil, nil, entries); err != nil {
					return err
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	return r.Verified(slices.Min(counts), entries)
}

func (g reading) prepare(r *harness.Run) (*loaded, error) {
	o := g.options
	if g.cold {
		o.CacheBytes = max(int64(r.Load)*coldCache/coldLoad, coldCacheMin)
	}
	l, err := loadedEngine(r, g.contender, o, standard)
	if err != nil {
		return nil, err
	}
	if g.cold {
		return l, workload.DropPageCache(r.SharedDir())
	}
	return l, l.proveSettled(r)
}

// gets checks each value against its key's number: the check is a part of what all arms pay.
func (l *loaded) gets(s engines.Session, next func() int, count int) error {
	buffer, expected := make([]byte, 0, l.data.ValueBytes), make([]byte, l.data.ValueBytes)
	for range count {
		i := next()
		got, found, err := s.Get(buffer[:0], l.data.Key(i))
		if err != nil {
			return err
		}
		if !found || !bytes.Equal(got[:8], l.data.Value(expected, int(l.last[i]))[:8]) {
			return fmt.Errorf("key %d: wrong value", i)
		}
	}
	return nil
}

// scans visits so many entries from each of the keys.
func (l *loaded) scans(s engines.Session, next func() int, count, entries int) error {
	buffer := make([]byte, 0, l.data.KeyBytes+l.data.ValueBytes)
	for range count {
		i := next()
		n, err := s.Scan(buffer, l.data.Key(i), entries)
		if err != nil {
			return err
		}
		if want := min(entries, l.data.Count()-i); n != want { // the pairs come in the order of their keys
			return fmt.Errorf("a scan of %d from key %d visited %d", entries, i, n)
		}
	}
	return nil
}

// The data of cold reads and the cache it is read through, which shrink together.
const (
	coldLoad     = 5_000_000
	coldCache    = 64 << 20
	coldCacheMin = 4 << 20 // below, engines round up
)

// lmdbInC is the arm of the C library.
var lmdbInC = lmdb.Arm(lmdb.Get).Name

// cachedLoad is how many keys the cached reads have.
const cachedLoad = 1_000_000

// reads are point reads, short scans and whole scans over data that is all cached.
func reads() []harness.Scenario {
	threads := harness.Axis{Name: "threads", Points: []int{1, 2}}
	four := func(run func(contender) func(*harness.Run) error) []harness.Arm {
		all := arms(run, ours, pebble, badger, bbolt)
		all[2].Part = 4
		return all
	}
	single := func(g reading) func(contender) func(*harness.Run) error {
		return func(c contender) func(*harness.Run) error { g.contender = c; return g.run }
	}
	twice := harness.Figure{Arm: ours.name, Against: ours.name, AgainstAt: 1, Points: []int{2}, AtLeast: 1.9, Source: "2 threads at least 1.9 times 1"}
	scenario := func(name, about, unit string, size int, weight float64, arms []harness.Arm, figures ...harness.Figure) harness.Scenario {
		return harness.Scenario{
			Name: name, About: about, Unit: unit, Axis: threads, Size: size, Load: cachedLoad, Stage: "cached reads", Weight: weight, Arms: arms, Figures: figures,
		}
	}
	return []harness.Scenario{
		scenario("get", "Random point reads of a million keys that are all cached, from tables and trees, the value copied out.", "gets", 2_000_000, 3,
			append(four(single(reading{})), lmdb.Arm(lmdb.Get)),
			harness.Figure{Arm: ours.name, Against: bbolt.name, AtLeast: 2, Source: "cached point reads at least 2 times bbolt [615k, 949k/s]"},
			harness.Figure{Arm: ours.name, Against: pebble.name, AtLeast: 3, Source: "and 3 times Pebble [430k, 740k/s]"},
			harness.Figure{Arm: ours.name, Against: lmdbInC, AtLeast: 1, Source: "not below LMDB in C, value copied out [1.19 M, 2.65 M/s]"},
			twice,
			harness.Figure{Arm: ours.name, Measure: harness.MeasureAllocs, AtMost: allocsMax, Source: "0 allocations per read"}),
		scenario("get-zipf", "The same with YCSB's skew: one key in a hundred gets more than half of the reads.", "gets", 2_000_000, 1.5,
			four(single(reading{zipf: true}))),
		scenario("scan", "Scans of 100 entries from random starts, keys and values copied out.", "scans", 200_000, 2,
			append(four(single(reading{scan: 100})), lmdb.Arm(lmdb.Scan)),
			harness.Figure{Arm: ours.name, Against: pebble.name, AtLeast: 2, Source: "scans of 100 at least 2 times Pebble [100k/s]"},
			harness.Figure{Arm: ours.name, Against: lmdbInC, AtLeast: 1, Source: "not below LMDB's copying [198k, 434k/s]"},
			twice),
		scenario("scan-all", "Every thread visits every entry, keys and values copied out.", "entries", 3*cachedLoad, 2,
			append(four(func(c contender) func(*harness.Run) error { return reading{contender: c}.whole }), lmdb.Arm(lmdb.All)),
			harness.Figure{Arm: ours.name, Against: lmdbInC, Points: []int{1}, AtLeast: 1, Source: "full scan at least LMDB's copying [28 M entries/s]"}),
	}
}

// coldReads are reads of data nine times as large as the cache. Badger and bbolt map their files, and what is mapped the kernel
// does not forget: they have no part in it.
func coldReads() []harness.Scenario {
	direct := ours
	direct.name = "epochkv, direct I/O"
	contenders := func(g reading) (out []harness.Arm) {
		for _, c := range []contender{ours, direct, pebble} {
			g.contender, g.cold, g.options.Direct = c, true, c.name == direct.name
			out = append(out, harness.Arm{Name: c.name, Run: g.run})
		}
		return out
	}
	scenario := func(name, about, unit string, size int, arms []harness.Arm, atLeast float64, source string) harness.Scenario {
		s := harness.Scenario{
			Name: name, About: about + " of data nine times as large as the cache, the OS page cache dropped before each run (half of it in fact: all 5 M keys and 64 MiB with -large).", Unit: unit,
			Axis: harness.Axis{Name: "threads", Points: []int{1, 8}}, Size: size, Load: coldLoad / 2, Stage: "cold reads", Weight: 2, Arms: arms,
			Large: harness.Sizes{Size: 2 * size, Load: coldLoad},
		}
		for _, arm := range []string{ours.name, direct.name} {
			s.Figures = append(s.Figures, harness.Figure{Arm: arm, Against: pebble.name, AtLeast: atLeast, Source: source})
		}
		return s
	}
	return []harness.Scenario{
		scenario("cold-get", "Random gets", "gets", 10_000, contenders(reading{}), 1.3, "at least 1.3 times Pebble with the same block cache [13k, 31k/s]"),
		scenario("cold-scan", "Scans of 100 from random keys", "scans", 5_000, contenders(reading{scan: 100}), 2, "at least 2 times Pebble [17k, 39k/s]"),
	}
}
