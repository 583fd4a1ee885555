package harness

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Summary describes the samples of one arm at one point.
type Summary struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	CV     float64 `json:"cv"` // standard deviation over mean
	Count  int     `json:"count"`
}

// Ratio compares two arms at one point, round by round.
type Ratio struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"` // 95 % bootstrap interval of the median
	High   float64 `json:"high"`
}

// finite replaces what JSON cannot hold: a ratio to nothing is as large as can be, and of nothing to nothing is 1.
func (r Ratio) finite() Ratio {
	for _, x := range []*float64{&r.Median, &r.Low, &r.High} {
		switch {
		case math.IsNaN(*x):
			*x = 1
		case math.IsInf(*x, 0):
			*x = math.Copysign(math.MaxFloat64, *x)
		}
	}
	return r
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	mid := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[mid-1] + sorted[mid]) / 2
}

func summarize(values []float64) Summary {
	if len(values) == 0 {
		return Summary{}
	}
	var sum, squares float64
	for _, v := range values {
		sum += v
	}
	mean := sum / float64(len(values))
	for _, v := range values {
		squares += (v - mean) * (v - mean)
	}
	s := Summary{Median: median(values), Min: slices.Min(values), Max: slices.Max(values), Count: len(values)}
	if len(values) > 1 && mean != 0 {
		s.CV = math.Sqrt(squares/float64(len(values)-1)) / mean
	}
	return s
}

// resamples of the bootstrap: with 2000 the second digit of the interval is stable, and no more digits are shown.
const resamples = 2000

// compare takes the ratio of each round and the median over rounds. The samples must be of the same rounds, in order.
func compare(arm, against []float64) Ratio {
	n := min(len(arm), len(against))
	if n == 0 {
		return Ratio{}
	}
	ratios := make([]float64, n)
	for i := range ratios {
		ratios[i] = arm[i] / against[i]
	}
	return bootstrap(ratios)
}

// bootstrap is the median of values with the interval that contains the median of 95 % of the resamples. Of five values that is all of their
// range, which holds the true median with 94 %; with six or more it is narrower than the range, or better. Its randomness is
// fixed, so that the same samples always give the same interval.
func bootstrap(values []float64) Ratio {
	random := rand.New(rand.NewPCG(1, uint64(len(values))))
	medians := make([]float64, resamples)
	draw := make([]float64, len(values))
	for i := range medians {
		for j := range draw {
			draw[j] = values[random.IntN(len(values))]
		}
		medians[i] = median(draw)
	}
	slices.Sort(medians)
	return Ratio{Median: median(values), Low: medians[resamples*25/1000], High: medians[resamples*975/1000-1]}
}
