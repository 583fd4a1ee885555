package storage

import (
	"context"
	"sync"
	"sync/atomic"
)

// rotations lets a writer wait for a rotation no longer than its context. A rotation may have to wait for the log, which has no image left
// while a sync is stuck; it holds the engine's mutex meanwhile. So it runs in a goroutine of its own when the writer may have to leave. It
// goes on without that writer, for the others who wait for it.
type rotations struct {
	turn    chan struct{}  // capacity 1: one attempt at a time, so that nobody waits for the mutex
	running sync.WaitGroup // until Close
}

type attempted struct {
	room <-chan struct{}
	err  error
}

// States of a claim that a rotation may make for a writer.
const (
	claimOpen int32 = iota
	claimMade
	claimGivenUp
)

// attempt is advance within a context. claim, if there is one, runs once at most, and not any more when attempt has returned.
func (e *Engine) attempt(ctx context.Context, full *generation, bodyBytes int, claim func(*generation)) (<-chan struct{}, error) {
	r := &e.rotations
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if ctx.Done() == nil {
		defer func() { <-r.turn }()
		return e.advance(full, bodyBytes, claim)
	}
	var state atomic.Int32
	first := claim
	if claim != nil {
		first = func(next *generation) {
			if state.CompareAndSwap(claimOpen, claimMade) {
				claim(next)
			}
		}
	}
	result := make(chan attempted, 1)
	r.running.Go(func() {
		room, err := e.advance(full, bodyBytes, first)
		<-r.turn
		result <- attempted{room, err}
	})
	select {
	case a := <-result:
		return a.room, a.err
	case <-ctx.Done():
	}
	if state.CompareAndSwap(claimOpen, claimGivenUp) {
		return nil, context.Cause(ctx)
	}
	a := <-result // the epoch is reserved: the rotation is all but over
	return a.room, a.err
}
