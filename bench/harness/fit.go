package harness

import "math"

// Fit tells how an arm's cost grows with the parameter: cost ~ at^Slope. 0 is constant cost per operation, 1 is cost in
// proportion, and the logarithm of a tree or a skiplist shows as something above 0.
type Fit struct {
	Slope float64 `json:"slope"`
	Base  float64 `json:"ns_at_one"` // where the line is at 1, in nanoseconds
	R2    float64 `json:"r2"`        // the share of the variation that the fit explains
}

// cost is where the line is.
func (f *Fit) cost(at int) float64 { return f.Base * math.Pow(float64(at), f.Slope) }

// fit lays a line through the logarithms of the median cost per operation, by least squares. It needs three points: a line
// through two fits always.
func fit(points []Point) *Fit {
	var xs, ys []float64
	for _, p := range points {
		if p.At > 0 && p.Rate.Median > 0 {
			xs, ys = append(xs, math.Log(float64(p.At))), append(ys, -math.Log(p.Rate.Median))
		}
	}
	if len(xs) < 3 {
		return nil
	}
	var mx, my float64
	for i := range xs {
		mx, my = mx+xs[i]/float64(len(xs)), my+ys[i]/float64(len(ys))
	}
	var sxy, sxx, syy float64
	for i := range xs {
		sxy += (xs[i] - mx) * (ys[i] - my)
		sxx += (xs[i] - mx) * (xs[i] - mx)
		syy += (ys[i] - my) * (ys[i] - my)
	}
	f := &Fit{Slope: sxy / sxx, R2: 1}
	f.Base = 1e9 * math.Exp(my-f.Slope*mx)
	if syy > 0 {
		f.R2 = sxy * sxy / (sxx * syy)
	}
	return f
}
