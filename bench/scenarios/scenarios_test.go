package scenarios

import (
	"slices"
	"testing"

	"epochkv/bench/harness"
)

// A figure whose arm is misspelt would silently never be judged.
func TestFiguresNameArmsAndPointsOfTheirScenario(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range All() {
		if seen[s.Name] {
			t.Errorf("two scenarios are called %s", s.Name)
		}
		seen[s.Name] = true
		known := func(arm string) bool {
			return slices.ContainsFunc(s.Arms, func(a harness.Arm) bool { return a.Name == arm })
		}
		for _, f := range s.Figures {
			if !known(f.Arm) || f.Against != "" && !known(f.Against) {
				t.Errorf("%s: figure names arms %q and %q, which are not both there", s.Name, f.Arm, f.Against)
			}
			for _, point := range f.Points {
				if !slices.Contains(s.Axis.Points, point) {
					t.Errorf("%s: figure names point %d, which is not on the axis", s.Name, point)
				}
			}
		}
	}
}
