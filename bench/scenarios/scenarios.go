// Package scenarios declares what is measured: per scenario its workload, its arms, and the figures that the project has
// promised. Running them is the harness's business.
//
// Unless a scenario says otherwise, keys are 16 random bytes and values 100; the same seed gives the same keys to every
// arm of a round. After the timed section a sample of the keys is read back and compared.
package scenarios

import (
	"math"
	"slices"

	"epochkv/bench/engines"
	"epochkv/bench/harness"
	"epochkv/bench/workload"
)

// Peers are the module paths whose versions belong in a report.
var Peers = []string{"github.com/cockroachdb/pebble/v2", "github.com/dgraph-io/badger/v4", "go.etcd.io/bbolt"}

// All lists every scenario in the order in which they run.
func All() []harness.Scenario {
	return slices.Concat(writes(), []harness.Scenario{replay()}, reads())
}

const million = 1_000_000

// allocsMax hides what goroutines and background work allocate, and nothing that each operation does.
const allocsMax = 0.01

// writes are single and batched puts under both durabilities.
func writes() []harness.Scenario {
	writers := harness.Axis{Name: "writers", Points: []int{1, 2, 4, 8}}
	standard := workload.Shape{KeyBytes: 16, ValueBytes: 100}
	return []harness.Scenario{
		{
			Name: "put-async", About: "Single puts, acknowledged when visible; the log is synced in the background.",
			Unit: "puts", Axis: writers, Size: million,
			Arms: []harness.Arm{
				{Name: "epochkv", Run: puts{open: engines.EpochKV, shape: standard, proof: oneCommitPerPut}.run},
				{Name: "pebble", Run: puts{open: engines.Pebble, shape: standard}.run},
				{Name: "badger", Points: []int{1}, Run: puts{open: engines.Badger, shape: standard}.run},
			},
			Figures: []harness.Figure{{Arm: "epochkv", Against: "pebble", AtLeast: 2, Source: "at least 2 times Pebble v2 without sync"}},
		},
		mutex("w4-append-4MiB", 4<<20, writers),
		mutex("w4-append-64MiB", 64<<20, writers),
		mutexSync(),
		{
			Name: "put-sync-lone", About: "Durable puts by one writer, against the floor: one pwrite and one fdatasync each.",
			Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{1}}, Size: 15_000,
			Arms: []harness.Arm{
				{Name: "epochkv", Run: puts{open: engines.EpochKV, options: engines.Options{Sync: true}, shape: standard, proof: everyPutSynced, latency: true}.run},
				{Name: "bare loop", Run: puts{open: engines.BareLog, shape: standard, proof: oneSyncPerPut, latency: true, unreadable: true}.run},
				{Name: "pebble", Run: puts{open: engines.Pebble, options: engines.Options{Sync: true}, shape: standard, latency: true}.run},
			},
			Figures: []harness.Figure{{Arm: "epochkv", Against: "bare loop", AtLeast: 0.85, Source: "at least 0.85 of a bare pwrite + fdatasync loop"}},
		},
		{
			Name: "put-sync", About: "Durable puts by many writers: group commit.",
			Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{16, 64}}, Size: 250_000,
			Arms: []harness.Arm{
				{Name: "epochkv", Run: puts{open: engines.EpochKV, options: engines.Options{Sync: true}, shape: standard, proof: oneCommitPerPut, latency: true}.run},
				{Name: "pebble", Run: puts{open: engines.Pebble, options: engines.Options{Sync: true}, shape: standard, latency: true}.run},
			},
			Figures: []harness.Figure{{Arm: "epochkv", Against: "pebble", AtLeast: 1.3, Points: []int{64}, Source: "64 writers at least 1.3 times Pebble"}},
		},
		{
			Name: "overwrite", About: "Random overwrites of 100,000 keys, ten times over: old versions pile up and have to go.",
			Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{1, 2}}, Size: million,
			Arms: []harness.Arm{
				{Name: "epochkv", Run: overwrites{open: engines.EpochKV, shape: standard}.run},
				{Name: "pebble", Run: overwrites{open: engines.Pebble, shape: standard}.run},
			},
			Figures: []harness.Figure{{Arm: "epochkv", Against: "pebble", AtLeast: 1, Source: "sustained overwrites at least at Pebble's rate"}},
		},
		{
			Name: "batch-async", About: "Atomic batches of 1000 random keys, acknowledged when visible; counted per key.",
			Unit: "keys", Axis: harness.Axis{Name: "writers", Points: []int{1, 2}}, Size: million,
			Arms: []harness.Arm{
				{Name: "epochkv", Run: puts{open: engines.EpochKV, shape: standard, batch: 1000}.run},
				{Name: "pebble", Run: puts{open: engines.Pebble, shape: standard, batch: 1000}.run},
			},
			Figures: []harness.Figure{{Arm: "epochkv", Against: "pebble", AtLeast: 2, Points: []int{1}, Source: "batches of 1000 at least 2 times Pebble per key"}},
		},
	}
}

