// Package scenarios declares what is measured: per scenario its workload, its arms, and the figures that the project has
// promised. Running them is the harness's business.
//
// Unless a scenario says otherwise, keys are 16 random bytes and values 100; the same seed gives the same keys to every
// arm of a round. After the timed section a sample of the keys is read back and compared.
package scenarios

import (
	"math"
	"slices"
	"time"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
)

// Peers are the module paths whose versions belong in a report.
var Peers = []string{"github.com/cockroachdb/pebble/v2", "github.com/dgraph-io/badger/v4", "go.etcd.io/bbolt"}

// All lists every scenario in the order in which they run.
func All() []harness.Scenario {
	return slices.Concat(writes(), []harness.Scenario{replay(), idle(), startEmpty()}, reads(), coldReads(), sustained(), backups(), []harness.Scenario{footprint(), budget(), mixed()})
}

const million = 1_000_000

// allocsMax hides what goroutines and background work allocate, and nothing that each operation does.
const allocsMax = 0.01

var standard = workload.Shape{KeyBytes: 16, ValueBytes: 100}

var writers = harness.Axis{Name: "writers", Points: []int{1, 2, 4, 8}}

// writes are single and batched puts under both durabilities, into stores that are empty before.
func writes() []harness.Scenario {
	return []harness.Scenario{
		putAsync(), mutex("w4-append-4MiB", 4<<20), mutex("w4-append-64MiB", 64<<20), mutexSync(), mutexSliced(), mutexSlicedMerging(), putLargerThanMemory(), putSyncLone(), putSync(), batchAsync(), batchSync(),
	}
}

func putAsync() harness.Scenario {
	return harness.Scenario{
		Name: "put-async", About: "Single puts, acknowledged when visible; the log is synced in the background. Each engine has a cache of 512 MiB and 8 write buffers, of such a size that a run fills 8 of them.",
		Unit: "puts", Axis: writers, Size: million, Fixed: true, Weight: 3,
		Arms: []harness.Arm{
			{Name: ours.name, Run: puts{contender: ours, shape: standard, proof: oneCommitPerPut, merges: "rotations"}.run},
			{Name: pebble.name, Run: puts{contender: pebble, shape: standard, merges: "flushes"}.run},
			{Name: badger.name, Points: []int{1}, Part: 4, Run: puts{contender: badger, shape: standard}.run},
			{Name: bbolt.name, Points: []int{1}, Part: 100, Run: puts{contender: bbolt, shape: standard}.run},
		},
		Figures: []harness.Figure{
			{Arm: ours.name, Against: pebble.name, AtLeast: 2, Source: "at least 2 times Pebble v2 without sync [586k, 561k, 464k, 483k/s]"},
			{Arm: ours.name, Measure: harness.MeasureAllocs, AtMost: allocsMax, Source: "0 allocations per put"},
		},
	}
}

// synced are durable puts, each timed.
func synced(c contender, proof func(*harness.Run, map[string]float64) error) puts {
	return puts{contender: c, options: engines.Options{Sync: true}, shape: standard, latency: true, proof: proof}
}

// merging makes a workload of puts prove that merges are inside.
func merging(p puts, counter string) puts {
	p.merges = counter
	return p
}

func putSyncLone() harness.Scenario {
	floor := synced(bareLog, oneSyncPerPut)
	floor.unreadable = true
	return harness.Scenario{
		Name: "put-sync-lone", About: "Durable puts by one writer, against the floor: one pwrite and one fdatasync each.",
		Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{1}}, Size: 15_000,
		Arms: []harness.Arm{
			{Name: ours.name, Run: synced(ours, everyPutSynced).run},
			{Name: bareLog.name, Run: floor.run},
			{Name: pebble.name, Run: synced(pebble, nil).run},
			{Name: badger.name, Part: 4, Run: synced(badger, nil).run},
			{Name: bbolt.name, Part: 4, Run: synced(bbolt, nil).run},
		},
		Figures: []harness.Figure{{Arm: ours.name, Against: bareLog.name, AtLeast: 0.85, Source: "at least 0.85 of a bare pwrite + fdatasync loop [11k/s]"}},
	}
}

func putSync() harness.Scenario {
	return harness.Scenario{
		Name: "put-sync", About: "Durable puts by many writers: group commit. Memory as in put-async.",
		Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{16, 64}}, Size: 250_000, Fixed: true, Weight: 2,
		Arms: []harness.Arm{
			{Name: ours.name, Run: merging(synced(ours, oneCommitPerPut), "rotations").run},
			{Name: pebble.name, Run: merging(synced(pebble, nil), "flushes").run},
			{Name: badger.name, Part: 8, Run: synced(badger, nil).run},
		},
		Figures: []harness.Figure{{Arm: ours.name, Against: pebble.name, AtLeast: 1.3, Points: []int{64}, Source: "64 writers at least 1.3 times Pebble [162k/s]"}},
	}
}

