package mvcc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// mustNotReadWrongly reads a key at an epoch: it has the value, or the state is gone.
func mustNotReadWrongly(t *testing.T, s *Store, key, want string, at keys.Epoch) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	v, err := x.Get(nil, []byte(key), at)
	if !errors.As(err, new(*SnapshotGoneError)) && (err != nil || string(v.Data) != want) {
		t.Fatalf("%s at %d: %q, %v; want %q, or that it is gone", key, at, v.Data, err, want)
	}
}

// TestAHoldOfWhichTheRequestFailedKeepsNothingAfterARestart: the record of the hold may be there although its client got an
// error. Then nothing may be dropped that the record keeps.
func TestAHoldOfWhichTheRequestFailedKeepsNothingAfterARestart(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	x := mustSession(t, s)
	first := mustPut(t, s, "k", "old")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for recorded := 0; recorded < 5; { // a context that has ended loses against a free turn, and against a finished sync, every other time
		before := s.Visible()
		switch h, err := x.TakeHold(ctx, "test", first, time.Hour); {
		case err == nil:
			if _, err := x.EndHold(t.Context(), h.ID); err != nil {
				t.Fatal(err)
			}
		case s.Visible() > before:
			recorded++
		}
	}
	mustPut(t, s, "k", "new")
	x.Close()
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	mustNotReadWrongly(t, mustOpen(t, o), "k", "old", first)
}

// TestRecordsOfHoldsAreThoseInMemory: whatever runs at the same time, a restart finds the holds that there were.
func TestRecordsOfHoldsAreThoseInMemory(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	x, y := mustSession(t, s), mustSession(t, s)
	mustPut(t, s, "k", "v")
	for range 50 {
		h, err := x.TakeHold(t.Context(), "test", 0, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			var err error
			for err == nil {
				_, err = y.RenewHold(t.Context(), h.ID, 2*time.Hour)
			}
			done <- err
		}()
		if _, err := x.EndHold(t.Context(), h.ID); err != nil {
			t.Fatal(err)
		}
		if err := <-done; !errors.Is(err, ErrNoHold) {
			t.Fatal(err)
		}
	}
	before := s.Holds()
	x.Close()
	y.Close()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if after := mustOpen(t, o).Holds(); !slices.Equal(before, after) {
		t.Fatalf("%d holds became %d by a restart: %v", len(before), len(after), after)
	}
}

// TestHoldsChangeOneAfterTheOther: while the record of a hold is changed, no other change of a hold goes on.
func TestHoldsChangeOneAfterTheOther(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	h, err := x.TakeHold(t.Context(), "test", 0, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.timeline.takeTurn(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer s.timeline.endTurn()
	for name, change := range map[string]func(context.Context) error{
		"take":  func(ctx context.Context) error { _, err := x.TakeHold(ctx, "test", 0, time.Hour); return err },
		"renew": func(ctx context.Context) error { _, err := x.RenewHold(ctx, h.ID, time.Hour); return err },
		"end":   func(ctx context.Context) error { _, err := x.EndHold(ctx, h.ID); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		if err := change(ctx); !errors.Is(err, context.DeadlineExceeded) || len(s.Holds()) != 1 {
			t.Errorf("%s: %v, %d holds", name, err, len(s.Holds()))
		}
		cancel()
	}
}

// TestSamplesHaveNoLaterCommit: a commit that begins after a sample is not of the sample, whatever its epoch.
func TestSamplesHaveNoLaterCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Retention = 24 * time.Hour
		s := mustOpen(t, o)
		x := mustSession(t, s)
		defer x.Close()
		for range 3 {
			sample, err := s.sample(t.Context(), x)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond)
			if e := mustPut(t, s, "k", "v"); e <= sample.epoch {
				t.Fatalf("the sample at %d has the later commit %d", sample.epoch, e)
			}
		}
	})
}

// TestTheFloorIsDurableBeforeItIsUsed: after a crash that takes back everything that was not synced, no state is gone that
// the records of then keep.
func TestTheFloorIsDurableBeforeItIsUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := vfs.NewMem()
		o := tiny(fs)
		o.Retention, o.SyncInterval = time.Second, time.Hour
		s, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		x := mustSession(t, s)
		for i := range 30 {
			w := &Write{Durability: DurabilityAsync}
			w.Set([]byte("k"), fmt.Append(nil, i))
			if _, err := x.Commit(t.Context(), w); err != nil {
				t.Fatal(err)
			}
			time.Sleep(300 * time.Millisecond)
		}
		low := s.LowWatermark()
		o.Storage.FS = fs.Crash(1, vfs.SurviveNone)
		x.Close()
		_ = s.Close()
		if s, err = Open(o); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		if after := s.LowWatermark(); after < low {
			t.Fatalf("the low watermark was %d and is %d after the crash", low, after)
		}
	})
}

// TestTimesOfHeldEpochsStayKnown: from the epoch of a hold on the states are readable at their times, too, long after the
// retention and across a restart.
func TestTimesOfHeldEpochsStayKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Retention = time.Second
		s := mustOpen(t, o)
		x := mustSession(t, s)
		time.Sleep(time.Second)
		held := mustPut(t, s, "k", "held")
		time.Sleep(200 * time.Millisecond)
		if _, err := x.TakeHold(t.Context(), "test", held, time.Hour); err != nil {
			t.Fatal(err)
		}
		at := s.Clock().Now()
		for range 10 {
			time.Sleep(time.Second)
			mustPut(t, s, "k", "new")
		}
		for range 2 {
			if epoch, err := s.EpochAt(t.Context(), at); err != nil || epoch < held {
				t.Fatalf("the state of then is %d, %v; want at least %d", epoch, err, held)
			}
			x.Close()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = mustOpen(t, o)
			x = mustSession(t, s)
		}
		x.Close()
	})
}

