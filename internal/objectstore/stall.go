package objectstore

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"
)

// stall ends an attempt whose target has stopped to send or to take bytes. A whole attempt of unknown size has no time limit, but each
// step of it has one: the time between two signs of life. The time that the caller takes for what it has got does not count.
type stall struct {
	parent   context.Context // of the attempt
	patience time.Duration
	cancel   context.CancelFunc

	mu      sync.Mutex
	timer   *time.Timer
	stalled bool
}

// watch begins to watch an attempt, whose context ends when the target has stalled. The caller calls end.
func (s *retrying) watch(ctx context.Context, patience time.Duration) (context.Context, *stall) {
	watched, cancel := context.WithCancel(ctx)
	w := &stall{parent: ctx, patience: patience, cancel: cancel}
	w.timer = time.AfterFunc(patience, w.expire)
	return watched, w
}

func (w *stall) expire() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stalled = true
	w.cancel()
}

// wait begins to wait for the target.
func (w *stall) wait() { w.timer.Reset(w.patience) }

// rest ends the wait: what happens next takes the caller's time.
func (w *stall) rest() { w.timer.Stop() }

// end releases the attempt's context.
func (w *stall) end() {
	w.timer.Stop()
	w.cancel()
}

// explain makes a temporary failure of an error that is the end of the attempt's context. The operation may also have ended for good
// at the same time.
func (w *stall) explain(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil || err == io.EOF || !w.stalled || w.parent.Err() != nil { //nolint:errorlint // io.EOF is never wrapped here
		return err
	}
	return fmt.Errorf("%w: no byte within %v: %w", errTemporary, w.patience, err)
}

// watchedContent is the content of an object whose creation is watched.
type watchedContent struct {
	Content
	watch *stall
}

func (c *watchedContent) Open() (io.ReadCloser, error) {
	r, err := c.Content.Open()
	if err != nil {
		return nil, err
	}
	return &watchedReader{r, c.watch}, nil
}

// watchedReader is a source: the time in it is not the target's.
type watchedReader struct {
	io.ReadCloser
	watch *stall
}

func (r *watchedReader) Read(p []byte) (int, error) {
	r.watch.rest()
	defer r.watch.wait()
	return r.ReadCloser.Read(p)
}
