package feed

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestNothingDeliveredIsLostInACrash crashes the file system in the middle of a run of the model, and continues every watch
// at its position on what is left: before and after the crash it has delivered the filter of the history.
func TestNothingDeliveredIsLostInACrash(t *testing.T) {
	for i := range 15 {
		seed := testseed.Base(t) + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m := &model{store: newStore(t, wal.SegmentBytesMin), rng: rngOf(seed)}
			m.open(3)
			for range 300 {
				m.step()
			}
			var at []Position
			for _, w := range m.watches {
				at = append(at, w.Info().Position)
				m.check(w, at[len(at)-1])
			}
			m.feed.Close()
			m.crash(seed)
			m.open(1)
			defer m.feed.Close()
			for i, w := range m.watches {
				w.consumer = m.consumer[0]
				w.Watch = mustWatch(t, w.consumer, WatchOptions{After: at[i], Kinds: w.kinds, Origins: w.origins, Ranges: clientRanges(w.ranges)})
			}
			m.commit(batch.Header{}, set("a", "after the crash"))
			m.finish()
		})
	}
}

// crash replaces the store by what a crash leaves of it, and the model's commits by those that are left.
func (m *model) crash(seed uint64) {
	m.t.Helper()
	stable := m.Stable()
	m.fs, m.pending = m.fs.Crash(seed, vfs.SurviveSome), nil
	left := map[keys.Epoch]bool{}
	after := m.tree
	if n := len(m.loaded); n > 0 { // the tree has a bulk load
		after = max(after, m.loaded[n-1].Epoch)
	}
	loaded := m.loaded
	m.loaded = nil
	m.reopen(after, func(c wal.Commit) { left[c.Epoch] = true })
	m.loaded, m.from = loaded, 0 // as if they were known
	m.commits = slices.DeleteFunc(m.commits, func(c change) bool { return c.epoch > after && !left[c.epoch] })
	if n := len(m.commits); n > 0 && m.commits[n-1].epoch < stable && stable-m.commits[n-1].epoch > 1 && after < stable {
		for e := m.commits[n-1].epoch + 1; e <= stable; e++ { // only no-op records may be missing
			if slices.ContainsFunc(m.commits, func(c change) bool { return c.epoch == e }) {
				m.t.Fatalf("epoch %d is lost, and %d was stable", e, stable)
			}
		}
	}
}

// TestStableIsVisibleAndDurable: what is only one of both is delivered by none.
func TestStableIsVisibleAndDurable(t *testing.T) {
	s := newStore(t, wal.SegmentBytesMin)
	f := New(s, Options{manual: true})
	defer f.Close()
	c := f.NewConsumer("client")
	mustWatch(t, c, WatchOptions{Now: true})
	first, second := s.append(batch.Header{}, set("a", "1")), s.append(batch.Header{}, set("b", "2"))
	s.show(second)
	mustStep(t, f)
	if d, ok := c.Next(Limit{}); ok {
		t.Fatalf("%+v is visible and not durable", d)
	}
	s.flush(second)
	mustStep(t, f)
	if d, ok := c.Next(Limit{}); !ok || len(d.Parts) != 2 || d.Position.Epoch != second || first+1 != second {
		t.Fatalf("%+v", d)
	}
	third := s.append(batch.Header{}, set("c", "3"))
	s.flush(third)
	mustStep(t, f)
	if d, ok := c.Next(Limit{}); ok {
		t.Fatalf("%+v is durable and not visible", d)
	}
}

