package audit

import (
	"context"
	"errors"
	"testing"
	"time"
)

// stuck is a file whose writes do not return before it is released.
type stuck struct {
	file
	entered, release chan struct{}
}

func (f *stuck) Write(b []byte) (int, error) {
	select {
	case <-f.release:
	default:
		f.entered <- struct{}{}
		<-f.release
	}
	return f.file.Write(b)
}

// withStuckDevice opens a log, of which every write from the next one on waits for release.
func withStuckDevice(t *testing.T, o Options) (l *Log, entered <-chan struct{}, release func()) {
	t.Helper()
	f := &stuck{entered: make(chan struct{}, 1), release: make(chan struct{})}
	released := false
	o.openFile = func(path string) (opened file, err error) {
		f.file, err = openFile(path)
		return f.file, err
	}
	l = mustOpen(t, o)
	l.out.file = f // no line was queued yet
	t.Cleanup(func() {
		if !released {
			close(f.release)
		}
		<-l.ended
	})
	return l, f.entered, func() {
		released = true
		close(f.release)
	}
}

// TestADeviceThatDoesNotAnswerIsAFailure: it is told, requests that must be audited are refused instead of waiting for ever, and all of
// that ends when it answers.
func TestADeviceThatDoesNotAnswerIsAFailure(t *testing.T) {
	o := options(t)
	o.Full, o.QueueBytes, o.patience = FullBlock, 600, 20*time.Millisecond
	l, entered, release := withStuckDevice(t, o)
	if err := l.Admit(t.Context(), nil, 500); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	go func() { waiting <- l.Admit(context.Background(), nil, 500) }() // without a deadline
	l.Write(event(1), 500)
	<-entered
	eventually(t, "a write that does not return is no error", func() bool { return errors.As(l.Err(), new(*stuckError)) })
	if err := <-waiting; !errors.Is(err, ErrUnavailable) {
		t.Errorf("a request that waits for room: %v", err)
	}
	if err := l.Admit(context.Background(), nil, 500); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a request beside it: %v", err)
	}
	release()
	eventually(t, "it stays failed", func() bool { return l.Err() == nil })
	if err := l.Admit(t.Context(), nil, 500); err != nil {
		t.Error(err)
	}
	l.Release(500)
	if err := l.Close(); err != nil || l.Stats().QueueBytes != 0 {
		t.Errorf("%v, %+v", err, l.Stats())
	}
}

// TestCloseDoesNotWaitForADeviceForEver: the lines that it leaves are told in its error and in the server's log.
func TestCloseDoesNotWaitForADeviceForEver(t *testing.T) {
	o := options(t)
	o.closeWait = 20 * time.Millisecond
	l, entered, _ := withStuckDevice(t, o)
	l.Write(event(1), 0)
	<-entered
	closed := make(chan error, 1)
	go func() { closed <- l.Close() }()
	select {
	case err := <-closed:
		if !errors.As(err, new(*stuckError)) {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("Close waits for a device that does not answer")
	}
}

// TestLinesOfRequestsThatLastAreNotDropped: they have given their room back, and the queue may be full when they end.
func TestLinesOfRequestsThatLastAreNotDropped(t *testing.T) {
	o := options(t)
	o.Full, o.QueueBytes, o.patience = FullBlock, 600, time.Hour
	l, entered, release := withStuckDevice(t, o)
	for range 3 { // requests that last
		if err := l.Admit(t.Context(), nil, 500); err != nil {
			t.Fatal(err)
		}
		l.Release(500)
	}
	if err := l.Admit(t.Context(), nil, 500); err != nil {
		t.Fatal(err)
	}
	l.Write(event(1), 500)
	<-entered
	if err := l.Admit(t.Context(), nil, 300); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		l.WriteLate(event(2 + i))
	}
	l.Write(event(5), 300)
	release()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := Verify([]string{o.Path}); err != nil || r.Lines != 7 || r.Dropped || l.Stats().QueueBytes != 0 {
		t.Errorf("%+v, %v, %+v", r, err, l.Stats())
	}
}
