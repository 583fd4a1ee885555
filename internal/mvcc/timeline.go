package mvcc

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// timeline is what a store knows of when its epochs were, and from which epoch on it keeps all versions of user data: the
// floor. Both are records of the store, so that a restart does not end the retention.
//
// Invariants:
//   - Every commit up to the epoch of a sample has a commit time that is not after the time of the sample.
//   - The floor never falls, and is recorded durably before the collector uses it.
//   - While a record of the floor or of a hold may exist that damaged pages hide, every version is kept: the next start may read the record. See keepHidden.
//   - The floor does not rise above a hold, and the GC low watermark does not rise above the floor.
type timeline struct {
	keep     time.Duration // how long past epochs stay readable
	bytesMax uint64        // how much may be logged since the floor; zero: any amount
	every    time.Duration // between samples
	// markEvery is how often it is looked whether so much was logged that a mark is worth having.
	markEvery time.Duration
	marks     logMarks

	removed []keys.EpochRange // by repairs of the log, ascending; constant after Open

	floor atomic.Uint64 // MaxEpoch if nothing is kept

	mu      sync.Mutex // guards what follows; taken after the collector's
	samples []timeSample
	holds   map[uint64]*Hold
	untold  map[uint64]untoldHold
	reads   map[*Session]keys.Epoch // from which on a session needs all versions
	ended   []Hold                  // the last that ended at their deadlines, at most endedHoldsMax
	expired uint64                  // how many did

	logRead atomic.Uint64 // bytes of the log that were read to find commits

	turn     chan struct{} // holds a token of the goroutine that changes the record of a hold
	logReads turnLine      // of goroutines that read a part of the log
	searches turnLine      // of those that may read all of it

	recording
}

// recording is what has been recorded. The goroutine that records owns it.
type recording struct {
	records chan struct{} // holds a token of that goroutine, once the store is open

	own      keys.Epoch // of its last commit
	settled  keys.Epoch // every commit after the newest sample up to it is its own: no reason for another sample
	pending  keys.Epoch // the floor of that commit, which is not in force yet; zero if there is none
	recorded bool       // there is a record of the floor
	unread   bool       // there may be one that a damaged page hides, until the floor is recorded again, or removed

	unrecorded map[keys.Epoch]keys.Epoch // records of removed epochs that a start could not write; see changedRanges
	hidden     bool                      // damaged pages hide records of holds, which have to be ended; see endHidden
}

// timeSample says that no commit up to an epoch is later than a time.
type timeSample struct {
	at    uint64 // microseconds since 1970; whole milliseconds, but for a bulk load, which has its time
	epoch keys.Epoch
	bytes uint64 // how much had been logged since Open
	noted bool   // it has no record yet
}

// newSample is a sample of a time, rounded up to what a record has.
func newSample(at uint64, e keys.Epoch) timeSample {
	return timeSample{at: (at/1000 + 1) * 1000, epoch: e}
}

const (
	sampleEvery    = time.Second
	samplesMax     = 100_000 // 2.4 MB; a retention of more than 27 hours is sampled more coarsely
	looksPerSample = 8       // for marks
	samplesMin     = 16      // a shorter retention than 16 seconds is sampled more finely
	// droppedAtOnce is how many records of samples a commit removes: more than it adds.
	droppedAtOnce = 64
	// logReadsMax bounds the reads at a time, and histories, that read the log at once: each reads up to some segments of it. Clients have turns.
	logReadsMax = 2
)

// floorKey is the key of the record of the floor.
var floorKey = []byte{keys.SystemRetention, byte(keys.SpaceUser)}

func (s *timeSample) key() []byte {
	return binary.BigEndian.AppendUint64([]byte{keys.SystemTimeSample}, s.millisecond())
}

func (s *timeSample) millisecond() uint64 { return (s.at + 999) / 1000 }

func (t *timeline) init(o *Options) {
	t.keep, t.bytesMax, t.holds, t.untold, t.reads = o.Retention, uint64(o.RetentionBytes), map[uint64]*Hold{}, map[uint64]untoldHold{}, map[*Session]keys.Epoch{}
	t.turn, t.records = make(chan struct{}, 1), make(chan struct{}, 1)
	t.logReads.init(o.Owner, logReadsMax)
	t.searches.init(o.Owner, 1)
	t.every = max(min(sampleEvery, t.keep/samplesMin), t.keep/samplesMax, time.Millisecond)
	t.marks.every = markEveryBytes
	t.markEvery = max(t.every/looksPerSample, time.Millisecond)
	if t.keep == 0 {
		t.every, t.markEvery = sampleEvery, sampleEvery // to end holds, and for marks
	}
	t.floor.Store(uint64(keys.MaxEpoch))
}

