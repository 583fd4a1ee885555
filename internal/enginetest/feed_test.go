package enginetest

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// feedOf is a feed of a store, with one consumer.
func feedOf(t testing.TB, s *mvcc.Store) (*feed.Feed, *feed.Consumer) {
	f := feed.New(s.Changes(), feed.Options{})
	t.Cleanup(f.Close)
	return f, f.NewConsumer("client")
}

func watchAfter(t testing.TB, c *feed.Consumer, e keys.Epoch) *feed.Watch {
	t.Helper()
	w, err := c.Watch(feed.WatchOptions{After: feed.Position{Epoch: e}})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func nextDelivery(t testing.TB, c *feed.Consumer) feed.Delivery {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		if d, ok := c.Next(feed.Limit{}); ok {
			return d
		}
		select {
		case <-c.Wake():
		case <-deadline:
			t.Fatal("nothing is delivered")
		}
	}
}

// deliveredKeys are the keys that come up to an epoch, and the bulk loads with their number of keys.
func deliveredKeys(t testing.TB, c *feed.Consumer, through keys.Epoch) (list []string) {
	t.Helper()
	for {
		d := nextDelivery(t, c)
		if d.Err != nil {
			t.Fatal(d.Err)
		}
		for i := range d.Parts {
			p := &d.Parts[i]
			if l := p.Commit.Loaded; l != nil {
				list = append(list, fmt.Sprintf("%d keys from %q to %q", l.Keys, l.Lower, l.Upper))
			}
			for _, op := range p.Operations {
				list = append(list, string(keys.User(op.Key)))
			}
		}
		if d.Position.Epoch >= through {
			return list
		}
	}
}

func keptLog(fs vfs.FS) mvcc.Options {
	o := tiny(fs)
	o.Storage.ChangeLog = storage.ChangeLog{Age: time.Hour, Bytes: 1 << 30}
	return o
}

// TestFeedResumesAfterARestart: the log is kept although the tree has its commits, and a bulk load, which the log has no
// record of, is delivered all the same: with its keys while the store is open, and for all keys afterwards.
func TestFeedResumesAfterARestart(t *testing.T) {
	fs := vfs.NewMem()
	s, err := mvcc.Open(keptLog(fs))
	if err != nil {
		t.Fatal(err)
	}
	first := mustPut(t, s, "a", "1")
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"m", "k", "l"} {
		if err := l.Add([]byte(key), []byte("loaded")); err != nil {
			t.Fatal(err)
		}
	}
	loaded, err := l.Commit(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	f, c := feedOf(t, s)
	watchAfter(t, c, first)
	if got := fmt.Sprint(deliveredKeys(t, c, loaded.Epoch)); got != `[3 keys from "\x10k" to "\x10m\x00"]` {
		t.Fatal(got)
	}
	mustPut(t, s, "b", "2")
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = mvcc.Open(keptLog(fs)); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	last := mustPut(t, s, "c", "3")
	f, c = feedOf(t, s)
	defer f.Close()
	watchAfter(t, c, 0)
	if got := fmt.Sprint(deliveredKeys(t, c, last)); got != `[a 0 keys from "\x10" to "\x11" b c]` {
		t.Fatal(got)
	}
}

// TestFeedSyncsForItsWatches: a commit that was acknowledged without a sync is delivered when it is durable, and the feed
// does not wait for the interval of the store.
func TestFeedSyncsForItsWatches(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.SyncInterval = time.Hour
	s := mustOpen(t, o)
	f, c := feedOf(t, s)
	defer f.Close()
	watchAfter(t, c, s.Changes().Stable())
	x := mustSession(t, s)
	defer x.Close()
	e, err := put(x, "key", "value", mvcc.DurabilityAsync)
	if err != nil {
		t.Fatal(err)
	}
	if d := nextDelivery(t, c); d.Position.Epoch != e || s.Durable() < e {
		t.Fatalf("%+v, durable up to %d", d, s.Durable())
	}
}

// TestStableIsNotOnlyVisible: without a sync a commit is visible and not stable.
func TestStableIsNotOnlyVisible(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.SyncInterval = time.Hour
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	e, err := put(x, "key", "value", mvcc.DurabilityAsync)
	if err != nil {
		t.Fatal(err)
	}
	if stable := s.Changes().Stable(); s.Visible() < e || stable >= e {
		t.Fatalf("epoch %d: visible %d, stable %d", e, s.Visible(), stable)
	}
	if err := s.AwaitDurable(context.Background(), e); err != nil || s.Changes().Stable() < e {
		t.Fatalf("stable %d, %v", s.Changes().Stable(), err)
	}
}

// BenchmarkPutBesideWatches compares puts without a sync beside no watch, one that takes everything, and a thousand whose
// clients take nothing.
func BenchmarkPutBesideWatches(b *testing.B) {
	for _, c := range []struct {
		name          string
		live, stalled int
	}{{"none", 0, 0}, {"live", 1, 0}, {"stalled", 0, 1000}} {
		b.Run("watches="+c.name, func(b *testing.B) {
			s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: b.TempDir(), MemoryBytes: 256 << 20}})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			f, _ := feedOf(b, s)
			defer f.Close()
			for range c.stalled {
				watchAfter(b, f.NewConsumer("stalled"), s.Changes().Stable())
			}
			if c.live > 0 {
				live := f.NewConsumer("live")
				watchAfter(b, live, s.Changes().Stable())
				done := make(chan struct{})
				defer close(done)
				go takeAll(live, done)
			}
			x := mustSession(b, s)
			defer x.Close()
			var w mvcc.Write
			value := bytes.Repeat([]byte{'v'}, 100)
			b.ResetTimer()
			for i := range b.N {
				w.Reset()
				w.Durability = mvcc.DurabilityAsync
				w.Set(fmt.Appendf(nil, "key-%09d", i%1_000_000), value)
				if _, err := x.Commit(context.Background(), &w); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func takeAll(c *feed.Consumer, done chan struct{}) {
	for {
		if _, ok := c.Next(feed.Limit{}); ok {
			continue
		}
		select {
		case <-c.Wake():
		case <-done:
			return
		}
	}
}
