package testseed

import "testing"

func TestEnvironmentShiftsTheSeeds(t *testing.T) {
	t.Setenv(Variable, "")
	if n := Base(t); n != 0 {
		t.Errorf("without it: %d", n)
	}
	t.Setenv(Variable, "18446744073709551615")
	if n := Base(t); n != 1<<64-1 {
		t.Errorf("with it: %d", n)
	}
}
