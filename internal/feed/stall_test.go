package feed

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/wal"
)

// watchBytesMax is what a watch without a queue may take.
const watchBytesMax = 1 << 10

// TestStalledWatchesCostTheirStructs: a thousand watches of everything whose clients take nothing end without a queue, and
// one that takes what comes misses nothing meanwhile.
func TestStalledWatchesCostTheirStructs(t *testing.T) {
	testseed.SkipUnderRace(t)
	const stalled = 1000
	s := newStore(t, 1<<16)
	f := New(s, Options{manual: true, MemoryBytes: 1 << 20, QueueOperations: 400, lateAfter: time.Hour})
	defer f.Close()
	var all []*Watch
	for range stalled {
		all = append(all, mustWatch(t, f.NewConsumer("stalled"), WatchOptions{Now: true, Ranges: []Range{{Lower: []byte("k")}}}))
	}
	c := f.NewConsumer("busy")
	w := mustWatch(t, c, WatchOptions{Now: true})
	var got []event
	for i := range 3000 {
		s.commit(batch.Header{}, set(fmt.Sprintf("k%04d", i), string(bytes.Repeat([]byte{'v'}, 100))))
		if i%20 == 0 {
			mustStep(t, f)
			for d, ok := c.Next(Limit{}); ok; d, ok = c.Next(Limit{}) {
				got = append(got, eventsOf(&d)...)
			}
		}
		if st := f.Stats(); st.RingBytes > f.memory.ringMax || st.QueueBytes > f.memory.queuesMax {
			t.Fatalf("the ring has %d of %d bytes, the queues %d of %d", st.RingBytes, f.memory.ringMax, st.QueueBytes, f.memory.queuesMax)
		}
	}
	mustStep(t, f)
	for d, ok := c.Next(Limit{}); ok; d, ok = c.Next(Limit{}) {
		got = append(got, eventsOf(&d)...)
	}
	if want := s.wanted(&w.filter, w.Start()); !slices.Equal(got, want) || w.Info().State != StateLive {
		t.Fatalf("%d events of %d, state %v", len(got), len(want), w.Info().State)
	}
	st := f.Stats()
	if st.Lagging != stalled || st.BecameLagging.Memory+st.BecameLagging.Queue < stalled || f.read() {
		t.Fatalf("%+v, or a reader reads for a watch that takes nothing", st)
	}
	for _, w := range all {
		size := int(unsafe.Sizeof(*w)) + cap(w.entries)*int(unsafe.Sizeof(entry{})) + cap(w.ranges)*int(unsafe.Sizeof(Range{})) + cap(w.ranges[0].Lower) + cap(w.ranges[0].Upper)
		if cap(w.queue.refs) == 0 && size > watchBytesMax {
			t.Fatalf("a stalled watch takes %d bytes", size)
		}
	}
	if left := slices.DeleteFunc(all, func(w *Watch) bool { return cap(w.queue.refs) == 0 }); int64(len(left))*400*refBytes > f.memory.queuesMax {
		t.Fatalf("%d stalled watches have a queue", len(left))
	}
}

// read lets a new reader read for one group, and reports false if none waits.
func (f *Feed) read() bool {
	var r reading
	defer r.close()
	return f.readWith(&r)
}

// readWith lets a reader read for one group, and reports false if none waits.
func (f *Feed) readWith(r *reading) bool {
	f.lock()
	g := f.takeGroupLocked()
	f.unlock()
	if g != nil {
		f.serve(r, g)
	}
	return g != nil
}

