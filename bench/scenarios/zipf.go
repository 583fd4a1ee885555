package scenarios

import (
	"math"
	"math/rand/v2"
)

// zipf draws numbers in [0, n) of which a few come up most of the time, with YCSB's skew of 0.99. The standard library's
// generator needs a skew above 1. The method is that of Gray et al., "Quickly generating billion-record synthetic databases".
type zipf struct {
	random           *rand.Rand
	n                float64
	alpha, zeta, eta float64
}

const skew = 0.99

func newZipf(random *rand.Rand, n int) *zipf {
	zeta := 0.0
	for i := 1; i <= n; i++ {
		zeta += 1 / math.Pow(float64(i), skew)
	}
	two := 1 + 1/math.Pow(2, skew)
	return &zipf{
		random: random, n: float64(n), alpha: 1 / (1 - skew), zeta: zeta,
		eta: (1 - math.Pow(2/float64(n), 1-skew)) / (1 - two/zeta),
	}
}

// next returns the rank of the next draw: 0 is the most frequent. Keys are random, so that neighbouring ranks are no neighbours.
func (z *zipf) next() int {
	u := z.random.Float64()
	switch uz := u * z.zeta; {
	case uz < 1:
		return 0
	case uz < 1+math.Pow(0.5, skew):
		return 1
	}
	return min(int(z.n*math.Pow(z.eta*u-z.eta+1, z.alpha)), int(z.n)-1)
}
