package feed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestADeliveryPinsABoundedAmountOfMemory: a watch of one key that is in many large commits. What came out of Next belongs to
// no queue any more, but to a response that may wait for its client for minutes.
func TestADeliveryPinsABoundedAmountOfMemory(t *testing.T) {
	s := newStore(t, 1<<20)
	f := New(s, Options{manual: true})
	defer f.Close()
	c := f.NewConsumer("client")
	mustWatch(t, c, WatchOptions{Now: true, Ranges: []Range{pointRange([]byte("k"))}})
	const commits, size = 40, 20 << 10
	for range commits {
		s.commit(batch.Header{}, set("k", "small"), set("l", string(make([]byte, size))))
	}
	mustStep(t, f)
	delivered, last := 0, s.Stable()
	for at := (Position{}); at.Epoch < last; {
		d, ok := c.Next(Limit{Bytes: 1 << 10})
		if !ok {
			t.Fatalf("nothing after %v", at)
		}
		pinned := int64(0)
		for _, p := range d.Parts {
			pinned += p.Commit.size + int64(p.Bytes())
		}
		if most := int64((keptFactor+1)<<10) + int64(len(d.Parts))*commitBytes; pinned > most {
			t.Fatalf("a delivery of %d parts keeps %d bytes of commits, want at most %d", len(d.Parts), pinned, most)
		}
		delivered, at = delivered+len(d.Parts), d.Position
	}
	if delivered != commits {
		t.Fatalf("%d commits of %d", delivered, commits)
	}
}

// TestAQueueKeepsABoundedAmountOfCommits: a watch of one key that is in very many commits, whose client takes nothing. The queue keeps the whole of each.
func TestAQueueKeepsABoundedAmountOfCommits(t *testing.T) {
	s := newStore(t, 8<<20)
	f := New(s, Options{manual: true, MemoryBytes: 1 << 20})
	defer f.Close()
	c := f.NewConsumer("client")
	mustWatch(t, c, WatchOptions{Now: true, Ranges: []Range{pointRange([]byte("k"))}})
	const commits = 60
	for range commits {
		s.commit(batch.Header{}, set("k", "small"), set("l", string(make([]byte, 100<<10))))
		if f.tailer != nil { // until the watch lags
			mustStep(t, f)
		}
	}
	if n := f.Stats().QueueBytes; n > f.memory.queuesMax {
		t.Errorf("the queues have %d bytes of %d", n, f.memory.queuesMax)
	}
	delivered := 0
	for deadline := time.Now().Add(10 * time.Second); delivered < commits && time.Now().Before(deadline); {
		if d, ok := c.Next(Limit{Bytes: 1 << 10}); ok {
			delivered += len(d.Parts)
		} else {
			f.read()
		}
	}
	if delivered != commits {
		t.Errorf("%d commits of %d", delivered, commits)
	}
	for _, w := range f.watches {
		if w.queue.commits != 0 {
			t.Errorf("an empty queue counts %d bytes of commits", w.queue.commits)
		}
	}
}

// TestQueuesThatTakeTooMuchAreNotLookedAtWithEachCommit: the last queue keeps its commit, however large it is, and there may be very many watches.
func TestQueuesThatTakeTooMuchAreNotLookedAtWithEachCommit(t *testing.T) {
	s := newStore(t, 8<<20)
	f := New(s, Options{manual: true, MemoryBytes: 1 << 20})
	defer f.Close()
	c := f.NewConsumer("client")
	large := mustWatch(t, c, WatchOptions{Now: true, Ranges: []Range{pointRange([]byte("k"))}})
	mustWatch(t, c, WatchOptions{Now: true, Ranges: []Range{pointRange([]byte("m"))}})
	s.commit(batch.Header{}, set("k", string(make([]byte, 600<<10))))
	s.commit(batch.Header{}, set("z", "")) // the ring drops the large one
	mustStep(t, f)
	if f.memory.queues <= f.memory.queuesMax {
		t.Fatalf("the queues have %d bytes: the test tests nothing", f.memory.queues)
	}
	for _, grown := range []bool{false, true} {
		if grown {
			f.memory.walkFrom = f.memory.queues
		}
		s.commit(batch.Header{}, set("m", "v"))
		mustStep(t, f)
		if kept := large.queue.len() > 0; kept == grown {
			t.Errorf("the queues have grown: %v; the large commit is kept: %v", grown, kept)
		}
	}
}

