package server

import (
	"context"
	"errors"
	"testing"
	"time"
)

// TestAStartOnAStuckDeviceEnds: after a timeout, or at once when the operator insists. What returns in time is returned.
func TestAStartOnAStuckDeviceEnds(t *testing.T) {
	stuck := make(chan struct{})
	defer close(stuck)
	hangs := func() (*Server, error) {
		<-stuck
		return nil, nil //nolint:nilnil // it comes too late for anyone
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if _, err := openUntil(stopped, nil, time.Millisecond, hangs); !errors.Is(err, errStuckOpening) {
		t.Errorf("after the timeout: %v", err)
	}
	cutOff := make(chan struct{})
	close(cutOff)
	if _, err := openUntil(stopped, cutOff, time.Hour, hangs); !errors.Is(err, errStuckOpening) {
		t.Errorf("cut off: %v", err)
	}
	opened, failed := new(Server), errors.New("failed")
	for _, ctx := range []context.Context{t.Context(), stopped} {
		if s, err := openUntil(ctx, nil, time.Hour, func() (*Server, error) { return opened, failed }); s != opened || err != failed {
			t.Errorf("got %p, %v", s, err)
		}
	}
}
