package harness

import (
	"cmp"
	"time"
)

// A warm-up brings caches, files and the runtime into the state in which the rounds find them, and tells how long a round
// takes. It is done at two sizes, so that what a run costs whatever its size (opening a store, preallocating a log) can be
// told from what grows with it.
const (
	warmupSmall = 32 // the full size over that of the first warm-up
	warmupLarge = 6
	// smokeDivisor shrinks a scenario for a smoke run.
	smokeDivisor = 500
	smokeSizeMin = 64
	// smokeLoadDivisor shrinks what is there before.
	smokeLoadDivisor = 100
	smokeWindow      = 50 * time.Millisecond
	// roundsAim is how many rounds the size is chosen for: one more than must be, as no round takes as long as the last.
	roundsAim = RoundsMin + 1
	// shrinkMax is how much smaller than declared a scenario becomes at most; beyond, its share is too small and is exceeded.
	shrinkMax = 16
	// overrunMax is how many shares a scenario may take whose rounds are too slow all the same, on a machine that is busy with
	// something else, say. It then ends with fewer rounds, and is not judged.
	overrunMax = 2
	// windowShrinkMax does so for windows: in less than a tenth a slow server has too few answers to speak of their tail.
	windowShrinkMax = 10
)

// plan is how a scenario is run. With a window it is the window that becomes shorter, and the size stays.
type plan struct {
	size, load, rounds int
	full               int // the size with more time
	window             time.Duration
	judged             int // rounds that are enough to judge
}

// large is the plan at full size.
func (p plan) large(s Sizes) plan {
	p.size, p.load, p.window = cmp.Or(s.Size, p.size), cmp.Or(s.Load, p.load), cmp.Or(s.Window, p.window)
	p.full, p.rounds = p.size, cmp.Or(s.Rounds, RoundsMin)
	p.judged = p.rounds
	return p
}

// plan warms the scenario up and chooses the extent at which its rounds fit into the share.
func (x *execution) plan(s Scenario, share time.Duration, absent map[string]string) (plan, error) {
	p := plan{size: s.Size, full: s.Size, load: s.Load, window: s.Window, rounds: roundsMax, judged: RoundsMin}
	switch {
	case x.Smoke:
		p.rounds = 1
		p.size = max(s.Size/smokeDivisor, min(smokeSizeMin, s.Size))
		p.full, p.load, p.window = p.size, (s.Load+smokeLoadDivisor-1)/smokeLoadDivisor, min(s.Window, smokeWindow)
		return p, nil
	case x.Large:
		p = p.large(s.Large)
		_, err := x.warmup(s, p, warmupSmall, absent)
		return p, err
	case share <= 0: // the budget is used up: one round that shows that it works
		return p.part(p.least()), nil
	}
	if s.Fixed {
		_, err := x.warmup(s, p, 1, absent)
		return p, err
	}
	small, err := x.warmup(s, p, warmupSmall, absent)
	if err != nil {
		return p, err
	}
	if small > share/roundsAim { // not even this size fits: more of a warm-up would only make it worse
		return p.part(p.least()), nil
	}
	large, err := x.warmup(s, p, warmupLarge, absent)
	if err != nil {
		return p, err
	}
	round := (share - small - large) / roundsAim
	if p.window > 0 {
		return p.part(fittingWindows(small, large, round, time.Duration(s.runs(absent))*p.window)), nil
	}
	return p.part(fitting(small, large, round)), nil
}

// runs is how many runs a round has.
func (s Scenario) runs(absent map[string]string) (n int) {
	for _, point := range s.Axis.Points {
		for _, arm := range s.Arms {
			if arm.runsAt(point) && absent[arm.Name] == "" {
				n++
			}
		}
	}
	return n
}

// least is the part below which no scenario goes.
func (p plan) least() float64 {
	if p.window > 0 {
		return 1.0 / windowShrinkMax
	}
	return 1.0 / shrinkMax
}

// part is the plan with less to do. A size keeps two digits, since it is quoted beside results.
func (p plan) part(part float64) plan {
	if p.window > 0 {
		p.window = max(time.Duration(float64(p.window)*part), 1)
		return p
	}
	p.size = max(int(float64(p.size)*part), 1)
	unit := 1
	for p.size/unit >= 100 {
		unit *= 10
	}
	p.size -= p.size % unit
	return p
}

// warmup runs a round at a part of the extent and returns how long it took, less what was made for later runs, too.
func (x *execution) warmup(s Scenario, p plan, divisor float64, absent map[string]string) (time.Duration, error) {
	began, made := time.Now(), x.shared.made
	err := x.round(s, 0, p.part(1/divisor), nil, absent)
	return time.Since(began) - (x.shared.made - made), err
}

// fitting is the part of the full extent at which a round takes at most the given time, by a line through the two warm-ups.
func fitting(small, large, round time.Duration) float64 {
	const at, to = 1.0 / warmupSmall, 1.0 / warmupLarge
	slope := max(float64(large-small)/(to-at), 0)
	fixed := max(float64(small)-slope*at, 0)
	if fixed+slope <= float64(round) {
		return 1
	}
	return max((float64(round)-fixed)/max(slope, 1), 1.0/shrinkMax)
}

// fittingWindows is fitting for scenarios whose windows together are known, so that a noisy warm-up says little wrong: it only
// tells what comes on top.
func fittingWindows(small, large, round, windows time.Duration) float64 {
	const at, to = 1.0 / warmupSmall, 1.0 / warmupLarge
	fixed := max((float64(small+large)-float64(windows)*(at+to))/2, 0)
	return min(max((float64(round)-fixed)/float64(windows), 1.0/windowShrinkMax), 1)
}
