package mvcc

import (
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAStateAtATimeDoesNotChangeWithABulkLoad that was being published when it was asked for: the load has its time before it is
// durable. The answers are the same when other commits have followed, and after restarts, for as long as the retention.
func TestAStateAtATimeDoesNotChangeWithABulkLoad(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Retention = time.Hour
	s := mustOpen(t, o)
	mustPut(t, s, "k", "before")
	awaitSample := func(from keys.Epoch) {
		t.Helper()
		eventually(t, "a sample", func() bool {
			s.timeline.mu.Lock()
			defer s.timeline.mu.Unlock()
			n := len(s.timeline.samples)
			return n > 0 && s.timeline.samples[n-1].epoch >= from
		})
	}
	awaitSample(1)
	opened := s.TimeOf(1) // rounded up, and the clock may be late
	eventually(t, "a time after the first sample", func() bool { return s.Clock().Now() > opened+1 })
	type answer struct {
		at    uint64
		epoch keys.Epoch
		err   error
	}
	const questionsMax = 5
	asked := make(chan answer, questionsMax)
	ask := func() {
		at := s.Clock().Now() - 1
		go func() {
			e, err := s.EpochAt(t.Context(), at)
			asked <- answer{at, e, err}
		}()
	}
	var pausing atomic.Bool
	var questions atomic.Int64
	fs.SetHook(func(vfs.Op, string) {
		if pausing.Load() && questions.Add(1) <= questionsMax {
			time.Sleep(2 * time.Millisecond)
			ask()
			time.Sleep(2 * time.Millisecond) // it may answer now
		}
	})
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	l.Permit(func() error { pausing.Store(true); return nil })
	if err := l.Add([]byte("loaded"), []byte("v")); err != nil {
		t.Fatal(err)
	}
	loaded, err := l.Commit(t.Context())
	pausing.Store(false)
	at := s.engine.CommitTime() // that of the load, if nothing has followed
	alone := s.engine.Reserved() == loaded.Epoch
	loadTime := l.load.CommitTime()
	fs.SetHook(nil)
	if err := errors.Join(err, l.Close()); err != nil {
		t.Fatal(err)
	}
	if questions.Load() == 0 {
		t.Fatal("nothing was asked in the commit pause: this tests nothing")
	}
	var answers []answer
	for range min(questions.Load(), questionsMax) {
		a := <-asked
		if a.err != nil {
			t.Fatal(a.err)
		}
		answers = append(answers, a)
	}
	if alone {
		answers = append(answers, answer{at: at, epoch: loaded.Epoch})
	}
	at = awaitTick(s) - 1
	e, err := s.EpochAt(t.Context(), at)
	if err != nil || e < loaded.Epoch { // the store may have recorded a sample since
		t.Fatalf("the state after the load is %d, %v; the load is %d", e, err, loaded.Epoch)
	}
	answers = append(answers, answer{at: at, epoch: e})
	check := func(when string) {
		t.Helper()
		for _, a := range answers {
			e, err := s.EpochAt(t.Context(), a.at)
			if err == nil && a.at < loadTime && e >= 1 && e < a.epoch {
				continue // the log, which ends with the load, said that the store's own record of a sample was before that time
			}
			if err != nil || e != a.epoch {
				t.Errorf("%s: the state at %d is %d, %v; it was %d, and the load is %d", when, a.at, e, err, a.epoch, loaded.Epoch)
			}
		}
	}
	check("at once")
	awaitTick(s)
	after := mustPut(t, s, "k", "after")
	awaitTick(s)
	check("after another commit")
	awaitSample(after)
	check("after another sample")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, o)
	// Of the times before, that of the load is recorded in milliseconds. And a record of a sample is not found when it is no longer in the log.
	if again, err := s.EpochAt(t.Context(), at); err != nil || again < loaded.Epoch || again > e {
		t.Errorf("after a restart: the state at %d is %d, %v; it was %d, and the load is %d", at, again, err, e, loaded.Epoch)
	}
}

