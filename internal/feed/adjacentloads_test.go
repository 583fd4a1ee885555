package feed

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// adjacentLoads are two bulk loads without a commit between them, of which an earlier run has been: the log has one gap for both, and only
// its end is known.
func (s *store) adjacentLoads() (first, second keys.Epoch) {
	s.t.Helper()
	sealed, outcome := s.segment.Seal()
	if outcome != wal.Crossed {
		s.t.Fatalf("seal: %v", outcome)
	}
	s.flush(sealed.Epoch - 1)
	first, second = sealed.Epoch+1000, sealed.Epoch+2000
	s.log.Skip(second + 1)
	s.from = second
	s.show(second)
	s.rotate(second+1, 0)
	return first, second
}

// loadsOf reads for a consumer until nothing comes, and returns between which epochs the bulk loads are that it got.
func loadsOf(f *Feed, c *Consumer) (list [][2]keys.Epoch) {
	for range 5 {
		f.read()
		for d, ok := c.Next(Limit{}); ok; d, ok = c.Next(Limit{}) {
			for i := range d.Parts {
				if l := d.Parts[i].Commit.Loaded; l != nil {
					list = append(list, [2]keys.Epoch{l.Since(), l.Epoch})
				}
			}
		}
	}
	return list
}

func wantLoads(t *testing.T, got [][2]keys.Epoch, since, through keys.Epoch) {
	t.Helper()
	if len(got) != 1 || got[0] != [2]keys.Epoch{since, through} {
		t.Fatalf("the bulk loads after and up to %v were delivered, want those after %d and up to %d, once", got, since, through)
	}
}

// TestBulkLoadsOfOneGapAreDeliveredTogether: a watch that loses its queue between the offer of several bulk loads and their delivery gets all
// of them afterwards, and one that has some of them gets the others.
func TestBulkLoadsOfOneGapAreDeliveredTogether(t *testing.T) {
	begin := func(t *testing.T, o Options) (s *store, f *Feed, c *Consumer, before keys.Epoch) {
		s = newStore(t, 1<<13)
		before = s.commit(batch.Header{}, set("k", "before"))
		o.manual = true
		f = New(s, o)
		t.Cleanup(f.Close)
		return s, f, f.NewConsumer("client"), before
	}
	t.Run("a reader finds a full queue", func(t *testing.T) {
		s, f, c, before := begin(t, Options{QueueOperations: 1})
		_, last := s.adjacentLoads()
		mustWatch(t, c, WatchOptions{})
		wantLoads(t, loadsOf(f, c), before, last)
	})
	t.Run("the tailer finds a full queue", func(t *testing.T) {
		s, f, c, _ := begin(t, Options{QueueOperations: 1})
		w := mustWatch(t, c, WatchOptions{Now: true})
		before := s.commit(batch.Header{}, set("k", "queued"))
		_, last := s.adjacentLoads()
		mustStep(t, f)
		if state := w.Info().State; state != StateLagging {
			t.Fatalf("the watch is %v", state)
		}
		wantLoads(t, loadsOf(f, c), before, last)
	})
	t.Run("the queue is taken away", func(t *testing.T) {
		s, f, c, before := begin(t, Options{})
		_, last := s.adjacentLoads()
		w := mustWatch(t, c, WatchOptions{After: Position{Epoch: before}})
		f.read()
		f.lock()
		f.evictLocked(w)
		f.unlock()
		if p, ok := w.Progress(); !ok || p.Epoch != before {
			t.Fatalf("progress at %v, %v, before the bulk loads were delivered", p, ok)
		}
		wantLoads(t, loadsOf(f, c), before, last)
	})
	t.Run("beside a watch that has the first one", func(t *testing.T) {
		s, f, c, before := begin(t, Options{})
		first, last := s.adjacentLoads()
		other := f.NewConsumer("another client")
		mustWatch(t, c, WatchOptions{After: Position{Epoch: before}})
		mustWatch(t, other, WatchOptions{After: Position{Epoch: first}})
		wantLoads(t, loadsOf(f, c), before, last)
		wantLoads(t, loadsOf(f, other), first, last)
	})
}
