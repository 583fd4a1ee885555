package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// allVersions reads a history in parts of random sizes.
func allVersions(t *testing.T, x *Session, o HistoryOptions, rng *rand.Rand) (list []KeyVersion, first History, err error) {
	t.Helper()
	for part := 0; ; part++ {
		o.Count, o.Bytes, o.Keep = 1+rng.IntN(6), 1+rng.IntN(1000), time.Minute
		h, err := x.History(t.Context(), &o)
		if err != nil {
			return list, first, err
		}
		if part == 0 {
			first = h
		}
		if list = append(list, h.Versions...); !h.More {
			return list, first, nil
		}
		last := list[len(list)-1]
		o.To, o.AfterKey, o.AfterEpoch = h.To, last.Key, last.Epoch
	}
}

// checkHistory compares the history between two random epochs with the model.
func (m *pastModel) checkHistory() {
	if len(m.epochs) == 0 {
		return
	}
	t, low := m.t, m.store.LowWatermark()
	x := mustSession(t, m.store)
	defer x.Close()
	at := func() keys.Epoch { return m.epochs[m.rng.IntN(len(m.epochs))] }
	from, to := at(), at()
	from, to = min(from, to), max(from, to)
	if m.rng.IntN(3) == 0 {
		from = 0
	}
	got, h, err := allVersions(t, x, HistoryOptions{From: from, To: to, Values: true}, m.rng)
	var gone *SnapshotGoneError
	if errors.As(err, &gone) && (from != 0 && from < low || to < low) {
		return
	}
	if err != nil {
		t.Fatalf("the history of (%d, %d], low watermark %d: %v", from, to, low, err)
	}
	for i := range got {
		m.checkVersion(&got[i], from, to)
	}
	shown := map[string]bool{}
	for i := range got {
		shown[fmt.Sprintf("%s@%d", got[i].Key, got[i].Epoch)] = true
	}
	for i, e := range m.epochs {
		for key := range 6 {
			name := fmt.Sprint("key", key)
			value, found := m.states[e][name]
			before, was := "", false
			if i > 0 {
				before, was = m.states[m.epochs[i-1]][name]
			}
			changed := value != before || found != was
			if e > max(from, h.Oldest) && e <= to && changed && !shown[fmt.Sprintf("%s@%d", name, e)] {
				t.Fatalf("%s of epoch %d is missing in the history of (%d, %d], all of which is kept since %d", name, e, from, to, h.Oldest)
			}
		}
	}
	m.checkBase(got, from, h.Oldest, shown)
}

// checkBase: without a begin, the history has the version that each key had at the oldest readable epoch.
func (m *pastModel) checkBase(got []KeyVersion, from, oldest keys.Epoch, shown map[string]bool) {
	if from != 0 {
		return
	}
	for key := range 6 {
		name, last, value := fmt.Sprint("key", key), keys.Epoch(0), ""
		for _, e := range m.epochs {
			now, found := m.states[e][name]
			if e > oldest {
				break
			}
			if now != value || !found {
				last, value = e, now
			}
			if !found {
				last = 0
			}
		}
		if last != 0 && !shown[fmt.Sprintf("%s@%d", name, last)] {
			m.t.Fatalf("the history has not the version of %s at epoch %d, where it begins; only %d versions", name, oldest, len(got))
		}
	}
}

// checkVersion compares a version with the model.
func (m *pastModel) checkVersion(v *KeyVersion, from, to keys.Epoch) {
	for i, e := range m.epochs {
		if e != v.Epoch {
			continue
		}
		value, found := m.states[e][string(v.Key)]
		switch {
		case e <= from || e > to:
			m.t.Fatalf("epoch %d is not in (%d, %d]", e, from, to)
		case found == v.Deleted || value != string(v.Value):
			m.t.Fatalf("%s at %d: %q, deleted %t; want %q", v.Key, e, v.Value, v.Deleted, value)
		case v.Time != 0 && v.Time < m.times[i], v.Logged && v.Time > m.store.Clock().Now(), v.Logged && v.Origin != batch.OriginClient:
			m.t.Fatalf("%s at %d: time %d, in the log %t, origin %d; it was committed at %d", v.Key, e, v.Time, v.Logged, v.Origin, m.times[i])
		case v.Logged && i+1 < len(m.times) && v.Time > m.times[i+1]:
			m.t.Fatalf("%s at %d: time %d is after that of the next commit, %d", v.Key, e, v.Time, m.times[i+1])
		}
		return
	}
	m.t.Fatalf("no commit has epoch %d of %s", v.Epoch, v.Key)
}

