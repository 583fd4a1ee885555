package server

import (
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestClockIsShownAndAccepted: the clock of a server follows the system's time, and accepting it changes nothing then.
func TestClockIsShownAndAccepted(t *testing.T) {
	h := mustStart(t)
	for _, accept := range []bool{false, true} {
		before := time.Now()
		now, err := h.admin.Clock(testContext(t), &pb.ClockRequest{Accept: accept})
		if err != nil {
			t.Fatal(err)
		}
		at := time.UnixMicro(int64(now.GetTimeUs()))
		if at.Before(before.Add(-time.Minute)) || at.After(time.Now().Add(time.Minute)) || now.GetDifferenceUs() > time.Minute.Microseconds() {
			t.Fatalf("at %v the clock shows %v, difference %d", before, at, now.GetDifferenceUs())
		}
	}
}
