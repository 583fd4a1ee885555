package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestRemovedEpochsAreRemembered over restarts, within a bound: the oldest repairs become one.
func TestRemovedEpochsAreRemembered(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	const apart, last = 2 * wal.EpochWindow, 2 + wal.EpochWindow // more than a crash skips
	for i := range keys.Epoch(removedMax + 1) {
		s.recovery.Skipped = append(s.recovery.Skipped, keys.EpochRange{First: apart*i + 2, Last: apart*i + last})
	}
	if err := errors.Join(s.openRemoved(t.Context()), s.recordRemoved(t.Context(), s.probe)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if len(s.timeline.removed) != removedMax {
			t.Fatalf("%d repairs", len(s.timeline.removed))
		}
		for _, one := range []struct {
			at         keys.Epoch
			operations uint32
			removed    bool
		}{
			{1, 0, false},
			{1, 1, true},
			{2, 0, true},
			{last + 3, 0, true},
			{apart + last - 1, 0, true},
			{apart + last, 0, false},
			{2*apart + 1, 0, false},
			{2*apart + 1, 1, true},
			{2*apart + last - 1, 9, true},
			{2*apart + last, 1, false},
		} {
			if _, removed := s.Removed(one.at, one.operations); removed != one.removed {
				t.Errorf("after epoch %d and %d operations: %v", one.at, one.operations, removed)
			}
		}
		mustClose(t, s)
		s = mustOpen(t, o)
	}
}

// TestManyCrashesEndNoHold: what so many crashes have lost that the oldest become one is not what a repair has removed.
func TestManyCrashesEndNoHold(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	at := mustPut(t, s, "key", "value")
	x := mustSession(t, s)
	defer x.Close()
	h, err := x.TakeHold(t.Context(), "test", at, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for i := range keys.Epoch(removedMax + 5) {
		first := at + 10 + i*(wal.EpochWindow+10)
		s.recovery.Skipped = append(s.recovery.Skipped, keys.EpochRange{First: first, Last: first + wal.EpochWindow - 1})
	}
	if err := s.openRemoved(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := len(s.timeline.removed); n != removedMax {
		t.Fatalf("%d ranges", n)
	}
	if _, err := x.RenewHold(t.Context(), h.ID, time.Hour); err != nil || s.timeline.retained() > at {
		t.Errorf("the hold of epoch %d: %v; the past is kept from epoch %d on", at, err, s.timeline.retained())
	}
}

// TestLostStatesAreNotRead: clients have seen the states of commits that a crash takes back, because they were not durable. While older
// states are kept, by a retention or a hold, nothing tells a client that such an epoch shows it another state, also after the log with the
// crash is gone.
func TestLostStatesAreNotRead(t *testing.T) {
	for name, retention := range map[string]time.Duration{"retention": time.Hour, "hold": 0} {
		t.Run(name, func(t *testing.T) {
			o := tiny(vfs.NewMem())
			o.Retention, o.SyncInterval = retention, time.Hour
			s := mustOpen(t, o)
			kept := mustPut(t, s, "key", "durable")
			if retention == 0 {
				x := mustSession(t, s)
				if _, err := x.TakeHold(t.Context(), "test", kept, time.Hour); err != nil {
					t.Fatal(err)
				}
				x.Close()
			}
			var lost []keys.Epoch
			for round := range 3 {
				x := mustSession(t, s)
				e, err := put(x, "key", "lost", DurabilityAsync)
				x.Close()
				if durable := s.Durable(); err != nil || e <= durable {
					t.Fatalf("epoch %d, durable %d: %v", e, durable, err)
				}
				lost = append(lost, e)
				o.Storage.FS = o.Storage.FS.(*vfs.Mem).Crash(uint64(round), vfs.SurviveNone)
				_ = s.Close()
				s = mustOpen(t, o)
				mustRefuse(t, s, lost)
				mustPut(t, s, "other", fmt.Sprint(round))
				mustCheckpoint(t, s)
				mustClose(t, s)
				s = mustOpen(t, o)
				mustRefuse(t, s, lost)
				for _, at := range []keys.Epoch{kept, s.Visible()} {
					if v := get(t, s, "key", at); v != "durable" {
						t.Fatalf("at %d: %q", at, v)
					}
				}
			}
		})
	}
}

// mustRefuse asks for states in all ways that name an epoch.
func mustRefuse(t *testing.T, s *Store, lost []keys.Epoch) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	for _, e := range lost {
		for what, ask := range map[string]func() error{
			"get":         func() error { _, err := x.Get(nil, []byte("key"), e); return err },
			"transaction": func() error { _, err := x.Begin(TxnOptions{ReadOnly: true, At: e}); return err },
			"hold":        func() error { _, err := x.TakeHold(t.Context(), "test", e, time.Hour); return err },
			"history": func() error {
				_, err := x.History(t.Context(), &HistoryOptions{From: e, Count: 9, Bytes: 999})
				return err
			},
			"diff": func() error {
				_, err := x.Diff(t.Context(), &DiffOptions{From: e, Count: 9, Bytes: 999, Keys: 9})
				return err
			},
			"unchanged": func() error {
				txn, err := x.Begin(TxnOptions{})
				if err != nil {
					return err
				}
				defer txn.Rollback()
				_, err = txn.UnchangedSince(nil, nil, e)
				return err
			},
		} {
			var gone *SnapshotGoneError
			if err := ask(); !errors.As(err, &gone) || gone.Missing.First > e || gone.Missing.Last <= e {
				t.Errorf("%s at %d: %v", what, e, err)
			}
		}
	}
}

// TestLostEpochsBelowAHiddenFloorAreRemembered: the next start may read the record that keeps them readable.
func TestLostEpochsBelowAHiddenFloorAreRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // in no time, so that the timeline does not run meanwhile
		s := mustOpen(t, tiny(vfs.NewMem()))
		mustPut(t, s, "key", "value")
		s.recovery.Skipped = []keys.EpochRange{{First: 10, Last: 15}}
		for _, s.timeline.hidden = range []bool{true, false} {
			if err := s.openRemoved(t.Context()); err != nil {
				t.Fatal(err)
			}
			if n := len(s.timeline.removed); (n == 1) != s.timeline.hidden {
				t.Errorf("%d ranges are remembered; records are hidden: %v", n, s.timeline.hidden)
			}
		}
	})
}