// TestManyWatchesOfOneClientLagWhileTheTailerIsLate: of those that want the same commit. Others are offered it, and are live.
func TestManyWatchesOfOneClientLagWhileTheTailerIsLate(t *testing.T) {
	for _, late := range []bool{false, true} {
		s := newStore(t, 1<<20)
		o := Options{manual: true, lateAfter: time.Hour}
		if late {
			o.lateAfter = -1
		}
		f := New(s, o)
		defer f.Close()
		watch := func(client string, count int) *Consumer {
			c := f.NewConsumer(client)
			for range count {
				mustWatch(t, c, WatchOptions{Now: true})
			}
			return c
		}
		alone := watch("many", fanoutMax+1)
		s.commit(batch.Header{}, set("k", "alone"))
		mustStep(t, f)
		if n := f.Stats().Lagging; n > 0 {
			t.Errorf("late %v: %d watches lag, and no other waits for them", late, n)
		}
		few := watch("few", fanoutMax)
		elsewhere := watch("elsewhere", 0)
		w := mustWatch(t, elsewhere, WatchOptions{Now: true, Ranges: []Range{pointRange([]byte("another key"))}})
		last := s.commit(batch.Header{}, set("k", "v"))
		mustStep(t, f)
		stats, want := f.Stats(), 0
		if late {
			want = fanoutMax + 1
		}
		if stats.Lagging != want || stats.BecameLagging != (BecameLagging{Fanout: uint64(want)}) || stats.Epoch != last {
			t.Errorf("late %v: %d watches lag, %+v, at epoch %d of %d", late, stats.Lagging, stats.BecameLagging, stats.Epoch, last)
		}
		if w.Info().State != StateLive {
			t.Errorf("late %v: a watch of another key is %v", late, w.Info().State)
		}
		for f.Stats().Lagging > 0 { // readers bring them back
			g := f.takeGroupLocked()
			if g == nil {
				t.Fatal("watches that lag wait for no reader")
			}
			f.serve(new(reading), g)
		}
		for c, want := range map[*Consumer]int{alone: 2 * (fanoutMax + 1), few: fanoutMax} {
			got := 0
			for d, ok := c.Next(Limit{}); ok; d, ok = c.Next(Limit{}) {
				got += len(d.Parts)
			}
			if got != want {
				t.Errorf("late %v: %d events of %d", late, got, want)
			}
		}
	}
}

// TestTheEndOfManyWatchesHoldsUpNoOther: each has many ranges, and all others wait while those of one are taken out of the index.
func TestTheEndOfManyWatchesHoldsUpNoOther(t *testing.T) {
	const attempts = 10 * time.Second // a busy machine needs several, and one processor so many watches that it changes to the other goroutine meanwhile
	f := New(newStore(t, 1<<20), Options{manual: true})
	defer f.Close()
	var ranges []Range
	for i := range f.options.RangesMax {
		ranges = append(ranges, Range{fmt.Appendf(nil, "%02da", i), fmt.Appendf(nil, "%02db", i)})
	}
	watches := 500
	for began := time.Now(); time.Since(began) < attempts; watches = min(2*watches, 8000) {
		c, ended := f.NewConsumer("client"), make(chan struct{})
		for range watches {
			mustWatch(t, c, WatchOptions{Now: true, Ranges: ranges})
		}
		go func() {
			defer close(ended)
			c.Close()
		}()
		for left := watches; left > 0; {
			f.lock()
			left = len(f.watches)
			f.unlock()
			if left > 0 && left < watches { // another one goes on
				<-ended
				return
			}
		}
		<-ended
	}
	t.Error("no other goes on while the watches of a client end")
}