// TestCatchingUpReadsTheLogOnce: a reader goes on where it was, also after a full queue and after its time was over.
func TestCatchingUpReadsTheLogOnce(t *testing.T) {
	s := newStore(t, 1<<20)
	var last keys.Epoch
	for i := range 20_000 {
		last = s.append(batch.Header{}, set(fmt.Sprint(i), "a value of some length"))
	}
	s.flush(last)
	s.show(last)
	f := New(s, Options{manual: true, QueueOperations: 500})
	defer f.Close()
	c := f.NewConsumer("client")
	w := mustWatch(t, c, WatchOptions{})
	var r reading
	defer r.close()
	read, serves := int64(0), 0
	for ; w.state != StateLive; serves++ {
		f.lock()
		g := f.takeGroupLocked()
		f.unlock()
		read += f.serve(&r, g)
		for _, more := c.Next(Limit{}); more; _, more = c.Next(Limit{}) {
		}
	}
	size := int64(0)
	segments, err := wal.Segments(s.fs, "data")
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range segments {
		if err := wal.ReadSegment(s.fs, one, func(r wal.Record) error { size += int64(len(r.Body)) + 32; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if read > size+size/4 || serves < 40 {
		t.Errorf("%d bytes were read of a log of %d, in %d times", read, size, serves)
	}
}

// TestSlowAndFastConsumersMissNothing runs the feed with its goroutines: writers, consumers of all speeds, watches that end
// and continue at their positions.
func TestSlowAndFastConsumersMissNothing(t *testing.T) {
	const commits = 1500
	s := newStore(t, 1<<14)
	f := New(s, Options{MemoryBytes: 64 << 10, QueueOperations: 50, CatchUpBytesPerSecond: 1 << 30})
	defer f.Close()
	var consumers sync.WaitGroup
	results := make([][]event, 6)
	filters := make([]filter, len(results))
	for i := range results {
		o := WatchOptions{Ranges: []Range{{Lower: []byte{byte('a' + i)}}}, After: Position{}}
		filters[i], _ = newFilter(keys.SpaceUser, o.Ranges, 0, 0)
		consumers.Go(func() { results[i] = consume(t, f, o, i, commits) })
	}
	for i := range commits {
		s.commit(batch.Header{}, set(string(rune('a'+i%9)), fmt.Sprint(i)), set("z", ""))
	}
	consumers.Wait()
	for i, got := range results {
		if want := s.wanted(&filters[i], Position{}); !slices.Equal(got, want) {
			t.Errorf("consumer %d: %d events of %d", i, len(got), len(want))
		}
	}
}

// consume takes everything that comes until the last commit. Consumer 0 is fast; the others are slow in several ways.
func consume(t *testing.T, f *Feed, o WatchOptions, kind int, commits keys.Epoch) (got []event) {
	c := f.NewConsumer(fmt.Sprint("client ", kind%4))
	defer func() { c.Close() }()
	w := mustWatch(t, c, o)
	for deadline := time.Now().Add(30 * time.Second); w.Info().Position.Epoch < commits && time.Now().Before(deadline); {
		d, ok := c.Next(Limit{Events: 1 + 100*(kind%3)})
		if !ok {
			select {
			case <-c.Wake():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		got = append(got, eventsOf(&d)...)
		if kind == 2 {
			time.Sleep(time.Millisecond)
		}
		if kind == 4 && len(got)%7 == 0 {
			o.After = d.Position
			c.Close()
			c = f.NewConsumer("another")
			w = mustWatch(t, c, o)
		}
	}
	return got
}

// TestWithoutAWatchNothingRuns: the goroutine and the ring are gone after the last watch.
func TestWithoutAWatchNothingRuns(t *testing.T) {
	s := newStore(t, 1<<16)
	f := New(s, Options{})
	c := f.NewConsumer("client")
	w := mustWatch(t, c, WatchOptions{Now: true})
	s.commit(batch.Header{}, set("a", "1"))
	take(t, c)
	w.Cancel()
	f.done.Wait()
	if st := f.Stats(); f.tailer != nil || st.RingBytes != 0 || st.QueueBytes != 0 || st.Live != 0 {
		t.Fatalf("%+v", st)
	}
	if _, err := f.NewConsumer("client").Watch(WatchOptions{After: Position{Epoch: 100}}); err == nil {
		t.Fatal("a watch after the stable epoch")
	}
	f.Close()
	if _, err := c.Watch(WatchOptions{Now: true}); err != ErrClosed {
		t.Fatal(err)
	}
}

// betweenParts is a store that counts how often it is asked what is stable while the feed's mutex is free.
type betweenParts struct {
	*store
	feed *Feed
	free int
}

func (s *betweenParts) Stable() keys.Epoch {
	if s.feed != nil && s.feed.mu.TryLock() {
		s.feed.mu.Unlock()
		s.free++
	}
	return s.store.Stable()
}

// TestAListOfManyWatchesIsTakenInParts: commits are offered between them.
func TestAListOfManyWatchesIsTakenInParts(t *testing.T) {
	s := &betweenParts{store: newStore(t, 1<<16)}
	f := New(s, Options{})
	defer f.Close()
	c := f.NewConsumer("client")
	const parts = 5
	for range parts*listedAtOnce + 1 {
		mustWatch(t, c, WatchOptions{Now: true})
	}
	s.feed = f
	if n := len(f.List()); n != parts*listedAtOnce+1 || s.free != 1+parts {
		t.Fatalf("%d watches, and %d times the mutex was free", n, s.free)
	}
}

// TestEndsAreDelivered: a watch that is ended, by its id or with the feed, says why, once.
func TestEndsAreDelivered(t *testing.T) {
	s := newStore(t, 1<<16)
	f := New(s, Options{})
	c := f.NewConsumer("client")
	w, other := mustWatch(t, c, WatchOptions{Now: true, Tag: 7}), mustWatch(t, c, WatchOptions{Now: true})
	reason := fmt.Errorf("lost the right")
	if !f.End(w.ID, reason) || f.End(w.ID, reason) || len(f.List()) != 1 {
		t.Fatal("not ended once")
	}
	if d := take(t, c); d.Watch != w || d.Err != reason || d.State != StateEnded || d.Watch.Tag != 7 {
		t.Fatalf("%+v", d)
	}
	f.Close()
	if d := take(t, c); d.Watch != other || d.Err != ErrClosed {
		t.Fatalf("%+v", d)
	}
	if d, ok := c.Next(Limit{}); ok {
		t.Fatalf("%+v", d)
	}
}