// open reads the records. A damaged page among them must not keep the store from starting: then the past is not readable, and
// there may be a record of the floor, which must not outlive what it keeps.
func (t *timeline) open(ctx context.Context, x *Session) error {
	floor, found := keys.Epoch(0), false
	visit := func(key, value []byte, _ keys.Epoch) bool {
		switch {
		case string(key) == string(floorKey) && len(value) == 8:
			floor, found = keys.Epoch(binary.LittleEndian.Uint64(value)), true
		case key[0] == keys.SystemTimeSample && len(key) == 9 && len(value) == 8:
			t.openSample(timeSample{at: binary.BigEndian.Uint64(key[1:]) * 1000, epoch: keys.Epoch(binary.LittleEndian.Uint64(value))})
		}
		return true
	}
	if err := t.openHolds(ctx, x); err != nil {
		return fmt.Errorf("the records of holds: %w", err)
	}
	err := x.ScanSystem(ctx, floorKey, append(floorKey, 0), visit)
	err = errors.Join(err, x.ScanSystem(ctx, []byte{keys.SystemTimeSample}, []byte{keys.SystemTimeSample + 1}, visit))
	damaged := errors.Is(err, storage.ErrDamaged)
	switch {
	case damaged:
		t.samples, found = nil, false
	case err != nil:
		return fmt.Errorf("the records of the history: %w", err)
	}
	t.adopt(floor, found, damaged, x.store.Visible())
	if x.store.FeatureLevel() < keys.FeatureLevelHistory { // there are no such records
		t.unread, t.hidden = false, false
	}
	x.store.keepHidden()
	return nil
}

// hides reports whether there may be records of the floor or of holds that this start could not read. That ends when it is durable that they mean nothing.
func (r *recording) hides() bool { return r.unread || r.hidden }

// keepHidden lets every version be kept while records are hidden. What they keep is not readable in this run, but if merges dropped any of it, a later start
// that reads the records would promise what is gone.
func (s *Store) keepHidden() { s.registry.KeepAll(s.timeline.hides()) }

// openSample adds a sample that was recorded. A bulk load that was published between the epoch and the time of a sample has its
// own before it.
func (t *timeline) openSample(sample timeSample) {
	if n := len(t.samples); n > 0 {
		sample.epoch = max(sample.epoch, t.samples[n-1].epoch)
	}
	t.samples = append(t.samples, sample)
}

// adopt makes the floor that was read that of the store. Of damaged records it is not known whether there is one.
func (t *timeline) adopt(floor keys.Epoch, found, damaged bool, visible keys.Epoch) {
	t.unread = damaged
	if t.recorded = found || damaged; t.recorded || t.keep > 0 {
		t.floor.Store(uint64(visible))
	}
	if found && floor <= visible {
		t.floor.Store(uint64(floor))
	}
}

// retained is the smallest epoch that the retention and the holds keep readable.
func (t *timeline) retained() keys.Epoch {
	t.mu.Lock()
	defer t.mu.Unlock()
	return min(keys.Epoch(t.floor.Load()), t.heldLocked())
}

// runTimeline records samples and the floor, and marks the log, until ctx ends.
func (s *Store) runTimeline(ctx context.Context, x *Session) {
	var next time.Time
	everyTick(ctx, s.timeline.markEvery, func() {
		if now := time.Now(); !now.Before(next) {
			next = now.Add(s.timeline.every - s.timeline.markEvery/2)
			_ = s.advanceTimeline(ctx, x) // the next sample tries again; until then more is kept
		}
		s.markLog(ctx, x)
	})
}

// advanceTimeline takes a sample if there were commits since the last one, moves the floor, and records both.
func (s *Store) advanceTimeline(ctx context.Context, x *Session) error {
	t := &s.timeline
	if err := t.beginRecording(ctx); err != nil {
		return err
	}
	defer t.endRecording()
	if t.pending != 0 && s.Durable() >= t.own {
		t.floor.Store(uint64(t.pending))
		t.pending, t.unread = 0, false
		s.keepHidden()
	}
	if err := errors.Join(s.recordRemoved(ctx, x), s.endHidden(ctx, x), s.endHolds(ctx, x)); err != nil {
		return err
	}
	if t.keep == 0 {
		return s.endRetention(ctx, x)
	}
	sample, err := s.sample(ctx, x)
	if err != nil {
		return err
	}
	next := t.next(sample)
	if !next.add && len(next.noted) == 0 && next.floor == keys.Epoch(t.floor.Load()) && !t.unread || t.pending != 0 {
		return nil
	}
	if s.FeatureLevel() < keys.FeatureLevelHistory { // a restart ends the retention
		t.floor.Store(uint64(next.floor))
		t.apply(sample, &next)
		return nil
	}
	w := &Write{Durability: DurabilityAsync, Origin: batch.OriginCleanup}
	w.SetOwn()
	next.record(w, sample)
	epoch, err := x.Commit(ctx, w)
	if err != nil {
		return err
	}
	t.apply(sample, &next)
	t.committed(epoch, sample, &next)
	return nil
}