// TestALargeCommitIsInMemoryOnce: clients of many addresses watch everything, and each of their streams keeps what came out of
// Next, because its client takes nothing for a while. The commit is read again and again, for one of them after the other.
func TestALargeCommitIsInMemoryOnce(t *testing.T) {
	testseed.SkipUnderRace(t)
	const clients, operations, size = 8, 8, 512 << 10
	s := newStore(t, 16<<20)
	var ops []op
	for i := range operations {
		ops = append(ops, set(fmt.Sprintf("k%02d", i), string(bytes.Repeat([]byte{byte(i)}, size))))
	}
	for range 2 {
		s.commit(batch.Header{}, ops...)
	}
	// A log of which an eighth of a segment was written prepares the next one beside, 32 MiB of memory here. One that was opened does not.
	if err := s.log.Close(); err != nil {
		t.Fatal(err)
	}
	s.reopen(0, func(wal.Commit) {})
	f := New(s, Options{MemoryBytes: 1 << 20, CatchUpBytesPerSecond: 1 << 40})
	defer f.Close()
	before := liveHeap()
	kept := make([]Delivery, clients)
	var streams sync.WaitGroup
	var running sync.RWMutex // while it is locked the streams take nothing, as if none of their clients did
	for i := range clients {
		streams.Go(func() {
			c := f.NewConsumer(fmt.Sprint("client ", i))
			defer c.Close()
			w := mustWatch(t, c, WatchOptions{})
			for got := 0; got < 2*operations; {
				running.RLock()
				d, ok := c.Next(Limit{Bytes: 64 << 10, Large: 64 << 10})
				if d.Large > 0 {
					d, ok = c.Take(w, Limit{Bytes: 64 << 10, Large: d.Large})
				}
				if ok {
					kept[i] = d
				}
				running.RUnlock()
				if !ok {
					select {
					case <-c.Wake():
					case <-time.After(time.Millisecond):
					}
					continue
				}
				for i := range d.Parts {
					got += d.Parts[i].Count()
				}
			}
		})
	}
	ended, most := make(chan struct{}), int64(0)
	go func() { streams.Wait(); close(ended) }()
	for over := false; !over; {
		select {
		case <-ended:
			over = true
		case <-time.After(20 * time.Millisecond):
		}
		running.Lock()
		f.awaitReaders()
		most = max(most, liveHeap()-before)
		running.Unlock()
	}
	t.Logf("%d MiB", most>>20)
	// A commit, and an operation for each stream.
	if bound := int64(operations*size + clients*size + 2<<20); most > bound {
		t.Errorf("%d clients kept %d MiB alive, want at most %d", clients, most>>20, bound>>20)
	}
}

// awaitReaders returns when no reader reads for a watch.
func (f *Feed) awaitReaders() {
	for reading := true; reading; time.Sleep(time.Millisecond) {
		f.lock()
		reading = f.catchUp.readers > 0
		f.unlock()
	}
}

func liveHeap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestWhatIsAttachedIsWithinTheBound: previous values that are left at commits make room for themselves.
func TestWhatIsAttachedIsWithinTheBound(t *testing.T) {
	s := newStore(t, 1<<20)
	f := New(s, Options{manual: true, MemoryBytes: 64 << 10})
	defer f.Close()
	c := f.NewConsumer("client")
	mustWatch(t, c, WatchOptions{Now: true})
	for i := range 20 {
		s.commit(batch.Header{}, set("k", fmt.Sprint(i)))
	}
	mustStep(t, f)
	d, _ := c.Next(Limit{})
	for _, p := range d.Parts {
		p.Commit.Attach("previous", 8<<10)
		if st := f.Stats(); st.RingBytes > f.memory.ringMax || st.QueueBytes > f.memory.queuesMax {
			t.Fatalf("the ring has %d of %d bytes, the queues %d of %d", st.RingBytes, f.memory.ringMax, st.QueueBytes, f.memory.queuesMax)
		}
	}
}

// TestNothingIsLeftWithACommitThatOnlyResponsesHave: a response that waits for its client would keep it, and nothing would count it.
func TestNothingIsLeftWithACommitThatOnlyResponsesHave(t *testing.T) {
	s := newStore(t, 1<<20)
	f := New(s, Options{manual: true, MemoryBytes: 64 << 10})
	defer f.Close()
	c := f.NewConsumer("client")
	mustWatch(t, c, WatchOptions{Now: true})
	commit := func(i int) *Commit {
		s.commit(batch.Header{}, set("k", fmt.Sprint(i)))
		mustStep(t, f)
		d, ok := c.Next(Limit{})
		if !ok || len(d.Parts) != 1 {
			t.Fatalf("%+v", d)
		}
		return d.Parts[0].Commit
	}
	kept := commit(0)
	size := kept.size
	if kept.Attach("previous", 8<<10) != "previous" || kept.Attached() != "previous" {
		t.Fatal("nothing is left with a commit of the ring")
	}
	for i := range 10 {
		commit(1+i).Attach("previous", 8<<10)
	}
	if kept.Attached() != nil || kept.size != size {
		t.Errorf("%v, %d bytes more, with a commit that the ring has dropped", kept.Attached(), kept.size-size)
	}
	if kept.Attach("previous", 8<<10) != "previous" || kept.Attached() != nil {
		t.Errorf("%v is left with it", kept.Attached())
	}
	if st := f.Stats(); st.QueueBytes > 1<<10 || st.RingBytes > f.memory.ringMax {
		t.Errorf("%+v", st)
	}
}

