package invariants

import "testing"

func TestFailPanicsWithWhatIsBroken(t *testing.T) {
	defer func() {
		if got, want := recover(), "broken invariant: 1 is not 2"; got != want {
			t.Errorf("panicked with %v, want %q", got, want)
		}
	}()
	Fail("%d is not %d", 1, 2)
}
