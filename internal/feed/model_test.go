package feed

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/wal"
)

// model drives a feed step by step, and compares what each watch delivers with its filter of all commits.
type model struct {
	*store
	rng       *rand.Rand
	feed      *Feed
	reading   reading // of the reader that goes on
	keeps     bool    // no other reader reads
	consumer  []*Consumer
	watches   []*observed
	tree      keys.Epoch   // up to which the log has been truncated: the tree has it
	pending   []keys.Epoch // appended, and perhaps neither durable nor visible
	faults    int          // of which a watch heard
	large     []*observed  // of these Next has said that a large operation is next
	awaited   []*observed  // of these, the ones whose consumers wait for the queue that they have lost
	largest   int          // bytes of an operation that Next may deliver
	fruitless int          // attempts of a read to get room during which nothing was taken
	seen      struct{ copied, large, taken, lost, regained, forgone, shared int }
}

// observed is a watch with what it has delivered since a position.
type observed struct {
	*Watch
	consumer *Consumer
	after    Position
	got      []event
	regained bool // it is awaited, and has a queue
}

// TestDeliveryIsTheFilterOfTheLog makes commits, bulk loads and watches at random, with queues of 1 to 10 references and a
// ring of about three commits, and takes the steps of tailer, readers and consumers in a random order. Some commits are read when
// there is room for them, some are copied, and what happens between Next and Take is random, too.
func TestDeliveryIsTheFilterOfTheLog(t *testing.T) {
	var all model
	for i := range 30 / (1 + 4*testseed.RaceDetector) {
		seed := testseed.Base(t) + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			seen := runModel(t, rngOf(seed), 400).seen
			all.seen.copied += seen.copied
			all.seen.large += seen.large
			all.seen.taken += seen.taken
			all.seen.lost += seen.lost
			all.seen.regained += seen.regained
			all.seen.forgone += seen.forgone
			all.seen.shared += seen.shared
		})
	}
	t.Logf("%+v", all.seen)
	// When the log becomes durable is its own choice: a few seeds may meet none of what takes several steps.
	if !t.Failed() && testseed.RaceDetector == 0 && (all.seen.copied == 0 || all.seen.taken == 0 || all.seen.lost == 0 || all.seen.regained == 0 || all.seen.shared == 0) {
		t.Errorf("the test tests little: %+v", all.seen)
	}
}

func runModel(t *testing.T, rng *rand.Rand, steps int) *model {
	m := &model{store: newStore(t, wal.SegmentBytesMin), rng: rng}
	m.open(3)
	defer m.feed.Close()
	defer m.reading.close()
	for range steps {
		m.step()
	}
	m.finish()
	return m
}

// open opens a feed with so many consumers.
func (m *model) open(consumers int) {
	o := Options{MemoryBytes: 600 + 400*m.rng.Int64N(8), QueueOperations: 1 + m.rng.IntN(10), QueueBytes: 50 + m.rng.Int64N(500)}
	if m.rng.IntN(3) == 0 { // there is room for a large commit, or for two
		o = Options{MemoryBytes: 350<<10 + m.rng.Int64N(500<<10), QueueOperations: 1 + m.rng.IntN(10)}
	}
	o.manual, o.roomWait, o.wait, o.indexedMin = true, 1, m.takeAwaitedOfAll, 1+2*m.rng.IntN(2)
	if m.rng.IntN(2) == 0 { // the tailer is late
		o.lateAfter, o.fanoutMax = -1, 1+m.rng.IntN(3)
	}
	m.feed = New(m.store, o)
	m.largest, m.keeps = 1+m.rng.IntN(100), m.rng.IntN(2) == 0
	m.consumer = nil
	for i := range consumers {
		m.consumer = append(m.consumer, m.feed.NewConsumer(fmt.Sprint("client ", i%2)))
	}
}

func (m *model) step() {
	m.noteRegained()
	m.checkMemory()
	switch n := m.rng.IntN(100); {
	case n < 20:
		m.pending = append(m.pending, m.appendRandom())
	case n < 40:
		m.stabilize()
	case n < 42:
		m.stabilizeAll()
		m.noOp()
	case n < 43:
		m.stabilizeAll()
		lower := m.key()
		m.load(lower, string(lower[0]+byte(1+m.rng.IntN(4))))
	case n < 48:
		m.begin()
	case n < 62:
		m.tail()
	case n < 76:
		m.read()
	case n < 79 && len(m.large) > 0:
		m.takeLarge()
	case n < 95:
		m.take(m.consumer[m.rng.IntN(len(m.consumer))])
	case n < 97:
		m.restart()
	case n < 98:
		m.truncate()
	default:
		m.checkProgress()
	}
}