// TestTimesStayKnownFromAHoldBelowTheFloorOn: a hold may be taken of an epoch that an older hold, which has ended since, kept, or while the
// record of a higher floor is being synced.
func TestTimesStayKnownFromAHoldBelowTheFloorOn(t *testing.T) {
	var line timeline
	line.init(&Options{Retention: time.Second})
	for i := range uint64(10) {
		line.samples = append(line.samples, timeSample{at: i * 1_000_000, epoch: keys.Epoch(10 * i)})
	}
	line.floor.Store(50)
	line.holds[1] = &Hold{ID: 1, Epoch: 30}
	if next := line.next(timeSample{at: 20_000_000, epoch: 200}); next.floor != 50 || line.samples[next.drop].epoch != 30 {
		t.Errorf("floor %d; the first sample that stays is of epoch %d, and epoch 30 is held", next.floor, line.samples[next.drop].epoch)
	}
}

// TestRetentionBytesEndThePastBeforeItsTime: about so many log bytes are kept, and not all of the time.
func TestRetentionBytesEndThePastBeforeItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Retention, o.RetentionBytes = time.Hour, 20<<10
		s := mustOpen(t, o)
		x := mustSession(t, s)
		defer x.Close()
		var all []keys.Epoch
		for range 40 { // a kilobyte every two seconds
			all = append(all, mustPut(t, s, "k", string(make([]byte, 1000))))
			time.Sleep(2 * time.Second)
		}
		low := s.LowWatermark()
		if low <= all[10] || low > all[30] {
			t.Fatalf("the low watermark is %d; want the epoch of 20 KiB ago, between %d and %d", low, all[10], all[30])
		}
	})
}

// TestAStoreWithoutRetentionAndHoldsIsIdle: it need not look for what has ended a thousand times a second.
func TestAStoreWithoutRetentionAndHoldsIsIdle(t *testing.T) {
	var line timeline
	if line.init(new(Options)); line.every < 100*time.Millisecond {
		t.Fatalf("looks every %v", line.every)
	}
}

// TestAStartWithoutRetentionRemovesTheFloor: afterwards it would promise what was dropped.
func TestAStartWithoutRetentionRemovesTheFloor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Retention = time.Hour
		s := mustOpen(t, o)
		first := mustPut(t, s, "k", "old")
		mustClose(t, s)
		o.Retention = 0
		s = mustOpen(t, o)
		time.Sleep(5 * time.Second)
		mustPut(t, s, "k", "new")
		mustCheckpoint(t, s)
		mustClose(t, s)
		o.Retention = time.Hour
		mustNotReadWrongly(t, mustOpen(t, o), "k", "old", first)
	})
}

// TestARecordOfTheFloorThatCannotBeReadIsRemoved by a store without retention, because a later start may read it.
func TestARecordOfTheFloorThatCannotBeReadIsRemoved(t *testing.T) {
	var line timeline
	line.init(new(Options))
	if line.adopt(0, false, true, 7); !line.recorded || line.floor.Load() != 7 || !line.hides() {
		t.Fatalf("the floor is %d, recorded %t, hidden %t; want 7 until the record is removed", line.floor.Load(), line.recorded, line.hides())
	}
}

// TestAHoldOfTheNewestEpochIsTaken although it has waited for another hold, while epochs became unreadable.
func TestAHoldOfTheNewestEpochIsTaken(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	if err := s.timeline.takeTurn(t.Context()); err != nil {
		t.Fatal(err)
	}
	taken := make(chan error, 1)
	var h Hold
	go func() {
		var err error
		h, err = x.TakeHold(t.Context(), "test", 0, time.Hour)
		taken <- err
	}()
	var last keys.Epoch
	for n := 0; n < 50 || s.LowWatermark() < 20; n++ {
		last = mustPut(t, s, "k", "v")
		time.Sleep(time.Millisecond)
	}
	s.timeline.endTurn()
	if err := <-taken; err != nil || h.Epoch < last {
		t.Errorf("epoch %d, %v; %d was committed before", h.Epoch, err, last)
	}
}

// TestSamplesThatAHoldKeepsCostLittle: a hold of a month keeps millions of samples, which are looked at every second while others wait for
// the timeline.
func TestSamplesThatAHoldKeepsCostLittle(t *testing.T) {
	tl := timeline{keep: time.Hour, holds: map[uint64]*Hold{}, reads: map[*Session]keys.Epoch{}}
	for id := range uint64(HoldsMax) {
		tl.holds[id] = &Hold{Epoch: 1}
	}
	tl.floor.Store(1)
	const samples, second = 100_000, uint64(1_000_000)
	for i := range uint64(samples) {
		tl.samples = append(tl.samples, timeSample{at: i * second, epoch: keys.Epoch(1 + i)})
	}
	next := timeSample{at: samples * second, epoch: samples + 1}
	var out nextRecords
	began := time.Now()
	if n := testing.AllocsPerRun(1, func() { out = tl.next(next) }); n > 10 {
		t.Errorf("%v allocations", n)
	}
	t.Logf("%v for %d samples", time.Since(began)/2, samples)
	if out.floor != 1 || out.drop != 0 || !out.add {
		t.Errorf("%+v", out)
	}
	tl.holds = map[uint64]*Hold{}
	if out := tl.next(next); out.floor != samples-3600 || len(out.removed) != droppedAtOnce || out.drop != droppedAtOnce {
		t.Errorf("without holds: floor %d, %d records removed, %d dropped", out.floor, len(out.removed), out.drop)
	}
}
