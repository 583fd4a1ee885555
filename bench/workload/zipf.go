package workload

import (
	"math"
	"math/rand/v2"
)

// Zipf draws numbers in [0, n) of which a few come up most of the time. The skew is below 1; the standard library's generator
// needs one above. The method is that of Gray et al., "Quickly generating billion-record synthetic databases".
type Zipf struct {
	random           *rand.Rand
	n                float64
	alpha, zeta, eta float64
	half             float64 // what rank 1 has of rank 0
}

// SkewYCSB is the skew that YCSB draws with.
const SkewYCSB = 0.99

// NewZipf prepares draws from n numbers.
func NewZipf(random *rand.Rand, n int, skew float64) *Zipf {
	zeta := 0.0
	for i := 1; i <= n; i++ {
		zeta += 1 / math.Pow(float64(i), skew)
	}
	two := 1 + 1/math.Pow(2, skew)
	return &Zipf{
		half: math.Pow(0.5, skew), random: random, n: float64(n), alpha: 1 / (1 - skew), zeta: zeta,
		eta: (1 - math.Pow(2/float64(n), 1-skew)) / (1 - two/zeta),
	}
}

// Next returns the rank of the next draw: 0 is the most frequent. Keys are random, so that neighbouring ranks are no neighbours.
func (z *Zipf) Next() int {
	u := z.random.Float64()
	switch uz := u * z.zeta; {
	case uz < 1:
		return 0
	case uz < 1+z.half:
		return 1
	}
	return min(int(z.n*math.Pow(z.eta*u-z.eta+1, z.alpha)), int(z.n)-1)
}

// With is the same distribution drawn from another source of randomness. It shares nothing that draws change.
func (z *Zipf) With(random *rand.Rand) *Zipf {
	with := *z
	with.random = random
	return &with
}
