package backup

import (
	"context"
	"runtime"
	"sync"
)

// workers bound how many goroutines compress at a time.
type workers struct {
	usual, most int
	idle        func() bool

	mu      sync.Mutex // guards running
	running int
	changed chan struct{} // has a token after one has ended
	all     sync.WaitGroup
}

func newWorkers(o Options) *workers {
	w := &workers{usual: o.Workers, most: o.Workers, idle: o.Idle, changed: make(chan struct{}, 1)}
	if o.Workers == 0 {
		w.most = runtime.GOMAXPROCS(0)
		w.usual = max(1, w.most/2)
	}
	return w
}

// begin waits until another goroutine may run: half of the processors have one, and all of them while the server is idle.
func (w *workers) begin(ctx context.Context) error {
	for !w.tryBegin() {
		select {
		case <-w.changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (w *workers) tryBegin() bool {
	limit := w.usual
	if w.idle != nil && w.idle() {
		limit = w.most
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running >= limit {
		return false
	}
	w.running++
	w.all.Add(1)
	return true
}

func (w *workers) end() {
	w.mu.Lock()
	w.running--
	w.mu.Unlock()
	select {
	case w.changed <- struct{}{}:
	default:
	}
	w.all.Done()
}

func (w *workers) wait() { w.all.Wait() }
