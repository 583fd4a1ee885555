package storage

import "context"

// contextMutex is a mutex that may be held for as long as a bulk load runs: a wait for it ends with a context.
type contextMutex struct{ held chan struct{} } // capacity 1: holds a token while it is locked

func newContextMutex() contextMutex { return contextMutex{make(chan struct{}, 1)} }

// Lock locks the mutex, or returns the cause of the context's end.
func (m contextMutex) Lock(ctx context.Context) error {
	select {
	case m.held <- struct{}{}:
		return nil
	default:
	}
	select {
	case m.held <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Unlock unlocks the mutex.
func (m contextMutex) Unlock() { <-m.held }

// TryLock locks the mutex if it is free, and reports whether it did.
func (m contextMutex) TryLock() bool {
	select {
	case m.held <- struct{}{}:
		return true
	default:
		return false
	}
}