// TestABulkLoadBesideASample has the same time as a sample, rounded: both have one record, which has the bulk load and is not
// overwritten with the earlier of the two.
func TestABulkLoadBesideASample(t *testing.T) {
	for _, c := range []struct {
		name    string
		between uint64 // of a sample at 5000 and one at 9000
		want    []timeSample
	}{
		{"just before a sample that was rounded up", 4700, []timeSample{{at: 5000, epoch: 20, noted: true}}},
		{"between samples", 6300, []timeSample{{at: 6300, epoch: 20, noted: true}}},
		{"in the millisecond of the next sample", 8700, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var line timeline
			line.init(&Options{Retention: time.Hour})
			line.samples = []timeSample{{at: 3000, epoch: 5}, {at: 5000, epoch: 10}}
			line.noteLoad(timeSample{at: c.between, epoch: 20, noted: true})
			if before, _, _ := line.around(c.between, 20); before != 20 {
				t.Errorf("the state at the time of the load is %d", before)
			}
			if before, _, _ := line.around(c.between-1, 20); before >= 20 {
				t.Errorf("the state before the load is %d", before)
			}
			sample := timeSample{at: 9000, epoch: 30}
			next := line.next(sample)
			if !next.add || !slices.Equal(next.noted, c.want) {
				t.Errorf("records %+v, want %+v", next.noted, c.want)
			}
			line.apply(sample, &next)
			if again := line.next(timeSample{at: 10000, epoch: 40}); len(again.noted) != 0 {
				t.Errorf("records once more: %+v", again.noted)
			}
			line.keep = time.Millisecond // now all but the last are dropped
			if last := line.next(timeSample{at: 20000, epoch: 50}); slices.ContainsFunc(last.removed, func(s timeSample) bool { return s.at > 8000 }) {
				t.Errorf("the record of a sample that is kept is removed: %+v", last.removed)
			}
		})
	}
}

// TestASampleMissesNoCommit that comes between the epoch of a sample and the commit that records it, even if no other commit follows. A
// store to which nothing is committed takes no samples.
func TestASampleMissesNoCommit(t *testing.T) {
	var line timeline
	line.init(&Options{Retention: time.Hour})
	tick := func(at uint64, reserved, recorded keys.Epoch) (added bool) {
		sample := timeSample{at: at, epoch: reserved}
		next := line.next(sample)
		line.apply(sample, &next)
		if next.add || next.floor != keys.Epoch(line.floor.Load()) {
			line.committed(recorded, sample, &next)
		}
		return next.add
	}
	for i, c := range []struct {
		reserved, recorded keys.Epoch
		want               bool
	}{
		{10, 12, true}, // 11 is another commit
		{12, 13, true},
		{13, 14, false},
		{13, 14, false},
		{15, 16, true},
		{16, 17, false},
	} {
		if got := tick(uint64(i+1)*1000, c.reserved, c.recorded); got != c.want {
			t.Errorf("tick %d, epoch %d: a sample %v, want %v", i, c.reserved, got, c.want)
		}
	}
	line.noteLoad(timeSample{at: 6500, epoch: 20, noted: true})
	sample := timeSample{at: 7000, epoch: 20}
	next := line.next(sample)
	line.apply(sample, &next)
	line.committed(21, sample, &next)
	if next.add || tick(8000, 21, 22) {
		t.Error("a sample after a bulk load, which has one")
	}
}

// openBetweenSamples opens a store that retains history, with two puts, half of the time before its next sample.
func openBetweenSamples(t *testing.T) (*Store, Options) {
	t.Helper()
	o := tiny(vfs.NewMem())
	o.Retention, o.CheckpointInterval = time.Hour, time.Hour
	s := mustOpen(t, o)
	mustPut(t, s, "k", "before")
	time.Sleep(2500 * time.Millisecond) // two samples, and half of the time to the next one
	mustPut(t, s, "k", "at last")
	time.Sleep(20 * time.Millisecond)
	return s, o
}

// TestTheTimeOfABulkLoadOutlivesACrash that comes before the time has a record: the log has the commits around it, and not the load.
func TestTheTimeOfABulkLoadOutlivesACrash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, o := openBetweenSamples(t)
		noRecords(t, s)
		loaded, at := loadAndTime(t, s)
		mustPut(t, s, "k", "after")
		for range 2 {
			if e, err := s.EpochAt(t.Context(), at); err != nil || e != loaded {
				t.Fatalf("the state after the load of epoch %d is %d, %v", loaded, e, err)
			}
			crashed := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveNone)
			_ = s.Close()
			o.Storage.FS = crashed
			s = mustOpen(t, o)
		}
	})
}