// read lets the reader go on that has read before, or another one.
func (m *model) read() bool {
	if !m.keeps && m.rng.IntN(8) == 0 {
		m.reading.close()
	}
	return m.feed.readWith(&m.reading)
}

func (m *model) key() string { return string(rune('a' + m.rng.IntN(12))) }

func (m *model) appendRandom() keys.Epoch {
	used := map[string]bool{}
	var ops []op
	for range 1 + m.rng.IntN(6) {
		o := set(m.key(), fmt.Sprint(m.rng.IntN(1000)))
		if m.rng.IntN(3) == 0 {
			o = del(m.key())
		}
		if m.rng.IntN(8) == 0 {
			o.key = string(keys.Append(nil, keys.SpaceSystem, []byte(m.key())))
		}
		if !used[o.key] {
			used[o.key] = true
			ops = append(ops, o)
		}
	}
	if m.rng.IntN(15) == 0 { // more than is read of the log at a time
		at := m.rng.IntN(len(ops))
		ops[at].kind, ops[at].value = keys.KindSet, strings.Repeat(m.key(), 256<<10+m.rng.IntN(64<<10))
	}
	slices.SortFunc(ops, func(a, b op) int { return strings.Compare(a.key, b.key) })
	return m.append(batch.Header{Origin: batch.Origin(m.rng.IntN(3))}, ops...)
}

// stabilize makes some of what was appended durable, or visible.
func (m *model) stabilize() {
	if len(m.pending) == 0 {
		return
	}
	e := m.pending[m.rng.IntN(len(m.pending))]
	if m.rng.IntN(2) == 0 {
		m.flush(e)
	} else {
		m.show(e)
	}
}

func (m *model) stabilizeAll() {
	for _, e := range m.pending {
		m.flush(e)
		m.show(e)
	}
	m.pending = nil
}

// begin begins a watch somewhere.
func (m *model) begin() {
	if len(m.watches) > 6 {
		return
	}
	o := WatchOptions{Now: m.rng.IntN(2) == 0, Kinds: Kinds(m.rng.IntN(8)), After: Position{Epoch: keys.Epoch(m.rng.IntN(int(m.Stable()) + 1))}}
	for range m.rng.IntN(4) {
		r := Range{Lower: []byte(m.key())}
		switch m.rng.IntN(3) {
		case 0:
			r = pointRange(r.Lower)
		case 1:
			r.Upper = append([]byte{}, r.Lower[0]+byte(1+m.rng.IntN(4)))
		}
		o.Ranges = append(o.Ranges, r)
	}
	if m.rng.IntN(4) == 0 {
		o.Origins = OriginsOf(batch.Origin(m.rng.IntN(3)))
	}
	c := m.consumer[m.rng.IntN(len(m.consumer))]
	w := mustWatch(m.t, c, o)
	m.watches = append(m.watches, &observed{Watch: w, consumer: c, after: w.Start()})
}

func (m *model) tail() {
	m.t.Helper()
	if m.feed.tailer == nil {
		return
	}
	if err := m.feed.tailer.step(m.t.Context()); err != nil {
		m.faults++
		m.feed.tailer.recover(m.t.Context(), err)
	}
}

// take takes one delivery of a consumer, and reports false if it has none.
func (m *model) take(c *Consumer) bool {
	m.t.Helper()
	if i := slices.IndexFunc(m.awaited, func(w *observed) bool { return w.consumer == c }); i >= 0 && m.rng.IntN(8) > 0 {
		return m.takeAwaited(m.awaited[i])
	} else if i >= 0 {
		m.awaited = slices.Delete(m.awaited, i, i+1) // Next forgoes what was awaited
		m.seen.forgone++
	}
	d, ok := c.Next(Limit{Events: 1 + m.rng.IntN(5), Bytes: 1 + m.rng.IntN(60), Large: m.largest})
	if !ok {
		return false
	}
	w := m.receive(&d)
	if d.Large > 0 {
		m.seen.large++
		m.large = append(m.large, w)
	}
	return true
}

// takeLarge takes what a watch has, about which Next has said that a large operation is next. The watch may have lost its queue,
// or have been replaced, meanwhile.
func (m *model) takeLarge() bool {
	m.t.Helper()
	i := m.rng.IntN(len(m.large))
	w := m.large[i]
	m.large = slices.Delete(m.large, i, i+1)
	m.awaited = slices.DeleteFunc(m.awaited, func(o *observed) bool { return o.consumer == w.consumer }) // a consumer awaits one watch
	if m.takeWith(w) {
		m.seen.taken++
		return true
	}
	m.seen.lost++
	if w.Info().State != StateEnded {
		w.regained = false
		m.awaited = append(m.awaited, w)
	}
	return false
}