// TestCrashesOfAStoreWithoutAPastLeaveNoRecords: what they have lost is below the low watermark from then on.
func TestCrashesOfAStoreWithoutAPastLeaveNoRecords(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	e := mustPut(t, s, "key", "value")
	o.Storage.FS = o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveNone)
	_ = s.Close()
	s = mustOpen(t, o)
	if _, removed := s.Removed(e+2, 0); removed || len(s.timeline.removed) > 0 || s.LowWatermark() <= e+2 {
		t.Fatalf("%v; low watermark %d", s.timeline.removed, s.LowWatermark())
	}
}

// TestLostStatesAreRememberedAfterAStartOnAFullDisk: the start has no log segment in which it could write a record of what the crash has lost. The memtable has it, and the
// first merge takes it along, before the log with the crash is gone.
func TestLostStatesAreRememberedAfterAStartOnAFullDisk(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Retention, o.SyncInterval = time.Hour, time.Hour
	s := mustOpen(t, o)
	mustPut(t, s, "key", "durable")
	x := mustSession(t, s)
	lost, err := put(x, "key", "lost", DurabilityAsync)
	x.Close()
	if durable := s.Durable(); err != nil || lost <= durable {
		t.Fatalf("epoch %d, durable %d: %v", lost, durable, err)
	}
	fs := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveNone)
	o.Storage.FS = fs
	_ = s.Close()
	fs.SetCapacity(4 << 10)
	s = mustOpen(t, o)
	if n := removedRecords(t, s); n != 1 || !s.engine.AwaitsSegment() {
		t.Fatalf("%d records; a segment is awaited: %v", n, s.engine.AwaitsSegment())
	}
	mustRefuse(t, s, []keys.Epoch{lost})
	fs.SetCapacity(0)
	mustPut(t, s, "other", "value")
	mustCheckpoint(t, s)
	mustClose(t, s)
	s = mustOpen(t, o)
	mustRefuse(t, s, []keys.Epoch{lost})
}

func removedRecords(t *testing.T, s *Store) (n int) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	if err := x.ScanSystem(t.Context(), []byte{keys.SystemRemoved}, []byte{keys.SystemRemoved + 1}, func([]byte, []byte, keys.Epoch) bool { n++; return true }); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestNoPastIsReadBesideADamagedRecordOfRemovedEpochs: which epochs the page hides is not known. What is written from now on can be read.
func TestNoPastIsReadBesideADamagedRecordOfRemovedEpochs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // openRemoved is called below as if no second had passed since the start
		o := tiny(vfs.NewMem())
		o.Retention, o.Storage.PageSize = time.Hour, 512
		s := mustOpen(t, o)
		mustPut(t, s, "key", "value")
		fs := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveAll)
		o.Storage.FS = fs
		_ = s.Close()
		s, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		const count = 100
		for i := range keys.Epoch(count) {
			s.recovery.Skipped = append(s.recovery.Skipped, keys.EpochRange{First: 10*i + 10, Last: 10*i + 15})
		}
		if err := errors.Join(s.openRemoved(t.Context()), s.recordRemoved(t.Context(), s.probe)); err != nil {
			t.Fatal(err)
		}
		mustClose(t, s)
		record := []byte{byte(keys.SpaceSystem), keys.SystemRemoved}
		if damageLeaves(t, fs, 512, func(first, last []byte) bool { return bytes.HasPrefix(first, record) && bytes.HasPrefix(last, record) }) < 3 {
			t.Fatal("too few leaves: the test tests too little")
		}
		if s, err = Open(o); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		for i := range keys.Epoch(count) {
			if _, removed := s.Removed(10*i+12, 0); !removed {
				t.Errorf("epoch %d can be read", 10*i+12)
			}
		}
		at := s.Visible()
		mustPut(t, s, "key", "another")
		if v := get(t, s, "key", at); v != "value" {
			t.Errorf("at %d: %q", at, v)
		}
	})
}

