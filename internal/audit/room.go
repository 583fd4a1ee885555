package audit

import (
	"context"
	"time"
)

// waitingLine is a request that waits for room for its line.
type waitingLine struct {
	bytes int
	ready chan error // has nil when there is room, or why there will be none
}

// Admit makes room for the line of a request of a client before it is executed, if the log must not lose one. It waits for room until ctx ends. Clients
// have turns, and the next one has as much room as it needs before others have any: so smaller lines do not keep out a larger one. After nil the caller
// must call Write with admitted bytes once. The client is a comparable value.
func (l *Log) Admit(ctx context.Context, client any, bytes int) error {
	if l.options.Full != FullBlock {
		return nil
	}
	l.mu.Lock()
	failed := l.failsLocked()
	if failed || l.waiting.Len() == 0 && l.fitsLocked(bytes) {
		defer l.mu.Unlock()
		if failed {
			return ErrUnavailable
		}
		l.bytes += bytes
		return nil
	}
	w := &waitingLine{bytes: bytes, ready: make(chan error, 1)}
	place := l.waiting.Push(client, w)
	l.mu.Unlock()
	looks := time.NewTicker(l.options.patience)
	defer looks.Stop()
	for {
		select {
		case err := <-w.ready:
			return err
		case <-looks.C: // the device may not answer
			l.wake()
		case <-ctx.Done():
			l.mu.Lock()
			defer l.mu.Unlock()
			if !l.waiting.Remove(place) && <-w.ready == nil {
				l.bytes -= bytes
			}
			l.wakeLocked()
			return context.Cause(ctx)
		}
	}
}

// failsLocked reports whether nothing can be written.
func (l *Log) failsLocked() bool { return l.errLocked() != nil || l.closed }

// fitsLocked reports whether there is room for a line. One that is alone has any size.
func (l *Log) fitsLocked(bytes int) bool {
	return l.bytes == 0 || l.bytes+bytes <= l.options.QueueBytes
}

func (l *Log) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wakeLocked()
}

// wakeLocked lets those in whose turn there is room, or refuses all that wait while nothing can be written.
func (l *Log) wakeLocked() {
	failed := l.failsLocked()
	for next := l.waiting.Next(); next != nil; next = l.waiting.Next() {
		w := next.Value
		switch {
		case failed:
			w.ready <- ErrUnavailable
		case l.fitsLocked(w.bytes):
			l.bytes += w.bytes
			w.ready <- nil
		default:
			return
		}
		l.waiting.Pop()
	}
}