func mustStep(t testing.TB, f *Feed) {
	t.Helper()
	if err := f.tailer.step(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestDamageEndsInAGap: the tailer finds damage in the log while memory still has the commits.
func TestDamageEndsInAGap(t *testing.T) {
	s := newStore(t, wal.SegmentBytesMin)
	f := New(s, Options{})
	defer f.Close()
	c := f.NewConsumer("client")
	w := mustWatch(t, c, WatchOptions{Now: true})
	last := s.commit(batch.Header{}, set("a", "delivered"))
	if d := take(t, c); d.Position.Epoch != last {
		t.Fatalf("%+v", d)
	}
	lagging := mustWatch(t, f.NewConsumer("another"), WatchOptions{After: Position{Epoch: 0}})
	bad := s.append(batch.Header{}, set("b", "damaged"))
	for i := range 200 { // into the next segments: later writes in its page would repair it
		s.append(batch.Header{}, set("c", fmt.Sprint(i)))
	}
	s.flush(bad + 200)
	s.damage(bad)
	s.show(bad + 200)
	d := take(t, c)
	gap, ok := errors.AsType[*GapError](d.Err)
	if !ok || d.State != StateNeedsDifference || gap.After.Epoch != last || gap.ResumeAt < bad || gap.Cause == nil || s.secured == 0 {
		t.Fatalf("%+v, %v", d, d.Err)
	}
	if _, ok := w.Progress(); ok {
		t.Fatal("progress over a gap")
	}
	stable := s.Stable()
	if err := w.Resume(stable); err != nil {
		t.Fatal(err)
	}
	next := s.commit(batch.Header{}, set("d", "after the difference"))
	if d := take(t, c); d.Position.Epoch != next || len(d.Parts) != 1 {
		t.Fatalf("%+v", d)
	}
	for {
		d := take(t, lagging.consumer)
		if d.State == StateNeedsDifference {
			break
		}
		if d.Position.Epoch >= bad {
			t.Fatalf("at %v without a gap", d.Position)
		}
	}
	if st := f.Stats(); st.Damage == nil || st.Gaps < 2 {
		t.Fatalf("%+v", st)
	}
}

// TestARecordThatIsNoBatchIsAGap: its checksum is right, so that only decoding it tells. What comes before it is delivered.
func TestARecordThatIsNoBatchIsAGap(t *testing.T) {
	s := newStore(t, wal.SegmentBytesMin)
	before := s.commit(batch.Header{}, set("a", "before"))
	bad := s.record([]byte("no batch"))
	for i := range 200 {
		s.append(batch.Header{}, set("c", fmt.Sprint(i)))
	}
	s.flush(bad + 200)
	s.show(bad + 200)
	f := New(s, Options{manual: true})
	defer f.Close()
	c := f.NewConsumer("client")
	mustWatch(t, c, WatchOptions{})
	if !f.read() {
		t.Fatal("no reader")
	}
	if d, ok := c.Next(Limit{}); !ok || d.Position.Epoch != before || len(d.Parts) != 1 {
		t.Fatalf("%+v, %v", d, ok)
	}
	d, _ := c.Next(Limit{})
	if gap, ok := errors.AsType[*GapError](d.Err); !ok || gap.After.Epoch != before || gap.ResumeAt < bad || !errors.Is(d.Err, batch.ErrCorrupt) {
		t.Fatalf("%+v, %v", d, d.Err)
	}
}

// damage flips a byte of the record of an epoch.
func (s *store) damage(e keys.Epoch) {
	s.t.Helper()
	segments, err := wal.Segments(s.fs, "data")
	if err != nil {
		s.t.Fatal(err)
	}
	for _, segment := range segments {
		at := int64(0)
		if err := wal.ReadSegment(s.fs, segment, func(r wal.Record) error {
			if r.Epoch == e && r.HoldsEpoch() {
				at = r.Offset + 30
			}
			return nil
		}); err != nil {
			s.t.Fatal(err)
		}
		if at == 0 {
			continue
		}
		f, err := s.fs.Open(segment.File, vfs.ReadWrite)
		if err != nil {
			s.t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt([]byte{0xff, 0xee}, at); err != nil {
			s.t.Fatal(err)
		}
		return
	}
	s.t.Fatalf("no record of epoch %d", e)
}

// TestTruncatedPositionIsAGap: a watch that begins before the log is told so, and can go on where the log begins.
func TestTruncatedPositionIsAGap(t *testing.T) {
	s := newStore(t, wal.SegmentBytesMin)
	for i := range 200 {
		s.commit(batch.Header{}, set("a", fmt.Sprint(i)))
	}
	if err := s.log.TruncateBefore(150); err != nil {
		t.Fatal(err)
	}
	f := New(s, Options{})
	defer f.Close()
	c := f.NewConsumer("client")
	w := mustWatch(t, c, WatchOptions{After: Position{Epoch: 10}})
	d := take(t, c)
	gap, ok := errors.AsType[*GapError](d.Err)
	if !ok || gap.After.Epoch != 10 || gap.Cause != nil || gap.Oldest != f.Oldest() || gap.ResumeAt != gap.Oldest-1 {
		t.Fatalf("%+v, %v", d, d.Err)
	}
	if err := w.Resume(gap.ResumeAt); err != nil {
		t.Fatal(err)
	}
	var got []event
	for deadline := time.Now().Add(20 * time.Second); len(got) < int(200-gap.ResumeAt) && time.Now().Before(deadline); {
		d := take(t, c)
		got = append(got, eventsOf(&d)...)
	}
	if want := s.wanted(&w.filter, Position{Epoch: gap.ResumeAt}); !slices.Equal(got, want) {
		t.Fatalf("%d events, want %d", len(got), len(want))
	}
}
