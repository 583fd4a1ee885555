package feed

import (
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
	rng      *rand.Rand
	feed     *Feed
	consumer []*Consumer
	watches  []*observed
	pending  []keys.Epoch // appended, and perhaps neither durable nor visible
	faults   int          // of which a watch heard
}

// observed is a watch with what it has delivered since a position.
type observed struct {
	*Watch
	consumer *Consumer
	after    Position
	got      []event
}

// TestDeliveryIsTheFilterOfTheLog makes commits, bulk loads and watches at random, with queues of 1 to 10 references and a
// ring of about three commits, and takes the steps of tailer, readers and consumers in a random order.
func TestDeliveryIsTheFilterOfTheLog(t *testing.T) {
	for i := range 30 {
		seed := testseed.Base(t) + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) { runModel(t, rngOf(seed), 400) })
	}
}

func runModel(t *testing.T, rng *rand.Rand, steps int) *model {
	m := &model{store: newStore(t, wal.SegmentBytesMin), rng: rng}
	m.open(3)
	defer m.feed.Close()
	for range steps {
		m.step()
	}
	m.finish()
	return m
}

// open opens a feed with so many consumers.
func (m *model) open(consumers int) {
	m.feed = New(m.store, Options{
		manual: true, MemoryBytes: 600 + 400*m.rng.Int64N(8), QueueOperations: 1 + m.rng.IntN(10), QueueBytes: 50 + m.rng.Int64N(500),
	})
	m.consumer = nil
	for i := range consumers {
		m.consumer = append(m.consumer, m.feed.NewConsumer(fmt.Sprint("client ", i%2)))
	}
}

func (m *model) step() {
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
		m.load(m.key(), "")
	case n < 48:
		m.begin()
	case n < 62:
		m.tail()
	case n < 76:
		m.feed.read()
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
	if err := m.feed.tailer.step(); err != nil {
		m.faults++
		m.feed.tailer.recover(m.t.Context(), err)
	}
}

// take takes one delivery of a consumer, and reports false if it has none.
func (m *model) take(c *Consumer) bool {
	m.t.Helper()
	d, ok := c.Next(Limit{Events: 1 + m.rng.IntN(5), Bytes: 1 + m.rng.IntN(60)})
	if !ok {
		return false
	}
	i := slices.IndexFunc(m.watches, func(w *observed) bool { return w.Watch == d.Watch })
	if i < 0 {
		m.t.Fatalf("a delivery of watch %d, which was canceled", d.Watch.ID)
	}
	w := m.watches[i]
	w.got = append(w.got, eventsOf(&d)...)
	m.check(w, d.Position)
	stable := m.Stable()
	for _, e := range w.got {
		if e.epoch > stable {
			m.t.Fatalf("watch %d delivered %v, and %d is stable", w.ID, e, stable)
		}
	}
	if gap, is := errors.AsType[*GapError](d.Err); is {
		m.faults++
		m.closeGap(w, gap)
	}
	return true
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
	if err := m.log.TruncateBefore(m.Stable()/2 + 1); err != nil {
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
		for ; steps < 20_000 && m.feed.read(); steps++ {
			idle = 0
		}
		for _, c := range m.consumer {
			for ; m.take(c); steps++ {
				idle = 0
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
	if s := m.feed.Stats(); s.QueueBytes < 0 || s.Lagging+s.Difference > 0 {
		m.t.Fatalf("%+v", s)
	}
}
