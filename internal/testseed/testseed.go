// Package testseed shifts the seeds of tests that run a fixed number of seeded rounds, says whether the race detector makes them slow, and counts how
// often others run beside a goroutine.
//
// A normal run uses the seeds 0, 1, 2 ..., so that it is the same every time. With EPOCHKV_SEED=N in the environment the
// rounds use N, N+1, N+2 ...: `make crash` sets it from the clock, and each test prints the command that repeats its run.
//
// The package is for tests. It does not generate random numbers.
package testseed

import (
	"os"
	"strconv"
	"testing"
)

// Variable is the environment variable that holds the base.
const Variable = "EPOCHKV_SEED"

// Base is the first seed of a test's rounds: the value of Variable, or zero.
func Base(t testing.TB) uint64 {
	t.Helper()
	text := os.Getenv(Variable)
	if text == "" {
		return 0
	}
	base, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v; expected a number", Variable, err)
	}
	t.Logf("replay with: %s=%d go test -count=1 -run '^%s$' in this package", Variable, base, t.Name())
	return base
}

// SkipUnderRace skips a test that the race detector makes long and finds little in: one goroutine calls the store, one step after the
// other, and compares bytes, pages or answers; or it measures for seconds what shorter tests do under the detector. It runs without the
// detector; make test-invariants also runs those of the engine's packages with the expensive assertions.
func SkipUnderRace(t *testing.T) {
	t.Helper()
	if RaceDetector == 1 {
		t.Skip("runs without the race detector")
	}
}
