package server

import (
	"fmt"
	"testing"
)

// TestAClientLeavesWatchesToOthers: whatever it has, as much is free for others, and what has ended is counted no more.
func TestAClientLeavesWatchesToOthers(t *testing.T) {
	const most = 100
	var u watchUnits
	counts := map[string]int64{}
	fill := func(client string) int64 {
		for u.reserve(client, 1, most) == nil {
			counts[client]++
		}
		return counts[client]
	}
	if n := fill("first"); n != most/2 {
		t.Errorf("a client alone has %d of %d", n, most)
	}
	if err := u.reserve("second", most/4+1, most); err == nil {
		t.Error("a large watch takes more than it leaves")
	}
	if n := fill("second"); n != most/4 {
		t.Errorf("a second one has %d of %d", n, most)
	}
	for i := range most - most/2 - most/4 {
		fill(fmt.Sprint(i))
	}
	if used := u.used.Load(); used != most {
		t.Errorf("many clients have %d of %d", used, most)
	}
	for client, n := range counts {
		u.release(client, n)
	}
	if u.used.Load() != 0 || u.clients() != 0 {
		t.Errorf("%d are used by %d clients in the end", u.used.Load(), u.clients())
	}
}
