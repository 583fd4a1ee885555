package storage

import "context"

// contextMutex is a mutex that may be held for as long as a bulk load takes: waiting for it ends with a context.
type contextMutex struct{ held chan struct{} } // capacity 1: holds a token while it is locked

func newContextMutex() contextMutex { return contextMutex{make(chan struct{}, 1)} }

// LockOrEnd locks the mutex, or returns why the context has ended.
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

// Unlock ends what LockOrEnd began.
func (m contextMutex) Unlock() { <-m.held }

// TryLock locks the mutex if it is free, and reports whether.
func (m contextMutex) TryLock() bool {
	select {
	case m.held <- struct{}{}:
		return true
	default:
		return false
	}
}
