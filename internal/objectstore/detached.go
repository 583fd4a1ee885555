package objectstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// detached makes each call of a directory in a goroutine of its own, and leaves it a moment after the context has ended: the kernel may not return from a system call
// while a device, or the server of a network file system, does not answer.
//
//	call ─► goroutine: the directory ─► result
//	  └─ the context has ended: the caller goes on, and what it has passed is not touched any more
//
// A call that was left goes on when the device answers. It finds that its context has ended, makes no object, and closes what it has opened. But it
// may be past that, in the rename or the deletion itself: others that create or delete the object wait until it has returned, see changing.
type detached struct{ inner Store }

// leaveAfter is how long a call may go on after the end of its context before it is left. One that a device answers is rarely left then, and so
// nothing of it comes after its caller has ended.
const leaveAfter = 250 * time.Millisecond

// errLeft means that a call was left.
var errLeft = errors.New("the device does not answer")

// LeftError is errLeft of a call that runs.
type LeftError struct {
	Returned <-chan struct{} // closed when the call has returned
	Cause    error           // of the end of its context
}

// Error implements error.
func (e *LeftError) Error() string { return fmt.Sprintf("%v: %v", errLeft, e.Cause) }

// Unwrap returns what errors.Is finds.
func (e *LeftError) Unwrap() []error { return []error{errLeft, e.Cause} }

// detach calls f in a goroutine. If the context ends leaveAfter before f does, it calls leave and returns *LeftError, and the result of f is dropped.
// The caller has asked left before.
func detach[T any](ctx context.Context, store string, f func() (T, error), leave func(), drop func(T)) (T, error) {
	type result struct {
		value T
		err   error
	}
	returned := make(chan result, 1)
	var mu sync.Mutex // guards ended and gone
	ended, gone := false, chan struct{}(nil)
	go func() {
		value, err := f()
		mu.Lock()
		defer mu.Unlock()
		if ended = true; gone != nil {
			left.remove(store)
			close(gone)
			drop(value)
			return
		}
		returned <- result{value, err}
	}()
	select {
	case r := <-returned:
		return r.value, r.err
	case <-ctx.Done():
	}
	moment := time.NewTimer(leaveAfter)
	defer moment.Stop()
	select {
	case r := <-returned:
		return r.value, r.err
	case <-moment.C:
	}
	mu.Lock()
	if !ended {
		gone = make(chan struct{})
		left.add(store)
	}
	mu.Unlock()
	if gone == nil {
		r := <-returned
		return r.value, r.err
	}
	leave()
	var none T
	return none, &LeftError{Returned: gone, Cause: context.Cause(ctx)}
}

// call is detach for what has no result.
func call(ctx context.Context, store string, f func() error, leave func()) error {
	_, err := detach(ctx, store, func() (struct{}, error) { return struct{}{}, f() }, leave, func(struct{}) {})
	return err
}

// changes are the calls that create or delete an object, of all stores, those included that were left: an object that is deleted and made again
// would be deleted once more if the first attempt to delete it came last.
type changes struct {
	mu     sync.Mutex
	ending map[string]chan struct{} // by the object; closed when the call has returned
}

var changing = changes{ending: map[string]chan struct{}{}}

// begin waits until no other call changes the object, or the context ends.
func (c *changes) begin(ctx context.Context, object string) (end func(), err error) {
	for {
		c.mu.Lock()
		other := c.ending[object]
		if other == nil {
			ended := make(chan struct{})
			c.ending[object] = ended
			c.mu.Unlock()
			return func() { c.end(object, ended) }, nil
		}
		c.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", errLeft, context.Cause(ctx))
		}
	}
}

func (c *changes) end(object string, ended chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ending, object)
	close(ended)
}

// change is call for what creates or deletes an object.
func (d *detached) change(ctx context.Context, name string, f func() error, leave func()) error {
	store := d.String()
	end, err := changing.begin(ctx, store+"\x00"+name)
	if err != nil {
		return err
	}
	if err := left.room(store); err != nil {
		end()
		return err
	}
	return call(ctx, store, func() error { defer end(); return f() }, leave)
}

// String implements Store.
func (d *detached) String() string { return d.inner.String() }

