package server

import (
	"context"
	"sync"
)

// consoleCalls are the calls of the console that are executed. They come by HTTP, so that neither transport waits for them when the
// server stops, and the store must outlive them as it does other requests.
//
//	call ─► begin ─► execute ─► end          drain: no more begin; wait for the end of those that have; from the cut-off on, end their contexts
type consoleCalls struct {
	cut context.Context // ended at the cut-off; constant after Open
	end context.CancelFunc

	mu      sync.Mutex // a leaf; guards what follows
	ended   bool       // no call begins any more
	running sync.WaitGroup
}

func (c *consoleCalls) init() { c.cut, c.end = context.WithCancel(context.Background()) }

// begin begins a call, whose context ends at the cut-off. It reports false when the server has drained. After true the caller calls done.
func (c *consoleCalls) begin(ctx context.Context) (_ context.Context, done func(), ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return ctx, nil, false
	}
	c.running.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.cut, func() { cancel(errShuttingDown) })
	return ctx, func() {
		stop()
		cancel(nil)
		c.running.Done()
	}, true
}

// drain returns when no call is left. Those that are left when ctx ends are cut off.
func (c *consoleCalls) drain(ctx context.Context) {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	defer context.AfterFunc(ctx, c.end)()
	c.running.Wait()
}
