package server

import "testing"

// TestRoomForInvocationsIsMadeOnce: room that grew would be allocated five times over, and nothing counts it.
func TestRoomForInvocationsIsMadeOnce(t *testing.T) {
	var b invocations
	b.reset(3)
	b.reset(50_000)
	if len(b.ops) != 50_000 || len(b.outcomes) != 50_000 || cap(b.ops) > 51_000 || cap(b.outcomes) > 51_000 {
		t.Errorf("%d operations with room for %d, %d outcomes with room for %d", len(b.ops), cap(b.ops), len(b.outcomes), cap(b.outcomes))
	}
	if got := testing.AllocsPerRun(5, func() { b.reset(50_000) }); got > 2 {
		t.Errorf("%v allocations", got)
	}
}