// allChanges reads a comparison in parts of random sizes.
func allChanges(t *testing.T, x *Session, o DiffOptions, rng *rand.Rand) (list []KeyChange, err error) {
	t.Helper()
	for {
		o.Count, o.Bytes, o.Keys, o.Keep = 1+rng.IntN(6), 1+rng.IntN(1000), 1+rng.IntN(6), time.Minute
		d, err := x.Diff(t.Context(), &o)
		if err != nil {
			return list, err
		}
		if list = append(list, d.Changes...); !d.More {
			return list, nil
		}
		o.To, o.After = d.To, d.Last
	}
}

// checkDiff compares what differs between two random epochs with the model.
func (m *pastModel) checkDiff() {
	if len(m.epochs) == 0 {
		return
	}
	t, low := m.t, m.store.LowWatermark()
	x := mustSession(t, m.store)
	defer x.Close()
	from, to := m.epochs[m.rng.IntN(len(m.epochs))], m.epochs[m.rng.IntN(len(m.epochs))]
	from, to = min(from, to), max(from, to)
	got, err := allChanges(t, x, DiffOptions{From: from, To: to, Values: true}, m.rng)
	var gone *SnapshotGoneError
	if errors.As(err, &gone) && from < low {
		return
	}
	if err != nil {
		t.Fatalf("what differs between %d and %d, low watermark %d: %v", from, to, low, err)
	}
	want := 0
	for key := range 6 {
		name := fmt.Sprint("key", key)
		before, was := m.states[from][name]
		after, is := m.states[to][name]
		if before != after || was != is {
			want++
		}
	}
	for i, c := range got {
		before, was := m.states[from][string(c.Key)]
		after, is := m.states[to][string(c.Key)]
		if was == c.Old.Deleted || before != string(c.Old.Value) || is == c.New.Deleted || after != string(c.New.Value) || before == after && was == is {
			t.Fatalf("%s between %d and %d: %q to %q; want %q to %q", c.Key, from, to, c.Old.Value, c.New.Value, before, after)
		}
		if i > 0 && bytes.Compare(got[i-1].Key, c.Key) >= 0 {
			t.Fatalf("%s after %s", c.Key, got[i-1].Key)
		}
	}
	if len(got) != want {
		t.Fatalf("%d keys differ between %d and %d; want %d", len(got), from, to, want)
	}
}

// checkDiffOfScans compares what differs between two snapshots with full scans at both of them.
func checkDiffOfScans(t *testing.T, from, to *Session, lower, upper []byte, rng *rand.Rand) {
	t.Helper()
	before, after := scanAll(t, from, lower, upper), scanAll(t, to, lower, upper)
	x := mustSession(t, to.store)
	defer x.Close()
	got, err := allChanges(t, x, DiffOptions{Lower: lower, Upper: upper, From: from.at, To: to.at, Values: true}, rng)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range got {
		key := string(c.Key)
		old, was := before[key]
		now, is := after[key]
		if was == c.Old.Deleted || was && old != (versionAt{c.Old.Epoch, string(c.Old.Value)}) || is == c.New.Deleted || is && now != (versionAt{c.New.Epoch, string(c.New.Value)}) {
			t.Fatalf("%.20q differs between %d and %d as %+v; want %t %d, %t %d", key, from.at, to.at, c, was, old.epoch, is, now.epoch)
		}
		if old == now {
			t.Fatalf("%.20q is the same at %d and at %d", key, from.at, to.at)
		}
		delete(before, key)
		delete(after, key)
	}
	for key, v := range before {
		if after[key] != v {
			t.Fatalf("%.20q is missing in what differs between %d and %d", key, from.at, to.at)
		}
		delete(after, key)
	}
	for key := range after {
		t.Fatalf("%.20q, which is new, is missing in what differs between %d and %d", key, from.at, to.at)
	}
}

