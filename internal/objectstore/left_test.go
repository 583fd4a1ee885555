package objectstore

import (
	"context"
	"errors"
	"testing"
)

// all is how many calls were left, of all stores.
func (l *leftCalls) all() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, of := range l.of {
		n += of
	}
	return n
}

func newStuckStore() *stuckStore {
	return &stuckStore{began: make(chan struct{}, 100), released: make(chan struct{})}
}

// leave makes calls that are left. All have begun before the first one is.
func (s *stuckStore) leave(t *testing.T, calls int) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	returned := make(chan error, calls)
	for range calls {
		go func() {
			_, err := (&detached{s}).Read(ctx, "a", 0, -1)
			returned <- err
		}()
	}
	for range calls {
		<-s.began
	}
	stop()
	for range calls {
		if err := within(t, func() error { return <-returned }); !errors.Is(err, errLeft) {
			t.Fatal(err)
		}
	}
}

// callsOf are one call of each kind, whose contexts do not end.
func callsOf(t *testing.T, s Store) map[string]func() error {
	reader := &detachedReader{ctx: t.Context(), store: s.String(), inner: &stuckReader{n: 1}}
	return map[string]func() error{
		"create":       func() error { return s.Create(t.Context(), "a", Bytes("content")) },
		"open":         func() error { _, err := s.Read(t.Context(), "a", 0, -1); return err },
		"read further": func() error { _, err := reader.Read(make([]byte, 1)); return err },
		"list":         func() error { return s.List(t.Context(), "", func(Object) error { return nil }) },
		"delete":       func() error { return s.Delete(t.Context(), "a") },
	}
}

// TestCallsThatWereLeftHaveABound: each keeps a thread. Beyond the bound callers waited for the kernel, whatever their contexts said, and a server that
// stopped waited for them.
func TestCallsThatWereLeftHaveABound(t *testing.T) {
	stuck := newStuckStore()
	stuck.leave(t, leftOfStoreMax+4*leftStoresMax*leftOfStoreMax) // those that have begun can be left, however many
	for name, call := range callsOf(t, &detached{stuck}) {
		if err := within(t, call); !errors.Is(err, errTemporary) || errors.Is(err, errLeft) {
			t.Errorf("%s, after calls that were left: %v", name, err)
		}
	}
	if len(stuck.began) != 0 {
		t.Errorf("%d calls that were refused have begun", len(stuck.began))
	}
	other := newStuckStore()
	close(other.released)
	if err := within(t, func() error { return (&detached{other}).Delete(t.Context(), "a") }); err != nil {
		t.Errorf("a call of another store: %v", err)
	}
	close(stuck.released)
	waitUntil(t, func() bool { return left.all() == 0 })
	for _, name := range []string{"create", "delete"} { // what was refused does not keep the object
		if err := within(t, callsOf(t, &detached{stuck})[name]); err != nil {
			t.Errorf("%s, after the device has answered: %v", name, err)
		}
	}
}

// TestStoresOfWhichCallsWereLeftHaveABound: clients name targets.
func TestStoresOfWhichCallsWereLeftHaveABound(t *testing.T) {
	all := make([]*stuckStore, leftStoresMax)
	for i := range all {
		all[i] = newStuckStore()
		all[i].leave(t, leftOfStoreMax-1)
	}
	another := newStuckStore()
	for name, call := range callsOf(t, &detached{another}) {
		if err := within(t, call); !errors.Is(err, errTemporary) {
			t.Errorf("%s of another store: %v", name, err)
		}
	}
	all[0].leave(t, 1) // it has fewer than the bound
	for _, s := range all {
		close(s.released)
	}
	waitUntil(t, func() bool { return left.all() == 0 })
	close(another.released)
	if err := within(t, func() error { return (&detached{another}).Delete(t.Context(), "a") }); err != nil {
		t.Errorf("another store, after the devices have answered: %v", err)
	}
	if len(left.of) != 0 {
		t.Errorf("calls of %d stores are left", len(left.of))
	}
}

// TestACallThatWasLeftSaysWhenItReturns: its caller may wait for that before it begins the next one.
func TestACallThatWasLeftSaysWhenItReturns(t *testing.T) {
	stuck := newStuckStore()
	ctx, stop := context.WithCancel(t.Context())
	go func() { <-stuck.began; stop() }()
	_, err := WithRetries(&detached{stuck}, Retry{}).Read(ctx, "a", 0, -1)
	gone := new(LeftError)
	if !errors.As(err, &gone) || !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	select {
	case <-gone.Returned:
		t.Error("a call that runs has returned")
	default:
	}
	close(stuck.released)
	<-gone.Returned
	waitUntil(t, func() bool { return left.all() == 0 })
}
