package harness

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"
)

func TestOpenLoopChargesAStallToEveryCallItDelays(t *testing.T) {
	var calls atomic.Int64
	latencies, _, err := OpenLoop(1000, 50*time.Millisecond, 1, func(int) error {
		if calls.Add(1) == 1 {
			time.Sleep(40 * time.Millisecond)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := calls.Load(); n != 50 {
		t.Errorf("%d calls arrived, want 50", n)
	}
	if p50 := time.Duration(latencies[0].histogram.ValueAtQuantile(50)); p50 < 5*time.Millisecond {
		t.Errorf("median %v: calls that were due during the stall must show it", p50)
	}
}

func TestOpenLoopEndsWithTheErrorOfACall(t *testing.T) {
	broken := errors.New("broken")
	if _, _, err := OpenLoop(10_000, 20*time.Millisecond, 2, func(int) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("got %v, want the call's error", err)
	}
}