// TestTakeSaysThatTheLogHasNotTheOperation: a stream that waits for an operation that its watch has lost learns that the log does not
// have it any more, and that the watch has ended.
func TestTakeSaysThatTheLogHasNotTheOperation(t *testing.T) {
	s := newStore(t, wal.SegmentBytesMin)
	f := New(s, Options{manual: true})
	defer f.Close()
	e := s.commit(batch.Header{}, set("k", "v"))
	c := f.NewConsumer("client")
	w := mustWatch(t, c, WatchOptions{After: Position{Epoch: e - 1}})
	for f.read() { // a read ends after some time, which may be before it has read anything
	}
	f.lock()
	f.evictLocked(w)
	f.unlock()
	if d, ok := c.Take(w, Limit{}); ok {
		t.Fatalf("%+v", d)
	}
	for s.OldestInLog() <= e {
		if err := s.log.TruncateBefore(s.commit(batch.Header{}, set("k", string(make([]byte, 1000))))); err != nil {
			t.Fatal(err)
		}
	}
	for f.read() {
	}
	if d, ok := c.Take(w, Limit{}); !ok || d.State != StateNeedsDifference || d.Err == nil {
		t.Fatalf("%+v, %v", d, ok)
	}
	c.Take(w, Limit{})
	if w.End(ErrClosed); !w.Ended() {
		t.Fatal("the watch has not ended")
	}
	if d, ok := c.Take(w, Limit{}); !ok || d.Err != ErrClosed {
		t.Fatalf("%+v, %v", d, ok)
	}
}

// TestAFailingReadBecomesAGapBesideWorkingOnes: reads that succeed for other watches do not hide that those for one always fail.
func TestAFailingReadBecomesAGapBesideWorkingOnes(t *testing.T) {
	s := newStore(t, 1<<13)
	for i := range 200 {
		s.commit(batch.Header{}, set("k", fmt.Sprint(i)))
	}
	f := New(s, Options{manual: true})
	defer f.Close()
	f.stop() // no pause between attempts
	c := f.NewConsumer("client")
	w, other := mustWatch(t, c, WatchOptions{After: Position{}}), mustWatch(t, f.NewConsumer("other"), WatchOptions{After: Position{Epoch: 100}})
	bad, good := &group{watches: []*Watch{w}}, &group{watches: []*Watch{other}}
	for range failuresMax + 1 {
		w.group, other.group = bad, good
		f.gapFor(bad, 1, syscall.EIO)
		f.offerPieces(good, []piece{{after: other.queued.Epoch, at: other.mark, through: other.queued.Epoch + 1}})
	}
	if d, ok := c.Next(Limit{}); !ok || !errors.Is(d.Err, syscall.EIO) || d.State != StateNeedsDifference {
		t.Fatalf("after %d failures in a row: %+v", failuresMax+1, d)
	}
}

// TestLaggingWatchPassesAGapInWhichTheRingBegins: a gap of the log is one record, however the tailer began.
func TestLaggingWatchPassesAGapInWhichTheRingBegins(t *testing.T) {
	s := newStore(t, 1<<13)
	s.commit(batch.Header{}, set("k", "before"))
	f := New(s, Options{manual: true})
	defer f.Close()
	loaded := s.load("a", "b")
	f.startLocked(loaded - 500)
	c := f.NewConsumer("client")
	mustWatch(t, c, WatchOptions{After: Position{}})
	for range 5 {
		f.read()
	}
	var got []event
	for d, ok := c.Next(Limit{}); ok; d, ok = c.Next(Limit{}) {
		got = append(got, eventsOf(&d)...)
	}
	if len(got) != 2 || got[1].epoch != loaded {
		t.Fatalf("%v", got)
	}
}

// TestPositionOfARemovedCommitIsRefused: epochs that a restart skipped name no commit. A watch that says it has one of them had
// it from a log whose end was removed since.
func TestPositionOfARemovedCommitIsRefused(t *testing.T) {
	s := newStore(t, 1<<13)
	last := s.commit(batch.Header{}, set("k", "kept"))
	s.fs = s.fs.Crash(1, vfs.SurviveAll)
	s.reopen(0, func(wal.Commit) {})
	first := s.commit(batch.Header{}, set("k", "after the restart"))
	if first-last < 3 {
		t.Fatalf("the restart skipped nothing after epoch %d: %d", last, first)
	}
	f := New(s, Options{manual: true})
	defer f.Close()
	for _, one := range []struct {
		after   Position
		refused bool
	}{
		{Position{Epoch: last}, false},
		{Position{Epoch: last, Operations: 1}, true},
		{Position{Epoch: last + 1}, true},
		{Position{Epoch: first - 2}, true},
		{Position{Epoch: first - 1}, false},
	} {
		c := f.NewConsumer("client")
		mustWatch(t, c, WatchOptions{After: one.after})
		var got []event
		var err error
		for range 5 {
			f.read()
			if f.tailer != nil {
				mustStep(t, f)
			}
			for d, ok := c.Next(Limit{}); ok; d, ok = c.Next(Limit{}) {
				got, err = append(got, eventsOf(&d)...), d.Err
			}
		}
		removed := (*RemovedError)(nil)
		switch {
		case one.refused && (!errors.As(err, &removed) || len(got) > 0):
			t.Errorf("after %+v: %v, error %v", one.after, got, err)
		case !one.refused && (err != nil || len(got) != 1 || got[0].epoch != first):
			t.Errorf("after %+v: %v, error %v", one.after, got, err)
		}
		c.Close()
	}
}

