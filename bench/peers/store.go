package peers

import (
	"context"
	"sync"
)

// store is what the load generator asks of a server, through the server's own client. Its methods may be called from many goroutines.
type store interface {
	get(ctx context.Context, key []byte) (value []byte, err error) // nil if there is none
	put(ctx context.Context, key, value []byte) error
	putAll(ctx context.Context, keys, values [][]byte) error // atomically
	// insert is a put of a new key that ranges must find.
	insert(ctx context.Context, key, value []byte) error
	// scan reads the first records from one key to before another, or to the end if that is nil.
	scan(ctx context.Context, from, to []byte, limit int) (keys, values [][]byte, err error)
	// swap sets key to value if it holds old, and reports whether it did.
	swap(ctx context.Context, key, old, value []byte) (bool, error)
	// stream keeps depth requests in flight on one connection, until next has no more.
	stream(ctx context.Context, depth int, next func(*request) bool, done func(*request, []byte) error) error
	close() error
}

// request is one of a stream: a put if it has a value, else a get. Tag is the load generator's.
type request struct {
	key, value []byte
	tag        tag
}

// concurrently streams by calls of so many goroutines, for clients that have no other way.
func concurrently(ctx context.Context, s store, depth int, next func(*request) bool, done func(*request, []byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wait sync.WaitGroup
	for range depth {
		wait.Go(func() {
			var r request
			for ctx.Err() == nil && next(&r) {
				if err := one(ctx, s, &r, done); err != nil {
					cancel(err)
				}
			}
		})
	}
	wait.Wait()
	return context.Cause(ctx)
}

func one(ctx context.Context, s store, r *request, done func(*request, []byte) error) error {
	if r.value != nil {
		if err := s.put(ctx, r.key, r.value); err != nil {
			return err
		}
		return done(r, nil)
	}
	value, err := s.get(ctx, r.key)
	if err != nil {
		return err
	}
	return done(r, value)
}