// mutex compares the commit path with itself under one mutex over append and insert, with the origin's small records.
func mutex(name string, segment int64, writers harness.Axis) harness.Scenario {
	small := workload.Shape{KeyBytes: 20, ValueBytes: 12}
	options := engines.Options{BufferBytes: segment}
	serial := options
	serial.Serial = true
	const source = "the origin's parameters: 20-byte keys, 12-byte values"
	return harness.Scenario{
		Name: name, About: "The mutex-free commit path against the same path under one mutex (Jungle's fast path, origin +53 to +112 %).",
		Unit: "puts", Axis: writers, Size: million,
		Arms: []harness.Arm{
			{Name: "mutex-free", Run: puts{open: engines.EpochKV, options: options, shape: small, proof: oneCommitPerPut}.run},
			{Name: "one mutex", Run: puts{open: engines.EpochKV, options: serial, shape: small, proof: oneCommitPerPut}.run},
		},
		Figures: []harness.Figure{
			{Arm: "mutex-free", Against: "one mutex", Points: []int{1}, AtLeast: 0.95, Source: source},
			{Arm: "mutex-free", Against: "one mutex", Points: []int{2}, AtLeast: 1, Source: source},
			{Arm: "mutex-free", Against: "one mutex", Points: []int{4, 8}, AtLeast: 1.2, Source: source},
			{Arm: "mutex-free", AtLeast: 2 * 540_000, Source: "twice what Jungle reaches with its fast path"},
		},
	}
}

// mutexSync is the same comparison with every put durable: what the mutex costs beside a sync.
func mutexSync() harness.Scenario {
	small := workload.Shape{KeyBytes: 20, ValueBytes: 12}
	arm := func(name string, serial bool) harness.Arm {
		return harness.Arm{Name: name, Run: puts{
			open: engines.EpochKV, options: engines.Options{Sync: true, Serial: serial}, shape: small, proof: oneCommitPerPut, latency: true,
		}.run}
	}
	return harness.Scenario{
		Name: "w4-append-sync", About: "The same with every put durable: group commit behind either path.",
		Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{8, 64}}, Size: 100_000,
		Arms: []harness.Arm{arm("mutex-free", false), arm("one mutex", true)},
	}
}

// oneCommitPerPut proves that no put shared a commit with another or was lost.
func oneCommitPerPut(r *harness.Run, counters map[string]float64) error {
	r.Count("rotations", counters["rotations"])
	r.Count("log syncs", counters["log syncs"])
	return r.Prove("commits", counters["commits"], float64(r.Size), float64(r.Size))
}

// everyPutSynced proves that a lone writer's puts were synced one by one; the collector of async commits may add a few syncs.
func everyPutSynced(r *harness.Run, counters map[string]float64) error {
	return r.Prove("log syncs", counters["log syncs"], float64(r.Size), math.Inf(1))
}

func oneSyncPerPut(r *harness.Run, counters map[string]float64) error {
	return r.Prove("syncs", counters["syncs"], float64(r.Size), float64(r.Size))
}

// reads are point reads and short scans over what was just loaded.
func reads() []harness.Scenario {
	threads := harness.Axis{Name: "threads", Points: []int{1, 2}}
	standard := workload.Shape{KeyBytes: 16, ValueBytes: 100}
	arms := func(run func(open engines.Open) func(*harness.Run) error) []harness.Arm {
		return []harness.Arm{
			{Name: "epochkv", Run: run(engines.EpochKV)},
			{Name: "pebble", Run: run(engines.Pebble)},
			{Name: "badger", Run: run(engines.Badger)},
			{Name: "bbolt", Run: run(engines.Bbolt)},
		}
	}
	return []harness.Scenario{
		{
			Name: "get", About: "Random point reads of 500,000 keys that are all cached, from tables and trees, the value copied out.",
			Unit: "gets", Axis: threads, Size: million,
			Arms: arms(func(open engines.Open) func(*harness.Run) error { return gets{open, standard, false}.run }),
			Figures: []harness.Figure{
				{Arm: "epochkv", Against: "bbolt", AtLeast: 2, Source: "cached point reads at least 2 times bbolt"},
				{Arm: "epochkv", Against: "pebble", AtLeast: 3, Source: "and 3 times Pebble"},
				{Arm: "epochkv", Points: []int{1}, AtLeast: 1_190_000, Source: "not below LMDB in C with 1"},
				{Arm: "epochkv", Points: []int{2}, AtLeast: 2_650_000, Source: "not below LMDB in C with 2"},
				{Arm: "epochkv", Against: "epochkv", AgainstAt: 1, Points: []int{2}, AtLeast: 1.9, Source: "2 threads at least 1.9 times 1"},
				{Arm: "epochkv", Measure: harness.MeasureAllocs, AtMost: allocsMax, Source: "0 allocations per read"},
			},
		},
		{
			Name: "get-zipf", About: "The same with YCSB's skew: one key in a hundred gets more than half of the reads.",
			Unit: "gets", Axis: threads, Size: million,
			Arms: arms(func(open engines.Open) func(*harness.Run) error { return gets{open, standard, true}.run }),
		},
		{
			Name: "scan", About: "Scans of 100 entries from random starts, keys and values copied out.",
			Unit: "scans", Axis: threads, Size: 50_000,
			Arms: arms(func(open engines.Open) func(*harness.Run) error { return scans{open, standard}.run }),
			Figures: []harness.Figure{
				{Arm: "epochkv", Against: "pebble", AtLeast: 2, Source: "scans of 100 at least 2 times Pebble"},
				{Arm: "epochkv", Points: []int{1}, AtLeast: 198_000, Source: "not below LMDB's copying with 1"},
				{Arm: "epochkv", Points: []int{2}, AtLeast: 434_000, Source: "not below LMDB's copying with 2"},
				{Arm: "epochkv", Against: "epochkv", AgainstAt: 1, Points: []int{2}, AtLeast: 1.9, Source: "2 threads at least 1.9 times 1"},
			},
		},
		{
			Name: "scan-all", About: "Every thread visits every entry once, keys and values copied out.",
			Unit: "entries", Axis: threads, Size: loaded,
			Arms:    arms(func(open engines.Open) func(*harness.Run) error { return scans{open, standard}.whole }),
			Figures: []harness.Figure{{Arm: "epochkv", Points: []int{1}, AtLeast: 28_000_000, Source: "full scan at least 28 M entries/s"}},
		},
	}
}
