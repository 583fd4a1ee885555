// Package cache sets the page cache beside otter, an implementation of W-TinyLFU: hit ratios at equal entries, and what a hit costs.
package cache

import (
	"errors"
	"math"

	"github.com/epochkv/epochkv/bench/harness"
)

// Counters that the figures are about.
const (
	hitPercent = "percent hits"
	readsAgain = "misses over working set"
)

// Scenarios lists them in the order in which they run.
func Scenarios() []harness.Scenario {
	return []harness.Scenario{hitCost(), ratios(), phaseChange()}
}

// ratioTraces are the traces that figures ask for, and the axis of the scenario; the test runs all of them.
var ratioTraces = traces[:6]

// ratioEntries is the size of each cache, whatever the time there is: with less, other ratios come out.
const ratioEntries = 2000

func ratios() harness.Scenario {
	s := harness.Scenario{
		Name: "w3-hit-ratio", About: "Which share of visits finds its page, by trace, at equal entries. Page ids are the keys; a scan's own visits do not count.",
		Origin: "Rates on this kind of machine, Zipf: otter 79.9 %, LRU 77.0 %; the Zipf part of Zipf with a repeated scan: otter 77.3 %, LRU 72.9 %.",
		Unit:   "visits", Axis: harness.Axis{Name: "trace"}, Show: hitPercent, Size: ratioEntries * visitsPerEntry, Load: ratioEntries, Fixed: true, Weight: 3,
		Figures: []harness.Figure{{Arm: usageCountArm, Against: otterArm, Measure: hitPercent, AtLeast: 1, Source: "hit ratio at equal entries not below otter v2 (W-TinyLFU)"}},
	}
	for i, t := range ratioTraces {
		s.Axis.Points, s.Axis.Labels = append(s.Axis.Points, i+1), append(s.Axis.Labels, t.name)
	}
	for _, a := range arms {
		s.Arms = append(s.Arms, harness.Arm{Name: a.name, Run: a.ratio})
	}
	return s
}

func (a arm) ratio(r *harness.Run) (err error) {
	n := max(r.Load, 64)
	c, err := a.open(n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	var t tally
	err = r.Time(n*visitsPerEntry, func() error {
		t = ratioTraces[r.Point-1].run(c, n, r.Seed)
		return nil
	})
	r.Count(hitPercent, t.percent())
	// Every trace must have misses: a cache that holds all of it is not what the scenario measures.
	return errors.Join(err, r.Prove("misses", float64(t.visits-t.hits), 1, math.Inf(1)), r.Verified(1, 1))
}

// changeVisits are the visits for each entry, half of them of the first working set.
const changeVisits = 40

func phaseChange() harness.Scenario {
	s := harness.Scenario{
		Name: "w3-phase-change", About: "A working set of four fifths of the cache gives way to another of the same size, twenty visits for each entry: how much is read in until it is at home.",
		Unit: "visits", Axis: harness.Axis{Name: "working sets", Points: []int{2}}, Size: ratioEntries * changeVisits, Load: ratioEntries, Fixed: true, Weight: 0.5, Show: readsAgain,
		Figures: []harness.Figure{{Arm: usageCountArm, Against: otterArm, Measure: readsAgain, AtMost: 1, Source: "a changed working set takes over within a bounded number of misses: not more than W-TinyLFU needs"}},
	}
	for _, a := range arms {
		s.Arms = append(s.Arms, harness.Arm{Name: a.name, Run: a.phases})
	}
	return s
}

func (a arm) phases(r *harness.Run) (err error) {
	n := max(r.Load, 64)
	c, err := a.open(n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	again := 0.0
	err = r.Time(n*changeVisits, func() error {
		again = takeover(c, n, r.Seed)
		return nil
	})
	return errors.Join(err, r.Prove(readsAgain, again, 0.99, math.Inf(1)), r.Verified(1, 1))
}