// TestTheTailerRestsWhileNoClientTakesAnything: the log is decoded for watches that take something.
func TestTheTailerRestsWhileNoClientTakesAnything(t *testing.T) {
	s := newStore(t, 1<<16)
	f := New(s, Options{manual: true, MemoryBytes: 8 << 10, QueueOperations: 20})
	defer f.Close()
	c := f.NewConsumer("client")
	w := mustWatch(t, c, WatchOptions{Now: true})
	other := mustWatch(t, f.NewConsumer("another"), WatchOptions{Now: true})
	for i := range 100 {
		s.commit(batch.Header{}, set("k", string(bytes.Repeat([]byte{'v'}, 100+i))))
		if f.tailer != nil {
			mustStep(t, f)
		}
	}
	if f.tailer != nil || f.live != 0 || f.Stats().RingBytes != 0 {
		t.Fatalf("it runs for watches in state %v and %v: %+v", w.Info().State, other.Info().State, f.Stats())
	}
	var got []event
	for range 200 {
		for d, ok := c.Next(Limit{}); ok; d, ok = c.Next(Limit{}) {
			got = append(got, eventsOf(&d)...)
		}
		f.read()
		if f.tailer != nil {
			mustStep(t, f)
		}
	}
	if want := s.wanted(&w.filter, w.Start()); !slices.Equal(got, want) || w.Info().State != StateLive || f.tailer == nil {
		t.Fatalf("%d events of %d, state %v", len(got), len(want), w.Info().State)
	}
	w.Cancel()
	if f.tailer != nil {
		t.Fatal("it runs for a watch whose client takes nothing")
	}
}

// TestReadersCatchUpWithLateTimers: a pause that was longer than it should have been shortens the next ones, up to a bound.
func TestReadersCatchUpWithLateTimers(t *testing.T) {
	f := New(newStore(t, 1<<20), Options{CatchUpBytesPerSecond: 1 << 20, manual: true})
	defer f.Close()
	const paid = 100 * time.Millisecond // for a tenth of a second's bytes
	for late, want := range map[time.Duration]time.Duration{0: paid, lateMax / 2: paid - lateMax/2, time.Hour: paid - lateMax} {
		f.catchUp.free = time.Now().Add(-late)
		if wait := f.throttle(1 << 20 / 10); wait > want || wait < paid-lateMax-time.Millisecond {
			t.Errorf("a reader that was late by %v pauses for %v, want %v", late, wait, want)
		}
	}
}

