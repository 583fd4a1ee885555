package objectstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"
)

// stuckStore does not return from its calls until it is released, whatever their contexts say, as a kernel does whose device does not answer.
type stuckStore struct {
	Store
	began    chan struct{} // a call has begun
	released chan struct{}
	closed   atomic.Int32 // readers
}

func (s *stuckStore) String() string { return fmt.Sprintf("%p", s) }

func (s *stuckStore) wait() {
	s.began <- struct{}{}
	<-s.released
}

func (s *stuckStore) Create(_ context.Context, _ string, content Content) error {
	r, err := content.Open()
	if err != nil {
		return err
	}
	s.wait()
	_, err = io.ReadAll(r)
	return errors.Join(err, r.Close())
}

func (s *stuckStore) Read(context.Context, string, int64, int64) (io.ReadCloser, error) {
	s.wait()
	return &stuckReader{store: s, n: 3}, nil
}

func (s *stuckStore) List(_ context.Context, _ string, each func(Object) error) error {
	s.wait()
	return each(Object{Name: "a"})
}

func (s *stuckStore) Delete(context.Context, string) error { s.wait(); return nil }

type stuckReader struct {
	store *stuckStore
	n     int
}

func (r *stuckReader) Read(p []byte) (int, error) {
	r.store.wait()
	clear(p)
	return min(r.n, len(p)), nil
}

func (r *stuckReader) Close() error { r.store.closed.Add(1); return nil }

// lentOnce is a content that must not be used after taken is set.
type lentOnce struct {
	t     *testing.T
	taken atomic.Bool
}

func (c *lentOnce) Open() (io.ReadCloser, error) { return c, nil }
func (c *lentOnce) Size() int64                  { return 5 }
func (c *lentOnce) Close() error                 { return nil }
func (c *lentOnce) Read(p []byte) (int, error) {
	if c.taken.Load() {
		c.t.Error("a content is read after its creation was left")
	}
	return copy(p, "hello"), io.EOF
}

func TestACallOfADeviceThatDoesNotAnswerEndsWithItsContext(t *testing.T) {
	content := &lentOnce{t: t}
	for _, c := range []struct {
		name   string
		call   func(ctx context.Context, s Store) error
		closed int32 // readers, afterwards
	}{
		{"create", func(ctx context.Context, s Store) error {
			defer content.taken.Store(true)
			return s.Create(ctx, "a", content)
		}, 0},
		{"list", func(ctx context.Context, s Store) error {
			return s.List(ctx, "", func(Object) error { return errors.New("an object comes after the end") })
		}, 0},
		{"delete", func(ctx context.Context, s Store) error { return s.Delete(ctx, "a") }, 0},
		{"open", func(ctx context.Context, s Store) error { _, err := s.Read(ctx, "a", 0, -1); return err }, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			inner := &stuckStore{began: make(chan struct{}, 1), released: make(chan struct{})}
			ctx, stop := context.WithCancel(t.Context())
			go func() { <-inner.began; stop() }()
			err := within(t, func() error { return c.call(ctx, &detached{inner}) })
			if !errors.Is(err, context.Canceled) || left.all() != 1 {
				t.Errorf("%v, with %d calls left", err, left.all())
			}
			close(inner.released)
			waitUntil(t, func() bool { return left.all() == 0 && inner.closed.Load() == c.closed })
		})
	}
}

