package peers

import (
	"context"
	"errors"
	"sync"

	"github.com/epochkv/epochkv/client"
)

// epochKV speaks to kvserver, and to the echo server, which has the same messages.
type epochKV struct {
	*client.Client
	durability client.WriteOption
}

func dialEpochKV(durability client.WriteOption) dialer {
	return func(address string) (store, error) {
		c, err := client.Dial(address)
		if err != nil {
			return nil, err
		}
		return epochKV{c, durability}, nil
	}
}

func (e epochKV) get(ctx context.Context, key []byte) ([]byte, error) {
	v, err := e.Get(ctx, key)
	return v.Data, err
}

func (e epochKV) put(ctx context.Context, key, value []byte) error {
	_, err := e.Put(ctx, key, value, e.durability)
	return err
}

func (e epochKV) insert(ctx context.Context, key, value []byte) error { return e.put(ctx, key, value) }

func (e epochKV) putAll(ctx context.Context, keys, values [][]byte) error {
	var b client.Batch
	for i := range keys {
		b.Put(keys[i], values[i])
	}
	_, err := e.Write(ctx, &b, e.durability)
	return err
}

func (e epochKV) scan(ctx context.Context, from, to []byte, limit int) (keys, values [][]byte, err error) {
	for page, err := range e.Pages(ctx, client.Between(from, to), client.ScanOptions{Limit: uint64(limit)}) {
		if err != nil {
			return nil, nil, err
		}
		for i := range page.Entries {
			keys, values = append(keys, page.Entries[i].Key), append(values, page.Entries[i].Value)
		}
	}
	return keys, values, nil
}

func (e epochKV) swap(ctx context.Context, key, old, value []byte) (bool, error) {
	done, err := e.Execute(ctx, client.When(client.ValueIs(key, old)).Then(client.OpPut(key, value)), e.durability)
	return done.Succeeded, err
}

func (e epochKV) stream(ctx context.Context, depth int, next func(*request) bool, done func(*request, []byte) error) error {
	p, err := e.Pipeline(ctx, client.PipelineOptions{InFlight: depth})
	if err != nil {
		return err
	}
	var failed firstError
	for r := new(request); failed.get() == nil && next(r); r = new(request) {
		if r.value != nil {
			err = p.Put(r.key, r.value, func(_ client.Epoch, err error) { failed.set(or(err, func() error { return done(r, nil) })) }, e.durability)
		} else {
			err = p.Get(r.key, func(v client.Value, err error) { failed.set(or(err, func() error { return done(r, v.Data) })) })
		}
		if err != nil {
			break
		}
	}
	return errors.Join(err, p.Close(), failed.get())
}

func (e epochKV) close() error { return e.Close() }

// or is the error, or what comes of going on without one.
func or(err error, next func() error) error {
	if err != nil {
		return err
	}
	return next()
}

// firstError keeps the first of several goroutines' errors.
type firstError struct {
	mu  sync.Mutex
	err error
}

func (f *firstError) set(err error) {
	if err == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

func (f *firstError) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}
