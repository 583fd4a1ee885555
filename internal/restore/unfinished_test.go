package restore

import (
	"errors"
	"path/filepath"
	"testing"
)

// TestAnUnfinishedRestoreSaysSo: at every step of a restore its directory is one that a server refuses, and the finished one is not.
func TestAnUnfinishedRestoreSaysSo(t *testing.T) {
	b := newBench(t)
	b.commits(30)
	b.archived()
	dir := filepath.Join(t.TempDir(), "restored")
	steps := 0
	_, err := Run(t.Context(), Options{Store: b.target, Dir: dir, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage(), Progress: func(p Progress) {
		if p.Step == "plan" {
			return
		}
		steps++
		if err := CheckFinished(dir + partialSuffix); !errors.Is(err, ErrUnfinished) {
			t.Errorf("at the step %q: %v", p.Step, err)
		}
	}})
	check(t, err)
	if err := CheckFinished(dir); err != nil || steps < 2 {
		t.Errorf("after %d steps: %v", steps, err)
	}
}