// TestAWatchOfAClientThatOwesLetsOthersPass, until as much was read for them; but what is read for others anyway is read for it, too: that is what comes
// after their positions.
func TestAWatchOfAClientThatOwesLetsOthersPass(t *testing.T) {
	s := newStore(t, 1<<20)
	s.commit(batch.Header{}, set("k", "v"))
	f := New(s, Options{manual: true})
	defer f.Close()
	of := map[string]*Watch{}
	for _, client := range []string{"a", "b", "c"} {
		c := f.NewConsumer(client)
		defer c.Close()
		of[client] = mustWatch(t, c, WatchOptions{})
	}
	u := &f.catchUp
	f.lock()
	defer f.unlock()
	far := func(client string, n keys.Epoch) { of[client].queued.Epoch = n * (nearEpochs + 1) }
	far("a", 1)
	far("b", 2)
	far("c", 3)
	read := func(bytes int64, want ...string) { // nothing is read, only the choice is tested
		t.Helper()
		g := f.takeGroupLocked()
		if g == nil && len(want) == 0 {
			return
		}
		if g == nil || !slices.Equal(g.clients, want) {
			t.Fatalf("%+v is read for, want %v; %v is owed", g, want, u.owed)
		}
		for _, w := range g.watches {
			f.dismissLocked(w, g)
		}
		for _, client := range g.clients {
			delete(u.busy, client)
		}
		g.largest, g.largestAt = bytes, 100*nearEpochs
		u.chargeLocked(g, bytes)
	}
	read(groupBytes+100, "a") // owes 100
	read(groupBytes, "b")
	read(groupBytes, "c")
	read(50, "b") // a lets it pass, and owes 50
	read(60, "c")
	read(60, "b") // passes a, which comes after c since then
	read(1, "c")
	read(groupBytes+1000, "a")
	if len(u.owed) != 1 || u.owed["a"] != 1000 {
		t.Fatalf("%v is owed", u.owed)
	}
	read(1, "b")
	u.busy["c"] = true // a reader reads for it
	read(1, "b")
	f.leaveLineLocked(of["b"])
	read(0) // the reader of c looks again
	delete(u.busy, "c")
	f.leaveLineLocked(of["c"])
	u.owed["b"] = 5000
	read(1, "a") // alone
	if len(u.owed) != 1 || u.owed["b"] >= 5000 {
		t.Fatalf("%v is owed", u.owed)
	}
	of["b"].queued.Epoch = of["a"].queued.Epoch + 1
	f.joinLocked(of["b"])
	read(1, "a", "b") // it is a little further
	g := f.takeGroupLocked()
	g.largest, g.largestAt = 2*groupBytes, of["b"].queued.Epoch // only a needs it
	for _, w := range g.watches {
		f.dismissLocked(w, g)
	}
	clear(u.busy)
	clear(u.owed)
	if u.chargeLocked(g, g.largest); len(g.clients) != 2 || len(u.owed) != 1 || u.owed["a"] != groupBytes {
		t.Fatalf("%v is owed by %v", u.owed, g.clients)
	}
	clear(u.owed)
	u.owed["b"] = 4000
	of["b"].queued.Epoch = of["a"].queued.Epoch - 1
	read(1, "a")
	for _, w := range of {
		f.leaveLineLocked(w)
	}
	if read(0); len(u.owed) > 0 {
		t.Errorf("without a watch that waits %v is owed", u.owed)
	}
}

// TestClientsThatComeAndGoLeaveOthersTheirTurns: while clients come without end, each gets its turn, and so does one that has had turns before.
func TestClientsThatComeAndGoLeaveOthersTheirTurns(t *testing.T) {
	s := newStore(t, 1<<20)
	s.commit(batch.Header{}, set("k", "v"))
	f := New(s, Options{manual: true})
	defer f.Close()
	watch := func(client string, n int) *Watch {
		w := mustWatch(t, f.NewConsumer(client), WatchOptions{})
		f.lock()
		w.queued.Epoch = keys.Epoch(n) * (nearEpochs + 1) // far from the others
		f.unlock()
		return w
	}
	one := watch("one", 1)
	turns := 0
	for i := range 100 {
		watch(fmt.Sprint("newcomer ", i), 2+i)
		f.lock()
		g := f.takeGroupLocked()
		for _, w := range g.watches {
			w.group = nil
			if w == one {
				turns++
				f.joinLocked(w)
			}
		}
		clear(f.catchUp.busy)
		g.largest, g.largestAt = 2*groupBytes, 1000*nearEpochs
		f.catchUp.chargeLocked(g, g.largest)
		f.unlock()
	}
	if turns < 6 { // the line grows: 9 are measured
		t.Errorf("%d turns of 100", turns)
	}
}

// TestClientsThatComeWithoutEndHoldUpNoOther: the first turn of each reads its segment from the beginning, because it is not known where its position is.
// Another client does not have that read at each of its own turns. No time passes here while something is read: on a slow machine more clients would come
// than are read for.
func TestClientsThatComeWithoutEndHoldUpNoOther(t *testing.T) {
	synctest.Test(t, clientsThatComeWithoutEnd)
}

func clientsThatComeWithoutEnd(t *testing.T) {
	const logBytes, commitBytes, perSecond = 16 << 20, 4 << 10, 64 << 20
	s := newStore(t, 4<<20)
	var late keys.Epoch
	for i := range logBytes / commitBytes {
		if e := s.commit(batch.Header{}, set("k", strings.Repeat("v", commitBytes))); i == (logBytes-1<<20)/commitBytes {
			late = e
		}
	}
	last := s.commit(batch.Header{}, set("last", "v"))
	f := New(s, Options{CatchUpBytesPerSecond: perSecond})
	defer f.Close()
	end := []Range{{Lower: []byte("last"), Upper: []byte("last0")}}
	var coming sync.WaitGroup
	defer coming.Wait()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	coming.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			c := f.NewConsumer(fmt.Sprint("newcomer ", i))
			defer c.Close()
			mustWatch(t, c, WatchOptions{After: Position{Epoch: late}, Ranges: end})
			sleep(ctx, 10*time.Millisecond)
		}
	})
	c := f.NewConsumer("another")
	defer c.Close()
	mustWatch(t, c, WatchOptions{After: Position{Epoch: 1}, Ranges: end})
	for d := take(t, c); d.Position.Epoch < last; d = take(t, c) {
		d.Release()
	}
	if read := f.Stats().CatchUpBytes; read > 4*logBytes {
		t.Errorf("%d bytes were read, of a log of %d", read, logBytes)
	}
}

