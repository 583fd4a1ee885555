package wal

import (
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
)

// ObserveDurable is WaitDurable for a goroutine that only follows the log: it neither flushes nor requests a flush. e need
// not be reserved yet.
func (l *Log) ObserveDurable(ctx context.Context, e keys.Epoch) error {
	if l.Durable() >= e {
		return nil
	}
	w, one := &l.waits, &waiter{signal: make(chan struct{}, 1), epoch: e}
	w.mu.Lock()
	if err := l.refusal(e); err != nil || l.Durable() >= e {
		w.mu.Unlock()
		return err
	}
	w.observers = append(w.observers, one)
	w.mu.Unlock()
	select {
	case <-one.signal:
		return l.Result(e)
	case <-ctx.Done():
	}
	w.mu.Lock()
	w.observers = slices.DeleteFunc(w.observers, func(other *waiter) bool { return other == one })
	w.mu.Unlock()
	return ctx.Err()
}

func (w *waits) wakeObserversLocked(durable keys.Epoch, over bool) {
	w.observers = slices.DeleteFunc(w.observers, func(one *waiter) bool {
		if !over && one.epoch > durable {
			return false
		}
		one.signal <- struct{}{}
		return true
	})
}