// TestTheStateAtATimeHasTheCommitsJustAfterASample: a commit between the epoch of a sample and the time of the sample, which is
// rounded up, belongs to the states at later times, whenever they are read.
func TestTheStateAtATimeHasTheCommitsJustAfterASample(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Retention = time.Hour
		s := mustOpen(t, o)
		x := mustSession(t, s)
		defer x.Close()
		mustPut(t, s, "k", "old")
		time.Sleep(1500 * time.Millisecond)
		sample, err := s.sample(t.Context(), x)
		if err != nil {
			t.Fatal(err)
		}
		s.timeline.apply(sample, &nextRecords{add: true})
		time.Sleep(300 * time.Microsecond)
		e := mustPut(t, s, "k", "new")
		at := sample.at - 1
		if s.Clock().Now() > at {
			t.Fatalf("the commit is not before the time of the sample, %d", sample.at)
		}
		for range 5 {
			time.Sleep(3 * time.Second)
			mustPut(t, s, "k", "newest")
			if got, err := s.EpochAt(t.Context(), at); err != nil || got != e {
				t.Fatalf("the state is of epoch %d, %v; want %d", got, err, e)
			}
		}
	})
}

// TestTheStateWhileTheStoreWasClosedIsThatOfItsEnd: the commits between the last sample and the end have no sample when the store
// is opened again, and the log does not have them any more. They are in the state of every time after them nevertheless.
func TestTheStateWhileTheStoreWasClosedIsThatOfItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Retention = time.Hour
		s := mustOpen(t, o)
		var last keys.Epoch
		for round := range 3 {
			time.Sleep(1200 * time.Millisecond) // a sample is taken
			last = mustPut(t, s, "k", fmt.Sprint(round))
			before := s.Clock().Now()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Minute)
			s = mustOpen(t, o)
			for i := range 50 { // the segments of before are given up
				mustPut(t, s, "l", fmt.Sprintf("%d %01000d", i, 0))
			}
			mustCheckpoint(t, s)
			at := before + uint64(5*time.Minute/time.Microsecond)
			if got, err := s.EpochAt(t.Context(), at); err != nil || got != last {
				t.Fatalf("round %d: the state while the store was closed is of epoch %d, %v; want %d; the log begins at %d", round, got, err, last, s.engine.OldestLogEpoch())
			}
		}
		if s.engine.OldestLogEpoch() <= last {
			t.Error("the log has the commits: the test tests nothing")
		}
	})
}

// markEvery makes marks come after each so many bytes.
func (s *Store) markEvery(bytes int64) {
	s.timeline.marks.mu.Lock()
	defer s.timeline.marks.mu.Unlock()
	s.timeline.marks.every = bytes
}

// markedStore is a store with marks at every 64 KiB of its log, in one segment.
func markedStore(t *testing.T) (*Store, *Session) {
	t.Helper()
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.Storage.MemoryBytes = 16<<20, 16<<20, 64<<20
	o.Retention = time.Hour
	s := mustOpen(t, o)
	s.markEvery(64 << 10)
	return s, mustSession(t, s)
}

func (s *Store) mustPutMarked(t *testing.T, x *Session, key, value string) keys.Epoch {
	t.Helper()
	e, err := put(x, key, value, DurabilityAsync)
	if err != nil {
		t.Fatal(err)
	}
	s.markLog(t.Context(), x) // as the timeline does eight times a second
	return e
}

