package client

import (
	"context"
	"errors"
	"sync"
	"time"
)

// background is what a client does besides its calls: keepers of leases and their rounds, and undos of attempts to acquire
// locks. All of it ends with the client. The zero background is ready.
type background struct {
	mu      sync.Mutex // guards what follows
	ctx     context.Context
	cancel  context.CancelFunc
	ended   bool
	running int
	idle    chan struct{} // closed when nothing runs any more; nil unless end waits
}

// closeWait bounds how long Close waits. All that runs in the background ends when its context does.
const closeWait = 5 * time.Second

var errStillRunning = errors.New("client: what runs in the background has not ended in time")

// run runs f in the background. After end, f finds its context ended.
func (b *background) run(f func(context.Context)) {
	b.mu.Lock()
	if b.ctx == nil {
		b.ctx, b.cancel = context.WithCancel(context.Background())
	}
	if b.ended {
		b.cancel()
	}
	ctx := b.ctx
	b.running++
	b.mu.Unlock()
	go func() {
		defer b.leave()
		f(ctx)
	}()
}

func (b *background) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running--; b.running == 0 && b.idle != nil {
		close(b.idle)
		b.idle = nil
	}
}

// end ends what runs.
func (b *background) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended = true; b.cancel != nil {
		b.cancel()
	}
}

// wait waits until nothing runs, for so long at most.
func (b *background) wait(most time.Duration) error {
	b.mu.Lock()
	if b.running == 0 {
		b.mu.Unlock()
		return nil
	}
	if b.idle == nil {
		b.idle = make(chan struct{})
	}
	idle := b.idle
	b.mu.Unlock()
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-idle:
		return nil
	case <-timer.C:
		return errStillRunning
	}
}
