package backup

import (
	"context"
	"errors"
	"testing"
	"time"
)

// TestMoreWorkersRunWhileTheServerIsIdle: and the usual number at other times; a wait ends with its context.
func TestMoreWorkersRunWhileTheServerIsIdle(t *testing.T) {
	idle := false
	w := newWorkers(Options{Idle: func() bool { return idle }})
	w.usual, w.most = 2, 4
	begun := func() (n int) {
		for n < 100 && w.tryBegin() {
			n++
		}
		return n
	}
	if n := begun(); n != 2 {
		t.Fatalf("%d workers beside other work", n)
	}
	if idle = true; begun() != 2 {
		t.Fatal("an idle server has no more workers")
	}
	idle = false
	w.end()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := w.begin(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("three of two workers run, and another one began: %v", err)
	}
	for range 3 {
		w.end()
	}
	w.wait()
	if n := newWorkers(Options{Workers: 3}); n.usual != 3 || n.most != 3 {
		t.Fatalf("%+v", n)
	}
}
