package audit

import (
	"context"
	"errors"
	"testing"
)

// TestClientsHaveRoomInTurn: a line that needs much room is not kept out by smaller ones that come after it, and however many requests of one client wait,
// one of another client waits for the first of them.
func TestClientsHaveRoomInTurn(t *testing.T) {
	o := options(t)
	o.QueueBytes, o.Full = 2000, FullBlock
	l := mustOpen(t, o)
	for range 4 {
		if err := l.Admit(t.Context(), nil, 500); err != nil {
			t.Fatal(err)
		}
	}
	type request struct {
		client string
		bytes  int
	}
	got := make(chan request, 10)
	wait := func(ctx context.Context, r request) chan error {
		ended := make(chan error, 1)
		l.mu.Lock()
		n := l.waiting.Len() + 1
		l.mu.Unlock()
		go func() {
			err := l.Admit(ctx, r.client, r.bytes)
			if err == nil {
				got <- r
			}
			ended <- err
		}()
		eventually(t, "it does not wait", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.waiting.Len() == n
		})
		return ended
	}
	large, small, other := request{"one", 1500}, request{"one", 500}, request{"other", 500}
	ctx, cancel := context.WithCancel(t.Context())
	gone := wait(ctx, large)
	all := []chan error{wait(t.Context(), large), wait(t.Context(), small), wait(t.Context(), small), wait(t.Context(), other)}
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for i := range uint64(3) {
		if len(got) > 0 {
			t.Fatal("a smaller line has the room of one that came before it")
		}
		l.Release(500)
		if l.Write(event(1), 0); l.Stats().Dropped != i+1 {
			t.Fatal("the line of a request that was refused has the room for which others wait")
		}
	}
	if r := <-got; r != large {
		t.Errorf("%v has room first", r)
	}
	l.Release(500)
	if r := <-got; r != other {
		t.Errorf("then %v has", r)
	}
	l.Release(1500)
	for _, ended := range all {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	l.Release(1500)
	if err := l.Close(); err != nil || l.Stats().QueueBytes != 0 {
		t.Errorf("%v, %+v", err, l.Stats())
	}
}

// TestAWaitForRoomThatEndsGivesBackWhatItHas, also at the moment at which it has room.
func TestAWaitForRoomThatEndsGivesBackWhatItHas(t *testing.T) {
	o := options(t)
	o.QueueBytes, o.Full = 2000, FullBlock
	l := mustOpen(t, o)
	ended := 0
	for i := 0; i < 2000 || ended == 0 || ended == i; i++ {
		if err := l.Admit(t.Context(), nil, 2000); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		waiting := make(chan error)
		go func() { waiting <- l.Admit(ctx, nil, 2000) }()
		go l.Release(2000)
		go cancel()
		if err := <-waiting; err == nil {
			l.Release(2000)
		} else {
			ended++
		}
	}
	if err := l.Close(); err != nil || l.Stats().QueueBytes != 0 {
		t.Errorf("%v, %+v", err, l.Stats())
	}
}
