package harness

import (
	"fmt"
	"io"
	"strings"
)

// WriteBenchstat writes every sample as a line of Go's benchmark format, one configuration for each arm:
//
//	benchstat -col /arm results.txt                 the arms of this run side by side
//	benchstat before.txt after.txt                  the same arms before and after a change
func (r *Report) WriteBenchstat(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "goos: linux\npkg: github.com/epochkv/epochkv/bench\ncpu: %s\ncommit: %s\n", r.Machine.CPU, r.Machine.Commit)
	for _, o := range r.Outcomes {
		for _, series := range o.Series {
			for _, p := range series.Points {
				for _, s := range p.Samples {
					fmt.Fprintf(&b, "Benchmark%s/%s=%s/arm=%s\t%d\t%.2f ns/op\t%.0f ops/s\t%.3f allocs/op\t%.1f B/op", benchName(o.Name), benchName(o.Axis),
						benchWord(o.At(p.At)), benchWord(series.Arm), o.Size, 1e9/s.Rate, s.Rate, s.AllocsPerOp, s.BytesPerOp)
					if value, ok := s.measure(o.Show); ok && o.Show != "" {
						fmt.Fprintf(&b, "\t%g %s", value, benchWord(o.Show))
					}
					b.WriteByte('\n')
				}
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// benchName turns "put-async" into "PutAsync", as benchmarks are named.
func benchName(name string) string {
	var b strings.Builder
	for part := range strings.FieldsFuncSeq(name, func(r rune) bool { return r == '-' || r == ' ' }) {
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
}

// benchWord keeps what ends a name or a unit out of it.
func benchWord(name string) string {
	return strings.Map(func(r rune) rune {
		switch r {
		case ' ', '/', ',', '\t':
			return '-'
		}
		return r
	}, name)
}