// takeWith takes what a watch has by a consumer that has memory for it.
func (m *model) takeWith(w *observed) bool {
	m.t.Helper()
	d, ok := w.consumer.Take(w.Watch, Limit{Events: 1 + m.rng.IntN(5), Bytes: 1 + m.rng.IntN(60), Large: 1 << 20})
	if !ok {
		return false
	}
	if d.Large > 0 {
		m.t.Fatalf("watch %d has a large operation of %d bytes", w.ID, d.Large)
	}
	m.receive(&d)
	return true
}

// takeAwaited takes what a watch has got since it lost what its consumer wanted. Once it has a queue again, it keeps it.
func (m *model) takeAwaited(w *observed) bool {
	m.t.Helper()
	if !m.takeWith(w) {
		if w.regained {
			m.t.Fatalf("watch %d has lost a queue that its consumer was about to take", w.ID)
		}
		return false
	}
	m.awaited = slices.DeleteFunc(m.awaited, func(o *observed) bool { return o == w })
	m.seen.regained++
	return true
}

// takeAwaitedOfAll is what happens while a read waits for room: there is a queue that a consumer is about to take.
func (m *model) takeAwaitedOfAll(context.Context) {
	m.t.Helper()
	m.noteRegained()
	took := false
	for _, w := range slices.Clone(m.awaited) {
		took = w.regained && m.takeAwaited(w) || took
	}
	if m.fruitless++; took {
		m.fruitless = 0
	}
	if m.fruitless > 1000 {
		m.t.Fatalf("a read waits for room that no consumer gives: %+v", m.feed.memory)
	}
}

// forgo lets a consumer not wait for what a watch of it has lost.
func (m *model) forgo(c *Consumer) {
	m.awaited = slices.DeleteFunc(m.awaited, func(w *observed) bool { return w.consumer == c })
	c.Forgo()
}

// noteRegained notes which of the watches that lost their queues have one again.
func (m *model) noteRegained() {
	m.feed.lock()
	defer m.feed.unlock()
	for _, w := range m.awaited {
		w.regained = w.regained || w.queue.len() > 0
	}
}

// receive checks a delivery, and adds it to what its watch has delivered.
func (m *model) receive(d *Delivery) *observed {
	m.t.Helper()
	i := slices.IndexFunc(m.watches, func(w *observed) bool { return w.Watch == d.Watch })
	if i < 0 {
		m.t.Fatalf("a delivery of watch %d, which was canceled", d.Watch.ID)
	}
	w := m.watches[i]
	events := eventsOf(d)
	w.got = append(w.got, events...)
	m.check(w, d.Position)
	m.checkParts(w, d)
	stable := m.Stable()
	for _, e := range events {
		if e.epoch > stable {
			m.t.Fatalf("watch %d delivered %v, and %d is stable", w.ID, e, stable)
		}
	}
	if gap, is := errors.AsType[*GapError](d.Err); is {
		m.faults++
		m.closeGap(w, gap)
	}
	return w
}

// checkParts checks that a part says whether its commit ends, and where its operations are, and that a large commit is not kept.
func (m *model) checkParts(w *observed, d *Delivery) {
	m.t.Helper()
	kept := int64(0)
	for i := range d.Parts {
		p := &d.Parts[i]
		first, n, last := -1, 0, 0
		for at := range p.Operations {
			if first < 0 {
				first = at
			}
			last, n = at, n+1
		}
		if n > 0 && p.First() != first || n != p.Count() {
			m.t.Fatalf("watch %d: operations from %d on, %d of them; First %d, Count %d", w.ID, first, n, p.First(), p.Count())
		}
		rest := m.wanted(&w.filter, Position{Epoch: p.Commit.Epoch - 1, Operations: uint32(last + 1)})
		if more := p.Commit.Loaded == nil && len(rest) > 0 && rest[0].epoch == p.Commit.Epoch; p.End == more {
			m.t.Fatalf("watch %d, epoch %d up to operation %d: End %v", w.ID, p.Commit.Epoch, last, p.End)
		}
		if p.Copied {
			m.seen.copied++
		}
		if p.Commit.Loaded == nil {
			kept += p.Commit.size
			if s := p.Commit.slab; s != nil && (i == 0 || d.Parts[i-1].Commit.slab != s) {
				kept += s.bytes
			}
		}
	}
	if most := int64(keptFactor*61) + int64(len(d.Parts))*commitBytes; kept > most {
		m.t.Fatalf("watch %d: a delivery keeps %d bytes of commits, want at most %d", w.ID, kept, most)
	}
}

// closeGap does what a difference between two snapshots does.
func (m *model) closeGap(w *observed, gap *GapError) {
	at := max(gap.ResumeAt, m.Stable())
	if gap.ResumeAt > 0 && w.Resume(gap.ResumeAt-1) == nil {
		m.t.Fatal("resumed before the log can be read")
	}
	if err := w.Resume(at); err != nil {
		m.t.Fatal(err)
	}
	w.after, w.got = Position{Epoch: at}, nil
}

