// Package txn measures transactions in process, durability off, and what the collection of old versions costs them.
//
// The reference is tx-map, a transactional map in memory, rebuilt and measured on this kind of machine; its rates are in the
// figures. Its alternatives to a background collector with a cached min-visible epoch are arms next to ours.
package txn

import (
	"fmt"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/ablation"
)

const million = 1_000_000

// allocsMax hides what goroutines and background work allocate, and nothing that each attempt does.
const allocsMax = 0.02

// Scenarios lists them in the order in which they run.
func Scenarios() []harness.Scenario {
	return []harness.Scenario{
		mixed("w2-read-heavy", 90, [4]float64{7.3, 5.7, 3.9, 2.9}),
		mixed("w2-write-heavy", 10, [4]float64{2.5, 1.9, 1.4, 1.1}),
		readOnly(),
		zipf("w2-zipf-0.5", 0.5),
		zipf("w2-zipf-0.9", 0.9),
		hotKey(),
		disjoint(),
	}
}

// goroutines is the origin's axis.
var goroutines = harness.Axis{Name: "goroutines", Points: []int{1, 2, 4, 8}}

// mixed is the origin's workload: one get or put on one of four keys, then commit, again until it commits. txMap holds its rates
// at 1, 2, 4 and 8 goroutines, in millions.
func mixed(name string, reads int, txMap [4]float64) harness.Scenario {
	const arm = "epochkv"
	beside := func(point int, factor, rate float64, ask string) harness.Figure {
		return harness.Figure{
			Arm: arm, Points: []int{point}, AtLeast: factor * rate * million,
			Source: fmt.Sprintf("%s (tx-map: %.1f M/s)", ask, rate),
		}
	}
	return harness.Scenario{
		Name: name, About: fmt.Sprintf("Transactions of one operation on one of 4 keys, %d %% of them gets, retried until they commit; or tried once, commits and aborts counted alike.", reads),
		Origin: "tx-map: 3.9 to 6.1 M reads/s, 2.5 to 4.1 M writes/s; rebuilt on this kind of machine as the figures say.",
		Unit:   "commits", Axis: goroutines, Size: 2 * million, Weight: 2,
		Arms: []harness.Arm{
			{Name: arm, Run: load{keys: 4, reads: reads, retry: true}.run},
			{Name: "without retries", Run: load{keys: 4, reads: reads}.run},
		},
		Figures: []harness.Figure{
			beside(1, 1, txMap[0], "not below tx-map at 1"),
			{Arm: arm, Against: arm, AgainstAt: 1, Points: []int{2}, AtLeast: 0.5, Source: "at 2 not below half of 1"},
			beside(4, 2, txMap[2], "at least 2 times tx-map at 4"),
			beside(8, 2, txMap[3], "at least 2 times tx-map at 8"),
			{Arm: arm, Against: arm, AgainstAt: 2, Points: []int{4, 8}, AtLeast: 0.9, Source: "flat from 2 on"},
			{Arm: arm, Measure: harness.MeasureCV, AtMost: 0.1, Source: "variation under 10 % (tx-map: swings of 50 %)"},
			{Arm: arm, Measure: harness.MeasureAllocs, AtMost: allocsMax, Source: "0 bytes per attempt (tx-map: 1.3 to 4.6 kB at 8)"},
		},
	}
}

func readOnly() harness.Scenario {
	const arm = "epochkv"
	return harness.Scenario{
		Name: "txn-read-only", About: "Read-only transactions of one get on one of 4 keys.",
		Unit: "commits", Axis: harness.Axis{Name: "goroutines", Points: []int{1, 2}}, Size: million,
		Arms:    []harness.Arm{{Name: arm, Run: load{keys: 4, reads: 100, readOnly: true}.run}},
		Figures: []harness.Figure{{Arm: arm, Measure: harness.MeasureAllocs, AtMost: allocsMax, Source: "0 allocations per operation"}},
	}
}

// zipf compares the ways to collect versions under a skewed load of writes.
func zipf(name string, skew float64) harness.Scenario {
	arm := func(name string, b ablation.Baseline) harness.Arm {
		return harness.Arm{Name: name, Run: load{keys: 1000, reads: 10, skew: skew, retry: true, baseline: b}.run}
	}
	const ours, scanned, every, everyScanned, writer = "background, cached", "background, scan per write", "every write, cached",
		"every write, scan per write", "writer at multiples"
	return harness.Scenario{
		Name: name, About: fmt.Sprintf("Transactions of one operation, 10 %% of them gets, on 1000 keys with a skew of %.1f: what prunes, and how it knows which versions no snapshot can see.", skew),
		Unit: "commits", Axis: harness.Axis{Name: "goroutines", Points: []int{2, 8}}, Size: million / 4,
		Arms: []harness.Arm{
			arm(ours, ablation.Baseline{}),
			arm(scanned, ablation.Baseline{ScanPerWrite: true}),
			arm(every, ablation.Baseline{Pruning: ablation.PruneEveryWrite}),
			arm(everyScanned, ablation.Baseline{Pruning: ablation.PruneEveryWrite, ScanPerWrite: true}),
			arm(writer, ablation.Baseline{Pruning: ablation.PruneByWriter}),
		},
		Figures: []harness.Figure{
			{Arm: ours, Against: scanned, AtLeast: 1.5, Source: "cached min-visible at least 1.5 times scan-per-write"},
			{Arm: ours, Against: everyScanned, AtLeast: 1.5, Source: "background at least 1.5 times pruning on every write"},
			{Arm: ours, Against: writer, AtLeast: 0.9, Source: "not more than 10 % below pruning by the writer at multiples"},
		},
	}
}

func hotKey() harness.Scenario {
	const free, held = "no snapshot", "an old snapshot open"
	figures := []harness.Figure{}
	for _, arm := range []string{free, held} {
		figures = append(figures,
			harness.Figure{Arm: arm, Measure: grownMiB, AtMost: 8, Source: "memtable memory flat: a few MiB at most"},
			harness.Figure{Arm: arm, Measure: restVersions, AtMost: 2 * 64, Source: "chain under twice the threshold at rest"},
			harness.Figure{Arm: arm, Measure: restSeconds, AtMost: 1, Source: "all back within a second of the snapshot's end"},
		)
	}
	return harness.Scenario{
		Name: "txn-hot-key", About: "One key overwritten again and again (ten million times with -large), its versions collected meanwhile.",
		Unit: "puts", Axis: harness.Axis{Name: "writers", Points: []int{1}}, Size: million, Show: grownMiB, Large: harness.Sizes{Size: 10 * million},
		Arms:    []harness.Arm{{Name: free, Run: hot{}.run}, {Name: held, Run: hot{held: true}.run}},
		Figures: figures,
	}
}

func disjoint() harness.Scenario {
	return harness.Scenario{
		Name: "txn-disjoint", About: "Serializable transactions of 10 writes, each goroutine on keys of its own: nothing may abort.",
		Unit: "commits", Axis: harness.Axis{Name: "goroutines", Points: []int{8}}, Size: 50_000,
		Arms:    []harness.Arm{{Name: "epochkv", Run: runDisjoint}},
		Figures: []harness.Figure{{Arm: "epochkv", Measure: "aborts", AtMost: 0.5, Source: "disjoint transactions of 10 writes by 8 goroutines: no aborts"}},
	}
}
