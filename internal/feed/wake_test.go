package feed

import (
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/batch"
)

// TestWhateverNextHasWakesTheConsumer: a stream sleeps until it is woken, for seconds if nothing is due.
func TestWhateverNextHasWakesTheConsumer(t *testing.T) {
	s := newStore(t, 1<<16)
	f := New(s, Options{manual: true})
	defer f.Close()
	c := f.NewConsumer("client")
	mustBeWoken := func(why string) {
		t.Helper()
		select {
		case <-c.Wake():
		default:
			t.Fatalf("not woken: %s", why)
		}
		if _, ok := c.Next(Limit{}); !ok {
			t.Fatalf("woken for nothing: %s", why)
		}
		for _, more := c.Next(Limit{}); more; _, more = c.Next(Limit{}) {
		}
	}
	w := mustWatch(t, c, WatchOptions{Now: true})
	for range 3 {
		s.commit(batch.Header{}, set("k", "v"))
		mustStep(t, f)
		mustBeWoken("a commit")
	}
	w.End(errors.New("ended by a test"))
	mustBeWoken("the end of a watch")
}