// check compares what a watch has delivered with what it wants up to a position.
func (m *model) check(w *observed, through Position) {
	m.t.Helper()
	var want []event
	for _, e := range m.wanted(&w.filter, w.after) {
		if e.epoch <= through.Epoch || e.epoch == through.Epoch+1 && e.index >= 0 && uint32(e.index) < through.Operations {
			want = append(want, e)
		}
	}
	if !slices.Equal(w.got, want) {
		m.t.Fatalf("watch %d after %v up to %v:\ngot  %v\nwant %v", w.ID, w.after, through, w.got, want)
	}
}

func (m *model) checkProgress() {
	m.t.Helper()
	m.checkStates()
	for _, w := range m.watches {
		if p, ok := w.Progress(); ok {
			m.check(w, p)
		}
	}
}

// restart replaces a watch by one that continues at its position.
func (m *model) restart() {
	if len(m.watches) == 0 {
		return
	}
	w := m.watches[m.rng.IntN(len(m.watches))]
	at := w.Info().Position
	m.check(w, at)
	w.Cancel()
	m.awaited = slices.DeleteFunc(m.awaited, func(o *observed) bool { return o == w })
	if m.rng.IntN(2) == 0 {
		m.forgo(w.consumer)
		if d, ok := w.consumer.Take(w.Watch, Limit{}); ok {
			m.t.Fatalf("watch %d was canceled and delivers %v", w.ID, d)
		}
	}
	c := m.consumer[m.rng.IntN(len(m.consumer))]
	opened, err := c.Watch(WatchOptions{After: at, Kinds: w.kinds, Origins: w.origins, Ranges: clientRanges(w.ranges)})
	if err != nil {
		m.t.Fatal(err)
	}
	if !slices.EqualFunc(opened.ranges, w.ranges, func(a, b Range) bool {
		return string(a.Lower) == string(b.Lower) && string(a.Upper) == string(b.Upper)
	}) {
		m.t.Fatalf("ranges %q became %q", w.ranges, opened.ranges)
	}
	w.Watch, w.consumer = opened, c
}

func clientRanges(internal []Range) (list []Range) {
	for _, r := range internal {
		c := Range{Lower: r.Lower[1:]}
		if r.Upper[0] == r.Lower[0] {
			c.Upper = r.Upper[1:]
		}
		list = append(list, c)
	}
	return list
}

// truncate removes what the tree would have from the log.
func (m *model) truncate() {
	m.tree = max(m.tree, m.Stable()/2)
	if err := m.log.TruncateBefore(m.tree + 1); err != nil {
		m.t.Fatal(err)
	}
}

// finish makes everything stable and takes all steps until nothing moves.
func (m *model) finish() {
	m.t.Helper()
	m.stabilizeAll()
	steps := 0
	for idle := 0; idle < 2 && steps < 20_000; idle++ { // Next lets readers read for a watch that has lost its queue
		m.tail()
		for ; steps < 20_000 && m.read(); steps++ {
			idle = 0
		}
		for _, c := range m.consumer {
			m.forgo(c) // a watch that has been replaced, or has delivered the operation otherwise, may have nothing for it
			for ; m.take(c) && steps < 20_000; steps++ {
				idle = 0
				for len(m.large) > 0 {
					m.takeLarge()
				}
			}
		}
	}
	for _, w := range m.watches {
		p, ok := w.Progress()
		if !ok || p.Epoch != m.Stable() {
			m.t.Fatalf("watch %d is at %v (%v), and %d is stable: %+v", w.ID, p, ok, m.Stable(), w.Info())
		}
		m.check(w, p)
	}
	m.finishedStats()
	m.feed.lock()
	defer m.feed.unlock()
	if left := &m.feed.memory; left.copied != 0 || left.queues < 0 || len(left.line) != 0 {
		m.t.Fatalf("%+v", *left)
	}
}

func (m *model) finishedStats() {
	if s := m.feed.Stats(); s.QueueBytes < 0 || s.Lagging+s.Difference > 0 {
		m.t.Fatalf("%+v", s)
	}
	m.checkStates()
}

// checkStates compares the numbers of watches by state with the watches.
func (m *model) checkStates() {
	s := m.feed.Stats()
	m.feed.lock()
	defer m.feed.unlock()
	states := map[State]int{}
	for _, w := range m.feed.watches {
		states[w.state]++
	}
	if states[StateLive] != s.Live || states[StateLagging] != s.Lagging || states[StateNeedsDifference] != s.Difference {
		m.t.Fatalf("%v: %+v", states, s)
	}
}
