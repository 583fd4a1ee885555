package server

import (
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestServerIsIdleAfterAWhileWithoutWork: a request in progress and a commit since the last look are work.
func TestServerIsIdleAfterAWhileWithoutWork(t *testing.T) {
	requests, visible := 0, keys.Epoch(5)
	i := &idleness{requests: func() int { return requests }, visible: func() keys.Epoch { return visible }}
	long := func() { i.busyAt = i.busyAt.Add(-2 * idleAfter) }
	if i.idle() {
		t.Error("at the first look, nothing is known")
	}
	if long(); !i.idle() {
		t.Error("without work for a while it is idle")
	}
	if visible++; i.idle() {
		t.Error("there was a commit")
	}
	if requests = 1; i.idle() {
		t.Error("a request is in progress")
	}
	if requests = 0; i.idle() || time.Since(i.busyAt) > time.Minute {
		t.Error("a request was in progress just before")
	}
	if long(); !i.idle() {
		t.Error("without work for a while it is idle again")
	}
}
