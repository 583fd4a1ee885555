package mvcc

import (
	"context"
	"errors"
	"testing"
)

// besideStore is a store with so many sessions for SessionOf.
func besideStore(t *testing.T, limit int) *Store {
	return ownedStore(t, func(o *Options) { o.Limits.SessionsBeside = limit })
}

// takeAll takes sessions until there are none for the context.
func takeAll(ctx context.Context, t *testing.T, s *Store) (all []*Session) {
	t.Helper()
	for {
		x, err := s.SessionOf(ctx)
		if errors.Is(err, ErrTooManySessions) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, x)
	}
}

// TestAClientLeavesSessionsToOthers: one leaves a quarter, and two a sixteenth, unless there are only a few. What no client asks for may have all.
func TestAClientLeavesSessionsToOthers(t *testing.T) {
	for _, c := range []struct {
		limit   int
		clients []string
		want    []int
	}{
		{64, []string{"a", "b", "c", "d", "e", "f"}, []int{48, 12, 3, 1, 0, 0}},
		{64, []string{""}, []int{64}},
		{64, []string{"a", "", "b"}, []int{48, 16, 0}},
		{4, []string{"a", "b"}, []int{3, 1}},
		{3, []string{"a", "b"}, []int{3, 0}},
		{1, []string{"a", "b"}, []int{1, 0}},
	} {
		s := besideStore(t, c.limit)
		for range 2 { // the second time after all were given back
			var open []*Session
			for i, name := range c.clients {
				got := takeAll(contextOf(t, name), t, s)
				if len(got) != c.want[i] {
					t.Errorf("of %d sessions client %d of %q has %d; want %d", c.limit, i, c.clients, len(got), c.want[i])
				}
				open = append(open, got...)
			}
			for _, x := range open {
				x.Close()
				x.Close() // harmless
			}
			if b := &s.sessions.beside; b.open != 0 || len(b.clients) != 0 {
				t.Errorf("after all were given back %d are counted, and %d clients kept", b.open, len(b.clients))
			}
		}
	}
}

// TestAClientHasSessionsAgainThatOthersGaveBack, and those of Session count for no client.
func TestAClientHasSessionsAgainThatOthersGaveBack(t *testing.T) {
	s := besideStore(t, 64)
	for range 100 {
		defer mustSession(t, s).Close()
	}
	a, b := takeAll(contextOf(t, "a"), t, s), takeAll(contextOf(t, "b"), t, s)
	a[0].Close()
	if got := takeAll(contextOf(t, "a"), t, s); len(got) != 0 {
		t.Errorf("with %d sessions, and %d of another client, one more", len(a)-1, len(b))
	}
	for _, x := range b {
		x.Close()
	}
	if got := takeAll(contextOf(t, "a"), t, s); len(got) != 1 {
		t.Errorf("%d more; want the one that was given back", len(got))
	}
}

// TestSessionsOfAClosedStoreCountForNoClient: none is given out, and none is kept.
func TestSessionsOfAClosedStoreCountForNoClient(t *testing.T) {
	s := besideStore(t, 64)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.SessionOf(contextOf(t, "a")); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
	if b := &s.sessions.beside; b.open != 0 || len(b.clients) != 0 {
		t.Errorf("%d are counted, and %d clients kept", b.open, len(b.clients))
	}
}