// TestAWatchWithoutAPlaceInTheLogIsReadForAlone: to find its position takes the reading of what is before it, which others would have at each turn.
func TestAWatchWithoutAPlaceInTheLogIsReadForAlone(t *testing.T) {
	s := newStore(t, 64<<20)
	for range 20 {
		s.commit(batch.Header{}, set("k", strings.Repeat("v", groupBytes/4)))
	}
	f := New(s, Options{manual: true})
	defer f.Close()
	watch := func(client string, after keys.Epoch) *Watch {
		c := f.NewConsumer(client)
		t.Cleanup(c.Close)
		return mustWatch(t, c, WatchOptions{After: Position{Epoch: after}, Ranges: []Range{{Lower: []byte("l")}}})
	}
	placed := watch("placed", 1)
	if !f.read() || placed.state != StateLagging {
		t.Fatal("the test has no watch with a place")
	}
	watch("newcomer", placed.queued.Epoch-1)
	f.lock()
	defer f.unlock()
	if g := f.takeGroupLocked(); !slices.Equal(g.clients, []string{"placed"}) {
		t.Errorf("%v are read for", g.clients)
	}
}

// TestClientsThatComeBackTogetherAreReadForTogether, although each begins a little later: otherwise the log would be read once for each of them, with a
// part of the bandwidth, and they would never catch up with writers that are faster than that part.
func TestClientsThatComeBackTogetherAreReadForTogether(t *testing.T) {
	const clients, logBytes, commitBytes, perSecond = 10, 16 << 20, 4 << 10, 32 << 20
	s := newStore(t, 4<<20)
	for range logBytes / commitBytes {
		s.commit(batch.Header{}, set("k", strings.Repeat("v", commitBytes)))
	}
	last := s.commit(batch.Header{}, set("last", "v"))
	f := New(s, Options{CatchUpBytesPerSecond: perSecond})
	defer f.Close()
	all := make([]*Consumer, clients)
	for i := range all {
		all[i] = f.NewConsumer(fmt.Sprint("client ", i))
		defer all[i].Close()
		mustWatch(t, all[i], WatchOptions{After: Position{Epoch: 1}, Ranges: []Range{{Lower: []byte("last"), Upper: []byte("last0")}}})
		time.Sleep(3 * time.Millisecond)
	}
	for _, c := range all {
		for d := take(t, c); d.Position.Epoch < last; d = take(t, c) {
			d.Release()
		}
	}
	if read := f.Stats().CatchUpBytes; read > logBytes+clients*groupBytes {
		t.Errorf("%d bytes were read for %d clients, of a log of %d", read, clients, logBytes)
	}
}

// TestAClientThatReadsLargeCommitsAgainLeavesOthersTheirShare: two streams of a client take two commits that do not fit into memory together, a little
// at a time, so that each is read again and again. Another client has its history after about twice the time that it needs alone, and not after a large
// commit for each little that it reads. A turn ends after a millisecond, too, in which a slow machine reads less for the other client: no time
// passes here while something is read.
func TestAClientThatReadsLargeCommitsAgainLeavesOthersTheirShare(t *testing.T) {
	synctest.Test(t, clientThatReadsLargeCommitsAgain)
}

