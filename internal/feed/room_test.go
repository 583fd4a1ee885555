package feed

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestRoomIsGivenInTurn: a reader reads records for which there is room, one after the other. The tailer has the next turn, although
// the last of these records was always offered a moment ago.
func TestRoomIsGivenInTurn(t *testing.T) {
	s := newStore(t, 1<<16)
	f := New(s, Options{manual: true, MemoryBytes: 20 << 10})
	defer f.Close()
	mustWatch(t, f.NewConsumer("stalled"), WatchOptions{Now: true})
	s.commit(batch.Header{}, set("k", string(make([]byte, 10<<10))))
	mustStep(t, f)
	ctx, stop := context.WithCancel(t.Context())
	var reader sync.WaitGroup
	reader.Go(func() {
		l := f.readLog(ctx, nil, 1, wal.TailMark{})
		defer l.close()
		for ctx.Err() == nil && l.reserve(ctx, 1<<10) == nil {
			sleep(ctx, roomWait/5)
			l.release()
		}
	})
	defer reader.Wait()
	defer stop()
	time.Sleep(2 * roomWait)
	within, stopWaiting := context.WithTimeout(t.Context(), 30*time.Second)
	defer stopWaiting()
	tail := f.readLog(within, nil, 1, wal.TailMark{})
	defer tail.close()
	if err := tail.reserve(within, 15<<10); err != nil {
		t.Fatalf("the tailer got no room: %v", err)
	}
}

// TestARoomThatIsNotAwaitedIsNotKept: a read whose context ends leaves the line, and the next one gets room.
func TestARoomThatIsNotAwaitedIsNotKept(t *testing.T) {
	s := newStore(t, 1<<16)
	f := New(s, Options{manual: true, MemoryBytes: 1000})
	defer f.Close()
	readers := make([]*logReader, 3)
	for i := range readers {
		readers[i] = f.readLog(t.Context(), nil, 1, wal.TailMark{})
		defer readers[i].close()
	}
	if err := readers[0].reserve(t.Context(), 2000); err != nil {
		t.Fatal(err)
	}
	ended, end := context.WithTimeout(t.Context(), 2*roomEvery)
	defer end()
	if err := readers[1].reserve(ended, 2000); err == nil {
		t.Fatal("there was room for two")
	}
	readers[0].release()
	if err := readers[2].reserve(t.Context(), 2000); err != nil {
		t.Fatal(err)
	}
	if readers[2].release(); f.memory.reading != 0 || len(f.memory.line) != 0 {
		t.Fatalf("%+v", f.memory)
	}
}

// securing is a store that is asked to make damaged commits safe, which takes as long as the test wants.
type securing struct {
	*store
	asked, goOn chan struct{}
}

func (s *securing) Secure(ctx context.Context, at keys.Epoch) (keys.Epoch, bool, error) {
	s.asked <- struct{}{}
	<-s.goOn
	return s.store.Secure(ctx, at)
}

// TestNoRoomIsKeptForADamagedRecord while the store brings its commit into the tree: other large records are read meanwhile.
func TestNoRoomIsKeptForADamagedRecord(t *testing.T) {
	s := &securing{newStore(t, 1<<20), make(chan struct{}), make(chan struct{})}
	f := New(s, Options{manual: true, MemoryBytes: 1000})
	defer f.Close()
	bad := s.append(batch.Header{}, set("k", string(make([]byte, 300<<10))))
	s.flush(bad)
	s.show(bad)
	s.damage(bad)
	mustWatch(t, f.NewConsumer("client"), WatchOptions{})
	var reader sync.WaitGroup
	reader.Go(func() { f.read() })
	<-s.asked
	f.lock()
	reading := f.memory.reading
	f.unlock()
	close(s.goOn)
	reader.Wait()
	if reading != 0 {
		t.Fatalf("room for %d bytes of a damaged record", reading)
	}
}

// TestCopiesOfSmallCommitsDoNotKeepTheTailerWaiting: streams that catch up copy parts all the time.
func TestCopiesOfSmallCommitsDoNotKeepTheTailerWaiting(t *testing.T) {
	s := newStore(t, 1<<16)
	f := New(s, Options{manual: true, MemoryBytes: 1 << 10})
	defer f.Close()
	c := f.NewConsumer("client")
	w := mustWatch(t, c, WatchOptions{Now: true})
	s.commit(batch.Header{}, set("k", string(make([]byte, 500))))
	mustStep(t, f)
	f.lock()
	d, ok := f.deliverLocked(w, Limit{Events: 1, Bytes: 1 << 20, Large: 1 << 20}) // a stream that is about to copy
	f.unlock()
	if !ok || !d.Parts[0].Copied {
		t.Fatalf("%+v", d)
	}
	defer f.copyParts(&d)
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	l := f.readLog(ctx, nil, 1, wal.TailMark{})
	defer l.close()
	if err := l.reserve(ctx, 4<<10); err != nil {
		t.Fatal(err)
	}
}