// committed is called with the epoch of the commit that records a sample, and the floor. Another commit may have come between the epoch
// of the sample and this one: the next sample has it.
func (t *timeline) committed(epoch keys.Epoch, sample timeSample, next *nextRecords) {
	t.own, t.pending, t.recorded = epoch, next.floor, true
	if next.covered && epoch == sample.epoch+1 {
		t.settled = epoch
	}
}

func (w *Write) recordSample(sample timeSample) {
	w.Batch.SetRecord(keys.SpaceSystem, sample.key(), binary.LittleEndian.AppendUint64(nil, uint64(sample.epoch)))
}

func (w *Write) recordFloor(floor keys.Epoch) {
	w.Batch.SetRecord(keys.SpaceSystem, floorKey, binary.LittleEndian.AppendUint64(nil, uint64(floor)))
}

// sample is one of now. The time is taken last, so that all commits up to the epoch have theirs.
func (s *Store) sample(ctx context.Context, x *Session) (timeSample, error) {
	reserved := s.engine.Reserved()
	err := s.watermark.wait(ctx, reserved, x.parker)
	sample := newSample(s.clock.Now(), reserved)
	sample.bytes = s.engine.LoggedBytes()
	return sample, err
}

// nextRecords is what is to be recorded beside a sample.
type nextRecords struct {
	add     bool // the sample is worth adding
	covered bool // there is a sample then that has every commit up to this one but the timeline's own
	floor   keys.Epoch
	drop    int          // how many samples, of the oldest, are not needed any more
	removed []timeSample // of these, those that may have a record
	noted   []timeSample // that have no record yet
}

func (n *nextRecords) record(w *Write, sample timeSample) {
	for _, old := range n.noted {
		w.recordSample(old)
	}
	for _, old := range n.removed {
		w.Batch.DeleteRecord(keys.SpaceSystem, old.key())
	}
	if n.add {
		w.recordSample(sample)
	}
	w.recordFloor(n.floor)
}

// next says whether a sample is worth adding, where the floor belongs, and which samples are not needed any more.
func (t *timeline) next(sample timeSample) (out nextRecords) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(t.samples)
	out.add = sample.epoch > t.settled && (n == 0 || sample.at > t.samples[n-1].at && sample.epoch > t.samples[n-1].epoch)
	out.covered = out.add || sample.epoch == t.settled || n > 0 && sample.epoch == t.samples[n-1].epoch
	out.floor = keys.Epoch(t.floor.Load())
	limit, keep, held := sample.at-min(sample.at, uint64(t.keep.Microseconds())+1000), 0, t.heldLocked()
	for i := range t.samples { // a hold may keep very many
		old := &t.samples[i]
		tooMuch := t.bytesMax > 0 && sample.bytes > old.bytes+t.bytesMax
		if old.at > limit && !tooMuch {
			break
		}
		out.floor, keep = max(out.floor, min(old.epoch, held)), i
	}
	for keep > 0 && t.samples[keep].epoch > min(out.floor, held) { // a hold needs older ones
		keep--
	}
	out.drop = min(keep, droppedAtOnce)
	t.changedLocked(sample, &out)
	return out
}

// changedLocked finds the samples whose records change. Of several samples in one millisecond, the last one has the record.
func (t *timeline) changedLocked(sample timeSample, out *nextRecords) {
	for i := range t.samples {
		old, next := &t.samples[i], &sample
		if i+1 < len(t.samples) {
			next = &t.samples[i+1]
		}
		switch {
		case i+1 == len(t.samples) && !out.add: // no other one is after it
		case old.millisecond() == next.millisecond():
			continue
		}
		switch {
		case i < out.drop:
			out.removed = append(out.removed, *old)
		case old.noted && len(out.noted) < droppedAtOnce:
			out.noted = append(out.noted, *old)
		}
	}
}