// TestWhatOneStartCannotReadOfRemovedEpochsEndsNoRetention: merges would drop what the record of the floor keeps, and the next start can read all
// records again.
func TestWhatOneStartCannotReadOfRemovedEpochsEndsNoRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // no second passes after a start, in which the retention would end
		fs := vfs.NewMem()
		o := tiny(fs)
		o.Retention, o.Storage.PageSize = time.Hour, 512
		s := mustStart(t, o)
		at := mustPut(t, s, "key", "old")
		fs = fs.Crash(1, vfs.SurviveAll) // which leaves out as many epochs as a repair may
		o.Storage.FS = fs
		_ = s.Close()
		s = mustStart(t, o)
		mustPut(t, s, "key", "new")
		for i := range keys.Epoch(100) {
			s.recovery.Skipped = append(s.recovery.Skipped, keys.EpochRange{First: 10*i + 1000, Last: 10*i + 1005})
		}
		if err := errors.Join(s.openRemoved(t.Context()), s.recordRemoved(t.Context(), s.probe)); err != nil {
			t.Fatal(err)
		}
		mustClose(t, s)
		intact, record := dataFile(t, fs), []byte{byte(keys.SpaceSystem), keys.SystemRemoved}
		if damageLeaves(t, fs, 512, func(first, last []byte) bool { return bytes.HasPrefix(first, record) && bytes.HasPrefix(last, record) }) < 3 {
			t.Fatal("too few leaves: the test tests too little")
		}
		damaged := dataFile(t, fs)
		o.Retention = 0
		s = mustStart(t, o)
		if low := s.LowWatermark(); low > at {
			t.Errorf("the low watermark is %d, and epoch %d is kept", low, at)
		}
		mustPut(t, s, "key", "newest")
		mustCheckpoint(t, s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		restoreBytes(t, fs, intact, damaged)
		s = mustStart(t, o)
		defer func() { _ = s.Close() }()
		mustNotReadWrongly(t, s, "key", "old", at)
		if v := get(t, s, "key", at); v != "old" {
			t.Errorf("at %d: %q", at, v)
		}
	})
}

// TestAFloorFromBeforeARepairIsEndedBeforeMergesDropWhatItKeeps: a later start may read its record and not that of the repair.
func TestAFloorFromBeforeARepairIsEndedBeforeMergesDropWhatItKeeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := tiny(vfs.NewMem())
		o.Retention = time.Hour
		s := mustStart(t, o)
		mustPut(t, s, "key", "old")
		s.recovery.Skipped = []keys.EpochRange{{First: 100, Last: 100 + 2*wal.EpochWindow}}
		if err := s.openRemoved(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.collector.collect(nil, false)
		if floor := keys.Epoch(s.timeline.floor.Load()); floor != s.Visible() || s.MinVisible() != 0 {
			t.Errorf("the floor is %d, and merges drop versions before epoch %d", floor, s.MinVisible())
		}
		if err := s.recordRemoved(t.Context(), s.probe); err != nil {
			t.Fatal(err)
		}
		mustClose(t, s)
		o.Retention = 0
		s = mustStart(t, o)
		defer func() { _ = s.Close() }()
		found := false
		if err := s.probe.ScanSystem(t.Context(), floorKey, append(floorKey, 0), func(_, _ []byte, _ keys.Epoch) bool { found = true; return true }); err != nil || found {
			t.Errorf("the record of the floor is there: %v, %v", found, err)
		}
		if s.timeline.hides() {
			t.Error("every version is kept for good")
		}
	})
}

// TestRecordsOfLostEpochsThatNothingNeedsAreRemoved: the replay records what each crash has lost, also where no older epoch can be read.
func TestRecordsOfLostEpochsThatNothingNeedsAreRemoved(t *testing.T) {
	o := tiny(vfs.NewMem())
	most := 0
	for crash := range removedMany + 20 {
		s := mustOpen(t, o)
		mustPut(t, s, "k", "v")
		records := removedRecords(t, s)
		if most = max(most, records); records > removedMany || crash > removedMany && records > 20 {
			t.Fatalf("%d records after %d crashes", records, crash)
		}
		o.Storage.FS = o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveNone)
		_ = s.Close()
	}
	if most < removedMany-1 {
		t.Errorf("at most %d records", most)
	}
}