// noRecords keeps the timeline from recording anything, until the store is closed.
func noRecords(t *testing.T, s *Store) {
	if err := s.timeline.beginRecording(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// loadAndTime makes a bulk load, and returns its epoch and a time soon after it.
func loadAndTime(t *testing.T, s *Store) (e keys.Epoch, at uint64) {
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Add([]byte("loaded"), []byte("v")); err != nil {
		t.Fatal(err)
	}
	loaded, err := l.Commit(t.Context())
	if err := errors.Join(err, l.Close()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond)
	at = s.Clock().Now() - 1
	time.Sleep(20 * time.Millisecond)
	return loaded.Epoch, at
}

// TestTheTimeOfABulkLoadOutlivesOtherTrees, of which the superblock has the time instead, and that come before the next sample.
func TestTheTimeOfABulkLoadOutlivesOtherTrees(t *testing.T) {
	crash := func(t *testing.T, s *Store, o *Options, survive vfs.Survival) *Store {
		crashed := o.Storage.FS.(*vfs.Mem).Crash(1, survive)
		_ = s.Close()
		o.Storage.FS = crashed
		return mustOpen(t, *o)
	}
	again := func(t *testing.T, s *Store, o *Options) *Store {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return mustOpen(t, *o)
	}
	load := func(t *testing.T, s *Store) { loadAndTime(t, s) }
	checkpoint := func(t *testing.T, s *Store) {
		mustPut(t, s, "k", "after")
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name    string
		tree    func(*testing.T, *Store)
		restart func(*testing.T, *Store, *Options) *Store
		early   bool // there is a crash before the time has a record, and before the other tree
	}{
		{"a load and a crash", load, func(t *testing.T, s *Store, o *Options) *Store { return crash(t, s, o, vfs.SurviveNone) }, false},
		{"a load and a kill", load, func(t *testing.T, s *Store, o *Options) *Store { return crash(t, s, o, vfs.SurviveAll) }, false},
		{"a load and a stop", load, again, false},
		{"a checkpoint and a crash", checkpoint, func(t *testing.T, s *Store, o *Options) *Store { return crash(t, s, o, vfs.SurviveNone) }, false},
		{"a checkpoint and a stop", checkpoint, again, false},
		{"two crashes", checkpoint, func(t *testing.T, s *Store, o *Options) *Store { return crash(t, s, o, vfs.SurviveNone) }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, o := openBetweenSamples(t)
				if c.early {
					noRecords(t, s)
				}
				loaded, at := loadAndTime(t, s)
				next := mustPut(t, s, "k", "next")
				if c.early {
					s = crash(t, s, &o, vfs.SurviveNone)
				}
				c.tree(t, s)
				for range 2 {
					if e, err := s.EpochAt(t.Context(), at); err != nil || e < loaded || e >= next { // the record of the time may be between
						t.Errorf("the state between the load of epoch %d and the commit of %d is %d, %v", loaded, next, e, err)
					}
					s = c.restart(t, s, &o)
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
			})
		})
	}
}

// TestTheTimeOfABulkLoadIsRecordedWhenItReturns, durably, and once: the next sample has nothing to add.
func TestTheTimeOfABulkLoadIsRecordedWhenItReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Retention, o.CheckpointInterval, o.SyncInterval = time.Hour, time.Hour, time.Hour
		s := mustOpen(t, o)
		defer s.Close()
		mustPut(t, s, "k", "before")
		time.Sleep(2500 * time.Millisecond)
		loaded, _ := loadAndTime(t, s)
		if s.Visible() != loaded+1 || s.Durable() != loaded+1 {
			t.Errorf("after the load of epoch %d visible is %d and durable %d", loaded, s.Visible(), s.Durable())
		}
		if again := s.timeline.unrecordedLoads(); len(again.noted) != 0 {
			t.Errorf("without a record: %+v", again.noted)
		}
		time.Sleep(5 * time.Second)
		if e := s.Visible(); e != loaded+1 {
			t.Errorf("epochs up to %d without a commit after the load of epoch %d", e, loaded)
		}
	})
}

// TestCommitsWithoutATimeAreOfNoKnownTime: after an upgrade of a store whose commits have no times, and before the first that has one, the
// newest state is not that of yesterday.
func TestCommitsWithoutATimeAreOfNoKnownTime(t *testing.T) {
	for _, retention := range []time.Duration{0, time.Hour} {
		o := tiny(vfs.NewMem())
		o.Storage.FeatureLevel, o.Retention = keys.FeatureLevelOldest, retention
		s := mustOpen(t, o)
		mustPut(t, s, "k", "v")
		if _, err := s.FinalizeUpgrade(t.Context()); err != nil {
			t.Fatal(err)
		}
		var wrong *TimeError
		if e, err := s.EpochAt(t.Context(), s.Clock().Now()-uint64(24*time.Hour/time.Microsecond)); !errors.As(err, &wrong) || wrong.Future() {
			t.Errorf("retention %v: the state of yesterday is %d: %v", retention, e, err)
		}
	}
}
