// Package tree measures the durable tree: merges, batches of rows, checkpoints under load, and space that comes back.
package tree

import (
	"fmt"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/storage/btree"
)

// Scenarios lists them in the order in which they run.
func Scenarios() []harness.Scenario {
	return []harness.Scenario{
		parallelMerge(),
		batches(),
		threeWays(),
		plateau(),
		shrink(),
		cleanOpen(),
		bulk(),
	}
}

func bulk() harness.Scenario {
	const ours, unsorted, plain, peer = "epochkv", "epochkv, unsorted", "epochkv, unsorted, batches", "pebble, ingest"
	return harness.Scenario{
		Name: "bulk-load", About: "Loading an empty store past log and memtable, until all of it is visible and durable.",
		Unit: "keys", Axis: harness.Axis{Name: "loaders", Points: []int{1}}, Size: 2_000_000, Weight: 3,
		Arms: []harness.Arm{
			{Name: ours, Run: bulkLoad{load: bulkEpochKV, sorted: true}.run},
			{Name: unsorted, Run: bulkLoad{load: bulkEpochKV}.run},
			{Name: plain, Run: bulkLoad{load: plainEpochKV}.run},
			{Name: peer, Run: bulkLoad{load: bulkPebble, sorted: true}.run},
		},
		Figures: []harness.Figure{
			{Arm: ours, Against: peer, AtLeast: 1, Source: "sorted keys at least 1.0 times Pebble's ingest, including its table building, both uncompressed"},
			{Arm: unsorted, Against: plain, AtLeast: 2, Source: "unsorted keys at least 2 times plain import"},
		},
	}
}

func parallelMerge() harness.Scenario {
	const one, two = "1 worker", "2 workers"
	shared := &digests{sums: map[string]uint32{}}
	const source = "2 workers at least 1.6 times 1 where CPU-bound; one hot tree gains too"
	return harness.Scenario{
		Name: "w0-merge", About: "Merging random keys of 8 key spaces, or of one hot range, into a tree of 300,000, in memory. Both arms must make the same pages.",
		Origin: "H2 MVStore #4331, parallel page serialization: +13 % random misses, writes on par.",
		Unit:   "keys", Axis: harness.Axis{Name: "key spaces", Points: []int{1, 8}}, Size: 600_000, Load: 300_000,
		Arms:    []harness.Arm{{Name: one, Run: merges{1, shared}.run}, {Name: two, Run: merges{2, shared}.run}},
		Figures: []harness.Figure{{Arm: two, Against: one, AtLeast: 1.6, Source: source}},
	}
}

// origin are the savings of time that the origin of batch updates reached, by the greatest entry of a range of lengths.
var origin = []struct {
	most  int
	saved float64
}{{104, 0.43}, {340, 0.37}, {740, 0.34}, {1240, 0.28}, {32_000, 0}}

const originBatches = "Ignite IDIEP-32: 43 % less time at 44-104 B, 37 % at 140-340 B, 34 % at 340-740 B, 28 % at 740-1240 B, 1 % at 8 KiB."

func entrySizes() harness.Axis {
	axis := harness.Axis{Name: "entry bytes"}
	for _, o := range origin {
		axis.Points = append(axis.Points, o.most)
		axis.Labels = append(axis.Labels, fmt.Sprintf("%d-%d", shortest[o.most], o.most))
	}
	return axis
}

// saves are the figures of an arm against single inserts: a saving of s means that it is 1/(1-s) times as fast.
func saves(arm, singles string) (figures []harness.Figure) {
	const source = "time saved against single inserts: 43, 37, 34 and 28 %, and never slower up to 32000 B"
	for _, o := range origin {
		figures = append(figures, harness.Figure{Arm: arm, Against: singles, Points: []int{o.most}, AtLeast: 1 / (1 - o.saved), Source: source})
	}
	return figures
}

func batches() harness.Scenario {
	const batch, single = "batches of 200", "singles"
	return harness.Scenario{
		Name: "w1-batch", About: "Rows through the whole engine with 4 KiB pages, acknowledged when visible: commits of 200 rows against commits of one.",
		Origin: originBatches,
		Unit:   "rows", Axis: entrySizes(), Size: 100_000,
		Arms:    []harness.Arm{{Name: batch, Run: commits{rowsPerBatch}.run}, {Name: single, Run: commits{1}.run}},
		Figures: saves(batch, single),
	}
}

func threeWays() harness.Scenario {
	const single, invoke, find = "singles", "sort + InvokeAll", "sort + FindAll + rows + PutAll"
	arm := func(name string, insert func(*memory, btree.Root, []btree.Entry) (btree.Root, error)) harness.Arm {
		return harness.Arm{Name: name, Run: inserts{insert}.run}
	}
	return harness.Scenario{
		Name: "w1-three-ways", About: "The same rows straight into a tree of 4 KiB pages in memory, 200 at a time.",
		Origin: originBatches,
		Unit:   "rows", Axis: entrySizes(), Size: 5_000,
		Arms:    []harness.Arm{arm(single, singles), arm(invoke, sortInvokeAll), arm(find, sortFindPut)},
		Figures: append(saves(invoke, single), saves(find, single)...),
	}
}

func plateau() harness.Scenario {
	const arm = "epochkv"
	return harness.Scenario{
		Name: "space-plateau", About: "Put all keys and delete them, five times over: file and memory must stop growing (1 M keys with -large).",
		Unit: "keys", Axis: harness.Axis{Name: "rounds", Points: []int{plateauRounds}}, Size: 200_000, Weight: 1.5, Large: harness.Sizes{Size: 1_000_000}, Show: fileOverLive,
		Arms: []harness.Arm{{Name: arm, Run: runPlateau}},
		Figures: []harness.Figure{
			{Arm: arm, Measure: fileOverLive, AtMost: 2, Source: "file at most 2 times the peak of live bytes"},
			{Arm: arm, Measure: memoryOverLive, AtMost: 2, Source: "memory at most 2 times the peak of live bytes"},
		},
	}
}

func shrink() harness.Scenario {
	const arm = "epochkv"
	return harness.Scenario{
		Name: "space-shrink", About: "Nine keys in ten are deleted; light writes go on until the file has shrunk (1 M keys with -large).",
		Unit: "keys", Axis: harness.Axis{Name: "percent deleted", Points: []int{90}}, Size: 200_000, Weight: 1.5, Large: harness.Sizes{Size: 1_000_000}, Show: fileOverLive,
		Arms: []harness.Arm{{Name: arm, Run: runShrink}},
		Figures: []harness.Figure{
			{Arm: arm, Measure: fileOverLive, AtMost: 2, Source: "the file at most 2 times live bytes"},
			{Arm: arm, Measure: shrinkSeconds, AtMost: 60, Source: "within a minute"},
			{Arm: arm, Measure: harness.MeasureMax, AtMost: 50, Source: "no put longer than 50 ms because of it"},
		},
	}
}

func cleanOpen() harness.Scenario {
	const arm = "epochkv"
	return harness.Scenario{
		Name: "open-clean", About: "Opening a store of 10 M keys that was closed in order.",
		Unit: "opens", Axis: harness.Axis{Name: "stores", Points: []int{1}}, Size: 1, Fixed: true, Load: 10_000_000, Weight: 0.5, Show: msToOpen,
		Arms:    []harness.Arm{{Name: arm, Run: runOpen}},
		Figures: []harness.Figure{{Arm: arm, Measure: msToOpen, AtMost: 200, Source: "clean open of 10 M keys under 200 ms"}},
	}
}