func TestAReadOfADeviceThatDoesNotAnswerEndsWithItsContext(t *testing.T) {
	inner := &stuckStore{began: make(chan struct{}, 9), released: make(chan struct{})}
	ctx, stop := context.WithCancel(t.Context())
	r := &detachedReader{ctx: ctx, store: inner.String(), inner: &stuckReader{inner, 3}}
	p := []byte("caller")
	go func() { <-inner.began; stop() }()
	if err := within(t, func() error { _, err := r.Read(p); return err }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := r.Read(p); err == nil || r.Close() != nil {
		t.Errorf("a reader of which a read was left reads on: %v", err)
	}
	if inner.closed.Load() != 0 {
		t.Error("a file is closed that is being read")
	}
	close(inner.released)
	waitUntil(t, func() bool { return left.all() == 0 && inner.closed.Load() == 1 })
	if !bytes.Equal(p, []byte("caller")) {
		t.Errorf("a read that was left has written %q", p)
	}
}

// TestATargetThatIsStuckHasStalled: it is a failure that may be over.
func TestATargetThatIsStuckHasStalled(t *testing.T) {
	inner := &stuckStore{began: make(chan struct{}, 100), released: make(chan struct{})}
	s := WithRetries(&detached{inner}, impatient())
	for name, call := range map[string]func() error{
		"create": func() error { return s.Create(t.Context(), "a", Bytes("content")) },
		"read":   func() error { _, err := s.Read(t.Context(), "a", 0, -1); return err },
		"list":   func() error { return s.List(t.Context(), "", func(Object) error { return nil }) },
		"delete": func() error { return s.Delete(t.Context(), "a") },
	} {
		if err := within(t, call); !errors.Is(err, errTemporary) {
			t.Errorf("%s: %v", name, err)
		}
	}
	close(inner.released)
	waitUntil(t, func() bool { return left.all() == 0 })
}

// lateStore is a store of which a call that changes an object is late: past what looks at its context.
type lateStore struct {
	Store
	late            atomic.Bool // the next one
	began, released chan struct{}
}

func (s *lateStore) wait() {
	if s.late.Swap(false) {
		s.began <- struct{}{}
		<-s.released
	}
}

func (s *lateStore) Create(_ context.Context, name string, content Content) error {
	if s.late.Load() {
		content = Bytes("late")
	}
	s.wait()
	return s.Store.Create(context.Background(), name, content)
}

func (s *lateStore) Delete(ctx context.Context, name string) error {
	s.wait()
	return s.Store.Delete(ctx, name)
}

// TestACallThatWasLeftChangesNothingOfWhatCameAfterIt: a caller that deletes an object, again because the device did not answer, and makes it anew,
// would lose the new one.
func TestACallThatWasLeftChangesNothingOfWhatCameAfterIt(t *testing.T) {
	remove := func(ctx context.Context, s Store) error { return s.Delete(ctx, "a/b") }
	create := func(ctx context.Context, s Store) error { return s.Create(ctx, "a/b", Bytes("new")) }
	for name, row := range map[string]struct {
		late  func(context.Context, Store) error
		after []func(context.Context, Store) error
		want  error // of a read, in the end
	}{
		"deletion": {remove, []func(context.Context, Store) error{remove, create}, nil},
		"creation": {create, []func(context.Context, Store) error{remove}, ErrNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			inner := &lateStore{Store: &directory{root}, began: make(chan struct{}), released: make(chan struct{})}
			inner.late.Store(true)
			ctx, stop := context.WithCancel(t.Context())
			go func() { <-inner.began; stop() }()
			if err := within(t, func() error { return row.late(ctx, &detached{inner}) }); !errors.Is(err, errLeft) {
				t.Fatal(err)
			}
			if err := create(ctx, &detached{&directory{root}}); !errors.Is(err, context.Canceled) {
				t.Errorf("another call, whose context has ended: %v", err)
			}
			done := make(chan error, 1)
			go func() { // another job, with a store of its own
				var err error
				for _, f := range row.after {
					err = errors.Join(err, f(context.WithoutCancel(ctx), &detached{&directory{root}}))
				}
				done <- err
			}()
			select {
			case err := <-done:
				t.Errorf("an object is changed before a call that was left: %v", err)
				done <- nil
			case <-time.After(20 * time.Millisecond):
			}
			close(inner.released)
			if err := <-done; err != nil {
				t.Error(err)
			}
			waitUntil(t, func() bool { return left.all() == 0 })
			r, err := (&directory{root}).Read(t.Context(), "a/b", 0, -1)
			if !errors.Is(err, row.want) {
				t.Errorf("in the end: %v, want %v", err, row.want)
			}
			closeLeft(r)
			if len(changing.ending) != 0 {
				t.Errorf("%d objects are being changed", len(changing.ending))
			}
		})
	}
}

