// Package growth asks how the cost of an operation grows with the size of things: keys, writers, values, versions and open
// snapshots, transactions. Each arm gets a slope, fitted through the logarithms: 0 means that the cost does not grow at all.
package growth

import (
	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/lmdb"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Scenarios lists them in the order in which they run.
func Scenarios() []harness.Scenario {
	return []harness.Scenario{keys(), writers(), values(), snapshots(), transactions(), amplification()}
}

func axis(name string, points ...int) harness.Axis {
	return harness.Axis{Name: name, Points: points, Growth: true}
}

// part is an arm that does one operation for so many of the scenario's.
func part(a harness.Arm, of int) harness.Arm {
	a.Part = of
	return a
}

func keys() harness.Scenario {
	const size = 200_000
	restart := random{first: (*grown).stop, timed: (*grown).start, once: true}
	ofPebble := func(o random) random {
		o.peer, o.name = engines.Pebble, "pebble"
		return o
	}
	gets, puts, scans, batches := random{timed: alone(getEach)}, random{timed: alone(put)}, random{timed: alone(scan)}, random{timed: alone(putAll)}
	return harness.Scenario{
		Name: "growth-keys", About: "Random gets, overwrites, scans of 100 and batches of 100 overwrites of keys that rest in the tree, all of it cached, in one thread; the checkpoint that merges random overwrites, counted by overwrite; and the start of a store that was closed in order, until it has read a key: 1, 4 and 16 times a quarter of a million keys (a million with -large, and there also 64 times, which is more than the cache). Nothing is synced. Batches are counted by key.",
		Unit: "operations", Axis: axis("times the least number of keys", 1, 4, 16), Size: size, Load: 250_000, Weight: 2,
		Large: harness.Sizes{Load: 1_000_000, Points: []int{64}, Rounds: 3},
		Arms: []harness.Arm{
			{Name: "get", Run: gets.run},
			{Name: "put", Run: puts.run},
			{Name: "scan of 100", Run: scans.run, Part: 20},
			{Name: "batch of 100", Run: batches.run},
			{Name: "checkpoint", Run: random{first: alone(put), timed: (*grown).merge}.run},
			{Name: "restart", Run: restart.run, Part: size},
			{Name: "pebble, get", Run: ofPebble(gets).run},
			{Name: "pebble, put", Run: ofPebble(puts).run},
			{Name: "pebble, scan of 100", Run: ofPebble(scans).run, Part: 20},
			{Name: "pebble, batch of 100", Run: ofPebble(batches).run},
			{Name: "pebble, restart", Run: ofPebble(restart).run, Part: size},
			lmdb.GrowthArm(lmdb.Get), lmdb.GrowthArm(lmdb.Put), part(lmdb.GrowthArm(lmdb.Scan), 20), lmdb.GrowthArm(lmdb.Batch),
		},
	}
}

func writers() harness.Scenario {
	return harness.Scenario{
		Name: "growth-writers", About: "Single puts, acknowledged when visible, by more and more writers.",
		Unit: "puts", Axis: axis("writers", 1, 2, 4, 8, 16, 64, 256), Size: 200_000,
		Arms: []harness.Arm{
			{Name: "epochkv", Run: inserts{shape: grownShape}.byWriters},
			{Name: "one mutex", Run: inserts{shape: grownShape, options: engines.Options{OneMutex: true}}.byWriters},
			{Name: "pebble", Run: inserts{shape: grownShape, peer: engines.Pebble}.byWriters},
			{Name: "lmdb in C", Run: lmdbInserts{valueBytes: grownShape.ValueBytes}.byWriters},
		},
	}
}

func values() harness.Scenario {
	return harness.Scenario{
		Name: "growth-values", About: "Single puts and random gets by size of the value; long values lie in pages of their own.",
		Unit: "operations", Axis: axis("value bytes", 16, 256, 4096, 65_536), Size: 50_000,
		Arms: []harness.Arm{
			{Name: "put", Run: inserts{}.byValue},
			{Name: "get", Run: inserts{gets: true}.byValue},
			{Name: "pebble, put", Run: inserts{peer: engines.Pebble}.byValue},
			{Name: "pebble, get", Run: inserts{peer: engines.Pebble, gets: true}.byValue},
			{Name: "lmdb in C, put", Run: lmdbInserts{}.byValue},
			{Name: "lmdb in C, get", Run: lmdbInserts{gets: true}.byValue},
		},
	}
}

func snapshots() harness.Scenario {
	arm := func(name string, do snapshotOp) harness.Arm { return harness.Arm{Name: name, Run: snapshotted{do}.run} }
	peer := func(name string, do snapshotOp) harness.Arm {
		return harness.Arm{Name: "pebble, " + name, Run: snapshotted{do}.runPebble}
	}
	return harness.Scenario{
		Name: "growth-snapshots", About: "Each key has as many versions as there are snapshots open, one for each, in memory.",
		Unit: "operations", Axis: axis("snapshots", 1, 8, 64, 512, 10_000), Size: 100_000,
		Arms: []harness.Arm{
			arm("get the newest", getNewest), arm("get the oldest", getOldest), arm("put", putNewest),
			peer("get the newest", getNewest), peer("get the oldest", getOldest), peer("put", putNewest),
			lmdbHeld("get the newest", lmdb.Newest), lmdbHeld("get the oldest", lmdb.Oldest), lmdbHeld("put", lmdb.Number),
		},
	}
}

func transactions() harness.Scenario {
	return harness.Scenario{
		Name: "growth-transactions", About: "Transactions of reads and writes of neighbouring keys, counted per key.",
		Unit: "keys", Axis: axis("keys of a transaction", 1, 10, 100, 1000), Size: 100_000,
		Arms: []harness.Arm{
			{Name: "snapshot", Run: transacted{mvcc.IsolationSnapshot}.run},
			{Name: "serializable", Run: transacted{mvcc.IsolationSerializable}.run},
		},
	}
}