func (t *timeline) apply(sample timeSample, next *nextRecords) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.samples = slices.Delete(t.samples, 0, next.drop)
	for i := range t.samples {
		t.samples[i].noted = t.samples[i].noted && !slices.Contains(next.noted, t.samples[i])
	}
	if n := len(t.samples); next.add && (n == 0 || t.samples[n-1].epoch < sample.epoch) { // else a bulk load was noted meanwhile
		t.samples = append(t.samples, sample)
	}
}

// endRetention removes the records of an earlier run with a retention, after which nothing past is kept.
func (s *Store) endRetention(ctx context.Context, x *Session) error {
	t := &s.timeline
	if !t.recorded {
		return nil
	}
	w := &Write{Durability: DurabilitySync, Origin: batch.OriginCleanup}
	w.SetOwn()
	for _, old := range t.samples {
		w.Batch.DeleteRecord(keys.SpaceSystem, old.key())
	}
	w.Batch.DeleteRecord(keys.SpaceSystem, floorKey)
	if _, err := x.commitDurably(ctx, w); err != nil {
		return err
	}
	t.mu.Lock()
	t.samples, t.recorded, t.unread = nil, false, false
	t.mu.Unlock()
	t.floor.Store(uint64(keys.MaxEpoch))
	s.keepHidden()
	return nil
}

// recordStart records the floor when a store with a retention is opened, so that a crash from now on does not end the retention, and
// a sample of what it was opened with, at the time of the newest commit: the commits between the last sample and the stop are those
// of any time after them, however long the store was closed. If that is not possible now, advanceTimeline records the floor.
func (s *Store) recordStart(ctx context.Context) {
	t := &s.timeline
	if t.keep == 0 {
		if t.unread {
			_ = s.endRetention(ctx, s.probe) // now: a later start may read the record, and merges drop what it seems to keep
		}
		return
	}
	t.noteTree(&s.recovery)
	sample := newSample(cmp.Or(s.recovery.CommitTime, s.clock.Now()), s.Visible())
	if s.FeatureLevel() < keys.FeatureLevelHistory {
		t.note(sample)
		return
	}
	w := &Write{Durability: DurabilitySync, Origin: batch.OriginCleanup}
	w.SetOwn()
	next := nextRecords{add: t.later(sample), floor: keys.Epoch(t.floor.Load())}
	t.changedLocked(sample, &next) // no other goroutine has the timeline yet
	next.record(w, sample)
	var err error
	if t.own, err = s.probe.commitDurably(ctx, w); err == nil {
		t.recorded, t.unread = true, false
		s.keepHidden()
		next.add = false // note adds it
		t.apply(sample, &next)
		sample.epoch = max(sample.epoch, 1)
		t.note(sample)
		if n := len(t.samples); t.samples[n-1].epoch+1 == t.own {
			t.settled = t.own
		}
	}
}

// noteTree adds a sample of the tree from which the store was opened, if commits were replayed after it: the tree may be all that says
// when a bulk load was.
func (t *timeline) noteTree(r *storage.Recovery) {
	n := len(t.samples)
	if r.TreeTime == 0 || r.TreeTime >= r.CommitTime || n > 0 && t.samples[n-1].epoch >= r.Tree {
		return
	}
	t.noteLoad(timeSample{at: r.TreeTime, epoch: r.Tree, noted: true})
}

// later reports whether a sample comes after those that there are, or is one of the same time with a later epoch.
func (t *timeline) later(sample timeSample) bool {
	n := len(t.samples)
	return n == 0 || sample.at >= t.samples[n-1].at && sample.epoch > t.samples[n-1].epoch
}

// note adds the sample of a start.
func (t *timeline) note(sample timeSample) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.keep == 0 || !t.later(sample) {
		return
	}
	if n := len(t.samples); n > 0 && t.samples[n-1].at == sample.at {
		t.samples = t.samples[:n-1]
	}
	t.samples = append(t.samples, sample)
}

// noteLoad adds the sample of a bulk load, which the log does not have. Its record comes with recordLoads, or with the next sample. The time of the last
// sample may be after it, because that was rounded up: then that one has the bulk load, too.
func (t *timeline) noteLoad(load timeSample) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.keep == 0 {
		return
	}
	i := len(t.samples)
	for i > 0 && t.samples[i-1].at > load.at {
		i--
		t.samples[i].epoch, t.samples[i].noted = load.epoch, true
	}
	t.samples = slices.Insert(t.samples, i, load)
}
