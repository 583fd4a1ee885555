//go:build invariants

package mvcc

import (
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestLargeCommitsHaveATurnWithTheirLatches, and none while they read before that.
func TestLargeCommitsHaveATurnWithTheirLatches(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	for _, conditions := range []int{0, turnOperations} {
		w, latched := largeWrite("k", false), false
		for i := range conditions {
			w.Conditions = append(w.Conditions, Condition{Key: fmt.Append(nil, "none", i), Kind: KeyAbsent})
		}
		x.committing.atStep = func(at commitStep) {
			if at == stepLatched {
				latched = x.committing.turn != nil
			}
		}
		if _, err := x.Commit(t.Context(), w); err != nil {
			t.Fatal(err)
		}
		if x.committing.atStep = nil; !latched {
			t.Errorf("with %d conditions the commit had no turn when it had its latches", conditions)
		}
	}
}