func batchAsync() harness.Scenario {
	arm := func(c contender, part int, merges string) harness.Arm {
		return harness.Arm{Name: c.name, Part: part, Run: puts{contender: c, shape: standard, batch: 1000, merges: merges}.run}
	}
	return harness.Scenario{
		Name: "batch-async", About: "Atomic batches of 1000 random keys, acknowledged when visible; counted per key. Memory as in put-async.",
		Unit: "keys", Axis: harness.Axis{Name: "writers", Points: []int{1, 2}}, Size: million, Fixed: true, Weight: 2,
		Arms:    []harness.Arm{arm(ours, 1, "rotations"), arm(pebble, 1, "flushes"), arm(badger, 4, ""), arm(bbolt, 4, "")},
		Figures: []harness.Figure{{Arm: ours.name, Against: pebble.name, AtLeast: 2, Points: []int{1}, Source: "batches of 1000 at least 2 times Pebble per key [674k/s]"}},
	}
}

func batchSync() harness.Scenario {
	arm := func(c contender, part int) harness.Arm {
		return harness.Arm{Name: c.name, Part: part, Run: puts{contender: c, options: engines.Options{Sync: true}, shape: standard, batch: 100}.run}
	}
	return harness.Scenario{
		Name: "batch-sync", About: "Atomic durable batches of 100 random keys; counted per key.",
		Unit: "keys", Axis: harness.Axis{Name: "writers", Points: []int{1, 8}}, Size: 500_000,
		Arms: []harness.Arm{arm(ours, 1), arm(pebble, 1), arm(badger, 4), arm(bbolt, 8)},
	}
}

// sustained are writes to data that is there, which go on from round to round.
func sustained() []harness.Scenario {
	const stage = "sustained"
	run := func(c contender) func(*harness.Run) error { return overwrites{c}.run }
	return []harness.Scenario{
		{
			Name: "overwrite-sustained", About: "Random overwrites of a million keys, round after round and through several checkpoints (5 M keys with -large).",
			Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{1, 2}}, Size: million, Load: million, Weight: 3, Stage: stage,
			Large: harness.Sizes{Size: 5 * million, Load: 5 * million},
			Arms:  arms(run, ours, pebble),
			Figures: []harness.Figure{
				{Arm: ours.name, Against: pebble.name, AtLeast: 1, Source: "sustained overwrites at least at Pebble's rate"},
				{Arm: ours.name, Measure: harness.MeasureP9999, AtMost: 100, Source: "p99.99 of a put under 100 ms"},
			},
		},
		{
			Name: "open-loop", About: "Nine gets and one put in ten operations, which arrive at a fixed rate; latencies count from the moment at which each was due.",
			Unit: "operations", Axis: harness.Axis{Name: "thousand arrivals a second", Points: []int{20, 100}}, Size: 1, Window: 2 * time.Second, Load: million, Stage: stage, Show: harness.MeasureP99,
			Arms: arms(func(c contender) func(*harness.Run) error { return arrivals{c}.run }, ours, pebble),
		},
	}
}

// mutex compares the commit path with itself under one mutex over append and insert, with the origin's small records.
func mutex(name string, segment int64) harness.Scenario {
	small := workload.Shape{KeyBytes: 20, ValueBytes: 12}
	// The commit path alone is compared with itself: memory for all that a run writes, so that neither arm waits for merges.
	options := engines.Options{BufferBytes: segment, Buffers: 4 << 30 / segment, Memtable: segment}
	oneMutex := options
	oneMutex.OneMutex = true
	const source = "the origin's parameters: 20-byte keys, 12-byte values"
	return harness.Scenario{
		Name: name, About: "The mutex-free commit path against the same path under one mutex.",
		Origin: "Jungle, fast path in setSN: +53, +55, +62, +112 % with 1, 2, 4, 8 writers.",
		Unit:   "puts", Axis: writers, Size: million, Weight: 2,
		Arms: []harness.Arm{
			{Name: "mutex-free", Run: puts{contender: ours, options: options, shape: small, proof: oneCommitPerPut}.run},
			{Name: "one mutex", Run: puts{contender: ours, options: oneMutex, shape: small, proof: oneCommitPerPut}.run},
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
	arm := func(name string, oneMutex bool) harness.Arm {
		return harness.Arm{Name: name, Run: puts{
			contender: ours, options: engines.Options{Sync: true, OneMutex: oneMutex}, shape: small, proof: oneCommitPerPut, latency: true,
		}.run}
	}
	return harness.Scenario{
		Name: "w4-append-sync", About: "The same with every put durable: group commit after either path.",
		Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{8, 64}}, Size: 100_000,
		Arms: []harness.Arm{arm("mutex-free", false), arm("one mutex", true)},
	}
}

// mutexSliced measures what the mutex costs on few cores, which disturbances of whole runs hide.
func mutexSliced() harness.Scenario {
	return slicedScenario("w4-append-slices", sliced{buffer: 128 << 20}, "Slices with a rotation, or in which other processes take more than a tenth, are dropped.")
}

func mutexSlicedMerging() harness.Scenario {
	return slicedScenario("w4-append-slices-merging", sliced{buffer: 16 << 20, rotates: true}, "Rotations and merges are inside.")
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