func waitUntil(t *testing.T, done func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d calls are left", left.all())
		}
	}
}

// TestACallThatReturnsSoonAfterItsContextIsNotLeft: with a device that answers, nothing of it comes after its caller has ended.
func TestACallThatReturnsSoonAfterItsContextIsNotLeft(t *testing.T) {
	for range 20 { // a busy machine may hold up a call
		inner := &stuckStore{began: make(chan struct{}, 1), released: make(chan struct{})}
		ctx, stop := context.WithCancel(t.Context())
		go func() {
			<-inner.began
			stop()
			time.Sleep(time.Millisecond)
			close(inner.released)
		}()
		if err := (&detached{inner}).Delete(ctx, "a"); err == nil {
			return
		}
	}
	t.Error("each call was left")
}

// stuckClose is a file that was read, and whose close the kernel does not end.
type stuckClose struct{ store *stuckStore }

func (r *stuckClose) Read([]byte) (int, error) { return 0, context.Canceled }
func (r *stuckClose) Close() error             { r.store.wait(); return nil }

// TestCloseOfAReaderIsLeft: some file systems ask their servers when a file is closed.
func TestCloseOfAReaderIsLeft(t *testing.T) {
	stuck := newStuckStore()
	ctx, stop := context.WithCancel(t.Context())
	r := &detachedReader{ctx: ctx, store: "stuck closes", inner: &stuckClose{stuck}}
	stop()
	if err := within(t, r.Close); !errors.Is(err, errLeft) {
		t.Errorf("close: %v", err)
	}
	if err := within(t, r.Close); err != nil {
		t.Errorf("close of what was closed: %v", err)
	}
	close(stuck.released)
	waitUntil(t, func() bool { return left.all() == 0 })
}

// slowClose is a store of files whose close takes longer than a call that is left may.
type slowClose struct {
	Store
	ended chan struct{} // closed when a close may end
}

func (s *slowClose) Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	r, err := s.Store.Read(ctx, name, offset, length)
	return &slowCloser{r, s.ended}, err
}

type slowCloser struct {
	io.ReadCloser
	ended chan struct{}
}

func (c *slowCloser) Close() error {
	<-c.ended
	return c.ReadCloser.Close()
}

// TestASlowCloseIsNoFailure: it has the patience of a read, and is left when its caller gives up.
func TestASlowCloseIsNoFailure(t *testing.T) {
	inner := &slowClose{Store: &directory{t.TempDir()}}
	check(t, inner.Create(t.Context(), "x", Bytes("x")))
	closed := func(ctx context.Context, patience time.Duration) error {
		r, err := WithRetries(&detached{inner}, Retry{Patience: patience}).Read(ctx, "x", 0, -1)
		check(t, err)
		if _, err := io.ReadAll(r); err != nil {
			t.Error(err)
		}
		return within(t, r.Close)
	}
	inner.ended = make(chan struct{})
	time.AfterFunc(2*leaveAfter, func() { close(inner.ended) })
	if err := closed(t.Context(), 0); err != nil {
		t.Errorf("a slow close: %v", err)
	}
	inner.ended = make(chan struct{})
	defer close(inner.ended)
	if err := closed(t.Context(), time.Second); !isTemporary(err) {
		t.Errorf("one that does not end: %v", err)
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Second)
	defer stop()
	if err := closed(ctx, 0); !errors.Is(err, errLeft) || isTemporary(err) {
		t.Errorf("one whose caller gives up: %v", err)
	}
}