func clientThatReadsLargeCommitsAgain(t *testing.T) {
	const largeBytes, perSecond = 4 << 20, 16 << 20
	s := newStore(t, 1<<20)
	large := func() keys.Epoch {
		var ops []op
		for i := range largeBytes >> 14 {
			ops = append(ops, set(fmt.Sprintf("large/%04d", i), strings.Repeat("v", 1<<14)))
		}
		return s.commit(batch.Header{}, ops...)
	}
	first := large()
	for i := range 2000 {
		s.commit(batch.Header{}, set(fmt.Sprintf("small/%04d", i), strings.Repeat("v", 2<<10)))
	}
	second := large()
	f := New(s, Options{MemoryBytes: 5 << 20, CatchUpBytesPerSecond: perSecond})
	defer f.Close()
	var slow sync.WaitGroup
	defer slow.Wait()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for _, e := range []keys.Epoch{first, second} {
		c := f.NewConsumer(fmt.Sprint("slow ", e)).Of("slow")
		mustWatch(t, c, WatchOptions{After: Position{Epoch: e - 1}, Ranges: []Range{{Lower: []byte("large/"), Upper: []byte("large0")}}})
		slow.Go(func() {
			defer c.Close()
			for ctx.Err() == nil {
				if d, ok := c.Next(Limit{Events: 1}); ok {
					d.Release()
					sleep(ctx, 100*time.Millisecond)
					continue
				}
				select {
				case <-c.Wake():
				case <-ctx.Done():
				}
			}
		})
	}
	for f.Stats().CatchUpBytes < 4*largeBytes {
		time.Sleep(time.Millisecond)
	}
	before := f.Stats().CatchUpBytes
	c := f.NewConsumer("another")
	mustWatch(t, c, WatchOptions{After: Position{Epoch: first}, Ranges: []Range{{Lower: []byte("small/"), Upper: []byte("small0")}}})
	for n := 0; n < 2000; {
		d := take(t, c)
		for i := range d.Parts {
			n += d.Parts[i].Count()
		}
		d.Release()
	}
	const own = 2000 * (2 << 10)
	if all := f.Stats().CatchUpBytes - before; all > 3*own+4*largeBytes {
		t.Errorf("while a client read %d bytes, %d were read for all", own, all)
	}
}

// TestAWatchOfSomeKindsHasACommitInItsQueueOnce: not once for each change of kind in it, because there may be very many watches.
func TestAWatchOfSomeKindsHasACommitInItsQueueOnce(t *testing.T) {
	s := newStore(t, 1<<20)
	f := New(s, Options{manual: true, MemoryBytes: 1 << 20})
	defer f.Close()
	var watches []*Watch
	for i := range int(kindsAll) {
		watches = append(watches, mustWatch(t, f.NewConsumer("client"), WatchOptions{Now: true, Kinds: 1 + Kinds(i)}))
	}
	var ops []op
	for i := range 1500 {
		if ops = append(ops, set(fmt.Sprintf("%04d", i), "")); i%2 == 1 {
			ops[i] = del(fmt.Sprintf("%04d", i))
		}
	}
	s.commit(batch.Header{}, ops...)
	mustStep(t, f)
	for _, w := range watches {
		want := s.wanted(&w.filter, w.Start())
		if n := w.queue.len(); n != min(len(want), 1) {
			t.Fatalf("kinds %b: the queue has %d references to one commit", w.kinds, n)
		}
		var got []event
		ended := false
		for d, ok := w.consumer.Next(Limit{}); ok; d, ok = w.consumer.Next(Limit{}) {
			got, ended = append(got, eventsOf(&d)...), d.Parts[len(d.Parts)-1].End
		}
		if !slices.Equal(got, want) || ended != (len(want) > 0) {
			t.Fatalf("kinds %b: %d events of %d, at its end: %v", w.kinds, len(got), len(want), ended)
		}
	}
}

// TestANewWatchThatIsFarBackWaitsForAReader: clients may create watches as often as they like, and what these take of the ring lets the tailer wait.
func TestANewWatchThatIsFarBackWaitsForAReader(t *testing.T) {
	s := newStore(t, 8<<20)
	f := New(s, Options{manual: true})
	defer f.Close()
	c := f.NewConsumer("client")
	mustWatch(t, c, WatchOptions{Now: true})
	const commits = 4 * createdMax
	for i := range commits {
		s.commit(batch.Header{}, set("k", fmt.Sprint(i)))
	}
	mustStep(t, f)
	last := s.Stable()
	for back, waits := range map[keys.Epoch]bool{createdMax: false, createdMax + 1: true} {
		own := f.NewConsumer("client")
		w := mustWatch(t, own, WatchOptions{After: Position{Epoch: last - back}})
		if got := w.queue.len() == 0; got != waits {
			t.Errorf("%d commits back: it waits for a reader: %v", back, got)
		}
		for f.read() {
		}
		delivered := keys.Epoch(0)
		for d, ok := own.Next(Limit{}); ok; d, ok = own.Next(Limit{}) {
			delivered += keys.Epoch(len(d.Parts))
		}
		if delivered != back || w.state != StateLive {
			t.Errorf("%d commits back: %d delivered, state %v", back, delivered, w.state)
		}
	}
}