// awaitTick waits until the clock, which shows milliseconds, goes on, and returns its time.
func awaitTick(s *Store) uint64 {
	for now := s.Clock().Now(); ; {
		if next := s.Clock().Now(); next != now {
			return next
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// TestReadsAtATimeReadLittleOfTheLog: of a log of some megabytes, only what is between two marks, and what a reader reads ahead.
func TestReadsAtATimeReadLittleOfTheLog(t *testing.T) {
	s, x := markedStore(t)
	defer x.Close()
	type point struct {
		at          uint64
		epoch, next keys.Epoch // of the put before it and of the one after it; the timeline may commit between them
	}
	var points []point
	value := string(make([]byte, 4<<10))
	for i := range 800 {
		e := s.mustPutMarked(t, x, "k", value)
		if i%100 == 51 {
			points[len(points)-1].next = e
		}
		if i%100 != 50 {
			continue
		}
		points = append(points, point{at: awaitTick(s), epoch: e})
		awaitTick(s) // later commits have later times
	}
	mustPut(t, s, "k", "last")
	const bound = 64<<10 + 512<<10 // the distance of marks, and twice what a reader reads at once
	for _, p := range points {
		before := s.Stats().History.LogBytes
		if got, err := s.EpochAt(t.Context(), p.at); err != nil || got < p.epoch || got >= p.next {
			t.Fatalf("%d, %v; want an epoch from %d to before %d", got, err, p.epoch, p.next)
		}
		if read := s.Stats().History.LogBytes - before; read > bound {
			t.Fatalf("%d bytes of the log were read to find a time; want at most %d", read, bound)
		}
	}
}

// TestTheHistoryOfAKeyReadsLittleOfTheLog: times and origins of its commits come from around them, not from all that was logged
// between them.
func TestTheHistoryOfAKeyReadsLittleOfTheLog(t *testing.T) {
	s, x := markedStore(t)
	defer x.Close()
	value := string(make([]byte, 4<<10))
	for i := range 1000 {
		if i%400 == 10 {
			s.mustPutMarked(t, x, "k", "v")
		}
		s.mustPutMarked(t, x, "other", value)
	}
	h, err := x.History(t.Context(), &HistoryOptions{Lower: []byte("k"), Upper: []byte("l"), Count: 10, Bytes: 1 << 20})
	if err != nil || len(h.Versions) != 3 {
		t.Fatalf("%d versions, %v", len(h.Versions), err)
	}
	for _, v := range h.Versions {
		if !v.Logged || v.Time == 0 {
			t.Errorf("epoch %d: %+v is not described", v.Epoch, v)
		}
	}
	const bound = 3 * (64<<10 + 512<<10)
	if read := s.Stats().History.LogBytes; read > bound {
		t.Fatalf("%d bytes of the log were read for three commits; want at most %d", read, bound)
	}
}

// TestALongHistoryIsReadInParts: of a key with many versions in a memtable every version is shown once, newest first, and no part
// walks over all of them for each version.
func TestALongHistoryIsReadInParts(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.Storage.MemoryBytes = 8<<20, 8<<20, 64<<20
	o.Retention = time.Hour
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	const versions = 3000
	for i := range versions {
		if _, err := put(x, "k", fmt.Sprint(i), DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	opts := HistoryOptions{Values: true, Count: 700, Bytes: 1 << 20, Keep: time.Minute}
	next := versions - 1
	for parts := 1; ; parts++ {
		h, err := x.History(t.Context(), &opts)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range h.Versions {
			if string(v.Value) != fmt.Sprint(next) {
				t.Fatalf("%s of epoch %d; want %d", v.Value, v.Epoch, next)
			}
			next--
		}
		if !h.More {
			if next != -1 || parts != 5 {
				t.Fatalf("%d parts, the last version is %d", parts, next+1)
			}
			return
		}
		last := h.Versions[len(h.Versions)-1]
		opts.To, opts.AfterKey, opts.AfterEpoch = h.To, last.Key, last.Epoch
	}
}

// TestAHistoryThatIsBeingReadIsKept, and nothing is after it.
func TestAHistoryThatIsBeingReadIsKept(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x, y := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer y.Close()
	first := mustPut(t, s, "k", "0")
	if _, err := x.keepVersions(first); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		mustPut(t, s, "k", fmt.Sprint(i+1))
	}
	s.collector.collect(nil, true)
	mustCheckpoint(t, s)
	if got, _, err := allVersions(t, y, HistoryOptions{}, rand.New(rand.NewPCG(1, 1))); err != nil || len(got) != 21 {
		t.Fatalf("%d versions, %v", len(got), err)
	}
	if len(s.Holds()) != 0 {
		t.Fatal("a read is listed as a hold")
	}
	x.endKeeping()
	s.collector.collect(nil, true)
	mustPut(t, s, "k", "last")
	s.collector.collect(nil, true)
	if _, _, err := allVersions(t, y, HistoryOptions{From: first}, rand.New(rand.NewPCG(1, 1))); !errors.As(err, new(*SnapshotGoneError)) {
		t.Fatal(err)
	}
}

// TestTheServerIsToldWhichHoldsEnded at their deadlines, and not of those that their owners ended.
func TestTheServerIsToldWhichHoldsEnded(t *testing.T) {
	testseed.SkipUnderRace(t)
	synctest.Test(t, func(t *testing.T) {
		s := mustOpen(t, tiny(vfs.NewMem()))
		x := mustSession(t, s)
		defer x.Close()
		mustPut(t, s, "k", "v")
		for i := range 40 {
			h, err := x.TakeHold(t.Context(), fmt.Sprint("owner ", i), 0, time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if i == 39 {
				if _, err := x.EndHold(t.Context(), h.ID); err != nil {
					t.Fatal(err)
				}
			}
		}
		time.Sleep(2 * time.Minute)
		list, total := s.EndedHolds(0)
		if total != 39 || len(list) != endedHoldsMax || len(s.Holds()) != 0 {
			t.Fatalf("%d of %d ended, %d are there", len(list), total, len(s.Holds()))
		}
		if list, _ := s.EndedHolds(total); len(list) != 0 {
			t.Fatalf("%v are told again", list)
		}
	})
}

// TestAHistoryNeedsMoreThanTheSnapshotOfAnotherReader: the snapshot at its begin is readable, but versions after it are gone.
func TestAHistoryNeedsMoreThanTheSnapshotOfAnotherReader(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x, other := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer other.Close()
	first := mustPut(t, s, "k", "0")
	mustSnapshot(t, other)
	for i := range 20 {
		mustPut(t, s, "k", fmt.Sprint(i+1))
	}
	s.collector.collect(nil, true)
	if _, err := x.Diff(t.Context(), &DiffOptions{From: first, Count: 1, Keys: 1}); err != nil {
		t.Fatalf("the snapshot is not readable: %v", err)
	}
	if h, err := x.History(t.Context(), &HistoryOptions{From: first, Count: 100}); !errors.As(err, new(*SnapshotGoneError)) {
		t.Fatalf("%d versions, %v; want that versions after epoch %d are gone", len(h.Versions), err, first)
	}
	if h, err := x.History(t.Context(), &HistoryOptions{To: first, Count: 100}); !errors.As(err, new(*SnapshotGoneError)) {
		t.Fatalf("%d versions, %v; want that versions up to epoch %d are gone", len(h.Versions), err, first)
	}
}

// TestAHistoryEndsWithTheVersionWhereItBegan, although the floor rises between two parts: what is before it may have lost versions.
func TestAHistoryEndsWithTheVersionWhereItBegan(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x, keeper, later := mustSession(t, s), mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer keeper.Close()
	defer later.Close()
	var at []keys.Epoch
	for i := range 6 {
		at = append(at, mustPut(t, s, "k", fmt.Sprint(i)))
		if i == 0 {
			if _, err := keeper.keepVersions(at[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	o := HistoryOptions{To: at[5], Values: true, Count: 2, Bytes: 1 << 20, Keep: time.Minute}
	h, err := x.History(t.Context(), &o)
	if err != nil || len(h.Versions) != 2 || !h.More {
		t.Fatal(h, err)
	}
	if _, err := later.keepVersions(at[4]); err != nil { // whose version was the last one of the part
		t.Fatal(err)
	}
	keeper.endKeeping() // the collector may look at any time
	mustPut(t, s, "l", "")
	s.collector.collect(nil, true)
	o.AfterKey, o.AfterEpoch = h.Versions[1].Key, h.Versions[1].Epoch
	if h, err = x.History(t.Context(), &o); err != nil || h.Oldest != at[4] || len(h.Versions) != 0 || h.More {
		t.Fatalf("%+v, %v; want no version after that of epoch %d, at which the history begins", h, err, at[4])
	}
}

// TestAComparisonOfBriefKeysIsMadeInParts: keys that were made and deleted between the states do not differ, but reading them is
// work, which each part bounds.
func TestAComparisonOfBriefKeysIsMadeInParts(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Retention = time.Hour
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	from := mustPut(t, s, "a", "")
	for i := range 10 {
		mustPut(t, s, fmt.Sprint("brief", i), "")
		w := &Write{}
		w.Delete(fmt.Append(nil, "brief", i))
		if _, err := commitAndWait(x, w); err != nil {
			t.Fatal(err)
		}
	}
	to := mustPut(t, s, "z", "")
	opts := DiffOptions{From: from, To: to, Count: 100, Bytes: 1 << 20, Keys: 4, Keep: time.Minute}
	parts, got := 0, []string{}
	for ; parts < 20; parts++ {
		d, err := x.Diff(t.Context(), &opts)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range d.Changes {
			got = append(got, string(c.Key))
		}
		if opts.After = d.Last; !d.More {
			break
		}
	}
	if parts != 2 || len(got) != 1 || got[0] != "z" {
		t.Fatalf("%q after %d parts; want z after 2", got, parts)
	}
}
