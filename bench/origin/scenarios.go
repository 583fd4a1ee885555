// Package origin holds those of the origins' experiments that need a scenario of their own: cold reads (W0) and scan resistance
// (W3). The others stand where what they measure is: W0's parallel merge and W1 in bench/tree, W2 in bench/txn, W4 in bench/scenarios.
// All carry their number in their name.
package origin

import (
	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Scenarios lists them in the order in which they run.
func Scenarios() []harness.Scenario {
	return []harness.Scenario{deviceReads(), batchGets(), coldScans(), coldGets(), coldScanAll(), scanResistance(), hits()}
}

func deviceReads() harness.Scenario {
	const ring, pool, serial = "ring", "pool of preads", "serial preads"
	return harness.Scenario{
		Name: "w0-device-reads", About: "Random pages of 8 KiB past the page cache, 64 at a time.",
		Unit: "pages", Axis: harness.Axis{Name: "pages at a time", Points: []int{64}}, Size: 12_800, Load: devicePages,
		Arms: []harness.Arm{
			{Name: ring, Run: device{way: vfs.IOUring}.run},
			{Name: pool, Run: device{way: vfs.IOPread}.run},
			{Name: serial, Run: device{way: vfs.IOPread, serial: true}.run},
		},
		Figures: []harness.Figure{{Arm: ring, Against: serial, AtLeast: 3, Source: "cold reads of 64: ring at least 3 times serial pread (prototype: 68k against 16k/s)"}},
	}
}

func batchGets() harness.Scenario {
	const ring, pool, serial = "batch, ring", "batch, preads", "one by one"
	return harness.Scenario{
		Name: "w0-batch-get", About: "Random keys through the engine, 64 at a time, with a cache of 1 MiB and direct reads.",
		Origin: "H2 MVStore #4331, io_uring batches: +13 % random misses.",
		Unit:   "keys", Axis: harness.Axis{Name: "keys at a time", Points: []int{64}}, Size: 6400, Load: coldKeys, Stage: "w0 cold",
		Arms: []harness.Arm{
			{Name: ring, Run: cold{way: vfs.IOUring, read: readBatches}.run},
			{Name: pool, Run: cold{way: vfs.IOPread, read: readBatches}.run},
			{Name: serial, Run: cold{way: vfs.IOPread, read: readSingles}.run},
		},
		Figures: []harness.Figure{{Arm: ring, Against: serial, AtLeast: 3, Source: "cold BatchGet of 64: ring at least 3 times serial pread"}},
	}
}

func coldScans() harness.Scenario {
	const on, off = "prefetch", "no prefetch"
	return harness.Scenario{
		Name: "w0-cold-scans", About: "Scans of 1000 keys from random starts, bounded, with a cache of 1 MiB and direct reads; beside writers.",
		Origin: "H2 MVStore #4331, bounded cursor prefetch: +5 % range scans, writes on par.",
		Unit:   "scans", Axis: harness.Axis{Name: "writers", Points: []int{0, 4}}, Size: 100, Load: coldKeys, Stage: "w0 cold",
		Arms: []harness.Arm{
			{Name: on, Run: cold{way: vfs.IOUring, read: readScans, prefetch: true, ahead: true, writers: true}.run},
			{Name: off, Run: cold{way: vfs.IOUring, read: readScans, writers: true}.run},
		},
		Figures: []harness.Figure{
			{Arm: on, Against: off, Points: []int{0}, AtLeast: 1.5, Source: "prefetch at least 1.5 times none"},
			{Arm: on, Against: off, Points: []int{4}, Measure: putRate, AtLeast: 0.95, Source: "puts beside a scanner at least 0.95 of prefetch off"},
		},
	}
}

func coldGets() harness.Scenario {
	const on, off = "prefetch", "no prefetch"
	return harness.Scenario{
		Name: "w0-cold-gets", About: "Random gets with a cache of 1 MiB and direct reads: prefetch must not touch them.",
		Unit: "gets", Axis: harness.Axis{Name: "readers", Points: []int{1}}, Size: 6400, Load: coldKeys, Stage: "w0 cold",
		Arms: []harness.Arm{
			{Name: on, Run: cold{way: vfs.IOUring, read: readSingles, prefetch: true}.run},
			{Name: off, Run: cold{way: vfs.IOUring, read: readSingles}.run},
		},
		Figures: []harness.Figure{{Arm: on, Against: off, AtLeast: 0.98, Source: "random gets with prefetch on within 2 % of off, with 0 pages prefetched"}},
	}
}

func coldScanAll() harness.Scenario {
	const on, off = "prefetch", "no prefetch"
	return harness.Scenario{
		Name: "w0-cold-scan-all", About: "One scan of everything with a cache of 1 MiB and direct reads.",
		Unit: "scans", Axis: harness.Axis{Name: "readers", Points: []int{1}}, Size: 1, Fixed: true, Load: coldKeys, Stage: "w0 cold",
		Arms: []harness.Arm{
			{Name: on, Run: cold{way: vfs.IOUring, read: readAll, prefetch: true, ahead: true}.run},
			{Name: off, Run: cold{way: vfs.IOUring, read: readAll}.run},
		},
		Figures: []harness.Figure{{Arm: on, Against: off, AtLeast: 0.98, Source: "full scan with prefetch on not slower"}},
	}
}

func scanResistance() harness.Scenario {
	const usageCount, clock, lru = "usage count", "clock", "lru"
	return harness.Scenario{
		Name: "w3-scan-resistance", About: "A hot set is read again after a scan of twice the cache of 16 MiB: how much of it has to be read in again.",
		Origin: "libdb mpool, stage 0.5: 621, 505 and 58 page-ins with LRU, CLOCK and usage counts with a hot and a cold set.",
		Unit:   "reads", Axis: harness.Axis{Name: "percent of the cache that is hot", Points: []int{30}}, Size: 60_000, Fixed: true, Weight: 0.5, Show: pageIns,
		Arms: []harness.Arm{
			{Name: usageCount, Run: resistance{openCache}.run}, {Name: clock, Run: resistance{openClock}.run}, {Name: lru, Run: resistance{openLRU}.run},
		},
		Figures: []harness.Figure{{Arm: usageCount, Against: lru, Measure: pageIns, AtMost: 0.05, Source: "usage counts cause at most 5 % of LRU's page-ins"}},
	}
}

func hits() harness.Scenario {
	const usageCount, clock, lru, otter = "usage count", "clock", "lru", "otter"
	return harness.Scenario{
		Name: "w3-hits", About: "Reads of pages that are all in memory: how that scales with readers. They look at the pages, which are 160 MB, and draw where to go next; what a hit costs by itself is w3-hit-cost.",
		Origin: "libdb mpool, stage 0.5: no loss against LRU from 1 to 24 threads.",
		Unit:   "reads", Axis: harness.Axis{Name: "readers", Points: []int{1, 2, 8, 24}}, Size: 4_000_000, Load: residentFrames, Weight: 1.5,
		Arms: []harness.Arm{
			{Name: usageCount, Run: resident{openCache}.run},
			{Name: clock, Run: resident{openClock}.run},
			{Name: lru, Run: resident{openLRU}.run},
			{Name: otter, Run: residentOtter},
		},
		Figures: []harness.Figure{
			{Arm: usageCount, Against: lru, AtLeast: 1, Source: "no loss for reads in cache against LRU"},
			{Arm: usageCount, Against: otter, AtLeast: 4, Source: "a hit costs at most a quarter of otter v2's, what a read does with the page included"},
		},
	}
}