// TestStreamsWithMemoryForALargeOperationDeliverIt: two streams want one large operation each, and there is room for one commit.
// Each needs so long until it has memory for it that the other one's commit takes its queue away meanwhile, again and again.
func TestStreamsWithMemoryForALargeOperationDeliverIt(t *testing.T) {
	const size = 300 << 10
	s := newStore(t, 1<<20)
	left := map[*Consumer]*Watch{}
	takeAll := func() {
		for c, w := range left {
			if d, ok := c.Take(w, Limit{Bytes: 1 << 10, Large: size + 100}); ok && len(d.Parts) == 1 {
				delete(left, c)
			}
		}
	}
	f := New(s, Options{manual: true, MemoryBytes: size + 10<<10, roomWait: 1, wait: func(context.Context) { takeAll() }})
	defer f.Close()
	s.commit(batch.Header{}, set("a", string(make([]byte, size))))
	s.commit(batch.Header{}, set("b", string(make([]byte, size))))
	for i, key := range []string{"a", "b"} {
		c := f.NewConsumer(key)
		left[c] = mustWatch(t, c, WatchOptions{Ranges: []Range{pointRange([]byte(key))}, After: Position{Epoch: keys.Epoch(i)}})
		f.read()
		if d, ok := c.Next(Limit{Bytes: 1 << 10, Large: 1 << 10}); !ok || d.Large < size {
			t.Fatalf("%+v, %v", d, ok)
		}
	}
	for range 5 {
		for c, w := range left {
			if d, ok := c.Take(w, Limit{Bytes: 1 << 10, Large: size + 100}); ok && len(d.Parts) == 1 {
				delete(left, c)
				continue
			}
			f.read() // which makes room by taking the queue of the other one
		}
	}
	if len(left) > 0 {
		t.Fatalf("%d streams have memory for their operation, and were not served", len(left))
	}
}

// awaiting is a stream that awaits a large operation, with a watch that is before it in the log: of the same stream, or of another one of
// the same client. There is room for so many commits.
type awaiting struct {
	*Feed
	stream        *Consumer
	large, before *Watch
}

func beginAwaiting(t *testing.T, ofAnother bool, room int64) *awaiting {
	t.Helper()
	const size, commits = 300 << 10, 12
	s := newStore(t, 1<<20)
	for range commits {
		s.commit(batch.Header{}, set("b", string(make([]byte, size))))
	}
	s.commit(batch.Header{}, set("a", string(make([]byte, size))))
	f := New(s, Options{manual: true, MemoryBytes: room*size + 10<<10, QueueBytes: 4 * commits * size, roomWait: 1})
	t.Cleanup(f.Close)
	a := &awaiting{Feed: f, stream: f.NewConsumer("stream").Of("client")}
	other := a.stream
	if ofAnother {
		other = f.NewConsumer("another").Of("client")
	}
	a.large = mustWatch(t, a.stream, WatchOptions{Ranges: []Range{pointRange([]byte("a"))}, After: Position{Epoch: commits}})
	f.read()
	if d, ok := a.stream.Next(Limit{Bytes: 1 << 10, Large: 1 << 10}); !ok || d.Large < size {
		t.Fatalf("%+v, %v", d, ok)
	}
	a.before = mustWatch(t, other, WatchOptions{Ranges: []Range{pointRange([]byte("b"))}})
	for range 2 {
		a.lose(a.large)
		a.lose(a.before)
		f.read()
	}
	a.lose(a.large)
	a.lose(a.before)
	if f.read() {
		t.Fatal("a reader reads for a watch of which nothing is taken")
	}
	return a
}

// lose lets a watch lose its queue, if it has one: others need the memory.
func (a *awaiting) lose(w *Watch) {
	a.lock()
	defer a.unlock()
	if w.queue.len() > 0 {
		a.evictLocked(w)
	}
}

// take takes the large operation, if the watch has it.
func (a *awaiting) take(t *testing.T) (taken bool) {
	t.Helper()
	d, ok := a.stream.Take(a.large, Limit{Bytes: 1 << 10, Large: 1 << 20})
	if ok && len(d.Parts) != 1 {
		t.Fatalf("%+v", d)
	}
	return ok
}

// TestAStreamAwaitsOneOfItsWatches: the others are not read for meanwhile. They would have to be again and again.
func TestAStreamAwaitsOneOfItsWatches(t *testing.T) {
	a := beginAwaiting(t, false, 1)
	a.take(t)
	a.read()
	a.lock()
	fed := !a.before.hungry
	a.unlock()
	if fed {
		t.Error("another watch of the stream was read for")
	}
	if !a.take(t) {
		t.Error("the awaited operation is not there after one turn")
	}
	if _, ok := a.stream.Next(Limit{}); ok {
		t.Error("the other watch has something")
	}
	for range 3 {
		a.read()
	}
	if d, ok := a.stream.Next(Limit{}); !ok || d.Watch != a.before {
		t.Errorf("%+v, %v: the other watch has nothing after it was waited for", d, ok)
	}
}

// TestAWatchThatIsAwaitedHasItsOwnTurn: a watch before it in the log loses its queue before its stream takes anything, again and again, or has more at
// each turn. It is of the same client, for which one reader reads.
func TestAWatchThatIsAwaitedHasItsOwnTurn(t *testing.T) {
	for name, test := range map[string]struct {
		first bool // in the line
		loses bool
		room  int64
	}{
		"first, loses its queue":  {first: true, loses: true, room: 1},
		"second, loses its queue": {loses: true, room: 1},
		"first, goes on":          {first: true, room: 10},
	} {
		t.Run(name, func(t *testing.T) {
			a := beginAwaiting(t, true, test.room)
			if test.first {
				a.before.consumer.Next(Limit{})
			}
			turns := 0
			for ; !a.take(t) && turns < 20; turns++ {
				a.before.consumer.Next(Limit{Bytes: 1 << 10, Large: 1 << 10})
				a.read()
				if test.loses {
					a.lose(a.before)
				}
			}
			if turns > 4 { // one or two, unless the machine is so busy that the time of a turn is over before it begins
				t.Errorf("the awaited operation is not there after %d turns", turns)
			}
		})
	}
}