// Create implements Store.
func (d *detached) Create(ctx context.Context, name string, content Content) error {
	c := &lentContent{Content: content}
	return d.change(ctx, name, func() error { return d.inner.Create(ctx, name, c) }, c.takeBack)
}

// Delete implements Store.
func (d *detached) Delete(ctx context.Context, name string) error {
	return d.change(ctx, name, func() error { return d.inner.Delete(ctx, name) }, func() {})
}

// List implements Store. The caller's goroutine calls each.
func (d *detached) List(ctx context.Context, prefix string, each func(Object) error) error {
	store := d.String()
	if err := left.room(store); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	objects := make(chan Object)
	listed := make(chan error, 1)
	go func() {
		listed <- call(ctx, store, func() error {
			return d.inner.List(ctx, prefix, func(o Object) error {
				select {
				case objects <- o:
					return nil
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			})
		}, func() {})
	}()
	for {
		select {
		case o := <-objects:
			if err := each(o); err != nil {
				return err
			}
		case err := <-listed:
			return err
		}
	}
}

// Read implements Store.
func (d *detached) Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	store := d.String()
	if err := left.room(store); err != nil {
		return nil, err
	}
	inner, err := detach(ctx, store, func() (io.ReadCloser, error) { return d.inner.Read(ctx, name, offset, length) }, func() {}, closeLeft)
	if err != nil {
		return nil, err
	}
	return &detachedReader{ctx: ctx, store: store, inner: inner}, nil
}

// closeLeft closes what a call has opened that was left.
func closeLeft(r io.ReadCloser) {
	if r != nil {
		_ = r.Close() // it was only read
	}
}

// detachedReader reads into a buffer of its own.
type detachedReader struct {
	ctx   context.Context // of the read
	store string
	inner io.ReadCloser // nil once a read was left, which closes it
	buf   []byte
}

// Read implements io.Reader.
func (r *detachedReader) Read(p []byte) (int, error) {
	inner, size := r.inner, min(len(p), copyBytes)
	if inner == nil {
		return 0, errLeft
	}
	if err := left.room(r.store); err != nil {
		return 0, err
	}
	if len(r.buf) < size {
		r.buf = make([]byte, size)
	}
	buf := r.buf[:size]
	n, err := detach(r.ctx, r.store, func() (int, error) { return inner.Read(buf) }, func() {}, func(int) { closeLeft(inner) })
	if gone := new(LeftError); errors.As(err, &gone) {
		r.inner = nil
		return 0, err
	}
	return copy(p, buf[:n]), err
}

// Close implements io.Closer. The kernel may ask the device, or the server, when a file is closed. However many calls were left, a close begins.
func (r *detachedReader) Close() error {
	inner := r.inner
	if inner == nil {
		return nil
	}
	r.inner = nil
	return call(r.ctx, r.store, inner.Close, func() {})
}

// lentContent is a content that its owner can take back: then nothing uses it any more.
type lentContent struct {
	Content
	mu   sync.Mutex
	open []*lentReader
	gone bool
}

// Open implements Content.
func (c *lentContent) Open() (io.ReadCloser, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return nil, errLeft
	}
	inner, err := c.Content.Open()
	if err != nil {
		return nil, err
	}
	r := &lentReader{inner: inner, content: c}
	c.open = append(c.open, r)
	return r, nil
}

// takeBack waits for a read of the content that goes on.
func (c *lentContent) takeBack() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
	for _, r := range c.open {
		_ = r.closeLocked() // the object is not made
	}
}

type lentReader struct {
	content *lentContent
	inner   io.ReadCloser // nil once it is closed
}

// Read implements io.Reader.
func (r *lentReader) Read(p []byte) (int, error) {
	r.content.mu.Lock()
	defer r.content.mu.Unlock()
	if r.inner == nil {
		return 0, errLeft
	}
	return r.inner.Read(p)
}

// Close implements io.Closer.
func (r *lentReader) Close() error {
	r.content.mu.Lock()
	defer r.content.mu.Unlock()
	return r.closeLocked()
}

func (r *lentReader) closeLocked() error {
	if r.inner == nil {
		return nil
	}
	inner := r.inner
	r.inner = nil
	return inner.Close()
}
