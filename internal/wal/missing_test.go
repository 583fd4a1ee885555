package wal

import (
	"bytes"
	"errors"
	"path"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

func ignoreAll(keys.Epoch, []byte) error { return nil }

// TestMissingSegmentIsReported: the log is refused if any file is removed, after a clean end or a kill, and the error names
// the file. A repaired log has the records before the file, and gives out no epoch that the missing file can have held.
func TestMissingSegmentIsReported(t *testing.T) {
	for name, closed := range map[string]bool{"closed": true, "killed": false} {
		t.Run(name, func(t *testing.T) {
			_, rec, _ := smallLog(t, 80, closed)
			for i := range rec.Segments {
				fs, rec, want := smallLog(t, 80, closed)
				newest := rec.Segments[len(rec.Segments)-1]
				lost := rec.Segments[i]
				if err := fs.Remove(lost.File); err != nil {
					t.Fatal(err)
				}
				kept := int(lost.First - 1)
				wantMissing(t, fs, newest.number, lost, i == 0)
				got := mustRepair(t, fs, newest.number)
				if !slices.EqualFunc(got.bodies, want.bodies[:kept], bytes.Equal) {
					t.Fatalf("%d records after the repair, want %d", len(got.bodies), kept)
				}
				mustGoOn(t, fs, newest.number, keys.Epoch(80+1))
			}
		})
	}
}

// TestMissingLogIsReported: the data file has the number of a segment.
func TestMissingLogIsReported(t *testing.T) {
	fs, rec, _ := smallLog(t, 80, true)
	for _, s := range rec.Segments {
		if err := fs.Remove(s.File); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Replay(fs, testDir, 40, Proof{}, ignoreAll); err != nil {
		t.Fatalf("a data file of an earlier version, without the number of a segment: %v", err)
	}
	known := rec.Segments[1]
	_, err := Replay(fs, testDir, 40, Proof{Segment: known.number}, ignoreAll)
	var c *CorruptionError
	if !errors.As(err, &c) || c.File != known.File || c.Epoch != 41 || c.Remedy == "" {
		t.Fatalf("got %v", err)
	}
	mustRepair(t, fs, known.number)
	mustGoOn(t, fs, known.number, 81)
}

// TestMissingDirectoryOfTheLogIsRepaired: the directory is lost with all its files.
func TestMissingDirectoryOfTheLogIsRepaired(t *testing.T) {
	fs, rec, _ := smallLog(t, 80, true)
	names, err := fs.List(Dir(testDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := fs.Remove(path.Join(Dir(testDir), name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := fs.Remove(Dir(testDir)); err != nil {
		t.Fatal(err)
	}
	known := rec.Segments[1].number
	mustRepair(t, fs, known)
	mustGoOn(t, fs, known, 81)
}

// wantMissing expects a replay to name the file, or if the first is missing, the file after it.
func wantMissing(t *testing.T, fs vfs.FS, known uint64, lost SegmentInfo, first bool) {
	t.Helper()
	_, err := Replay(fs, testDir, 0, Proof{Segment: known}, ignoreAll)
	var c *CorruptionError
	if !errors.As(err, &c) || c.Remedy == "" || c.Epoch != lost.First || !first && c.File != lost.File {
		t.Fatalf("without %s: %v", lost.File, err)
	}
	if first && path.Base(c.File) <= path.Base(lost.File) {
		t.Fatalf("without the first: %v", err)
	}
}

func mustRepair(t *testing.T, fs vfs.FS, known uint64) *replayed {
	t.Helper()
	d, err := Repair(fs, testDir, 0, Proof{Segment: known})
	if err != nil || d.Cause == nil {
		t.Fatalf("%+v, %v", d, err)
	}
	_, got := mustReplayFrom(t, fs, known)
	return got
}

func mustReplayFrom(t *testing.T, fs vfs.FS, known uint64) (Recovery, *replayed) {
	t.Helper()
	rec, err := Replay(fs, testDir, 0, Proof{Segment: known}, ignoreAll)
	if err != nil {
		t.Fatal(err)
	}
	_, got := mustReplay(t, fs, 0)
	return rec, got
}

// mustGoOn opens the log, appends records after the lost ones, and replays them.
func mustGoOn(t *testing.T, fs vfs.FS, known uint64, beyond keys.Epoch) {
	t.Helper()
	rec, got := mustReplayFrom(t, fs, known)
	opts := testOptions2(fs)
	a, err := startLog(opts, rec)
	if err != nil {
		t.Fatal(err)
	}
	e, err := a.put([]byte("behind"))
	if err != nil || e < beyond {
		t.Fatalf("epoch %d, %v; %d may have been in what is lost", e, err, beyond-1)
	}
	mustClose(t, a.log)
	if _, again := mustReplayFrom(t, fs, known); len(again.bodies) != len(got.bodies)+1 {
		t.Fatalf("%d records, then %d", len(got.bodies), len(again.bodies))
	}
}

// TestLogWithoutCloseRecordsOpens: segments of earlier versions do not name the next one.
func TestLogWithoutCloseRecordsOpens(t *testing.T) {
	for _, closed := range []bool{true, false} {
		fs, rec, want := smallLog(t, 80, closed)
		for _, s := range rec.Segments[:len(rec.Segments)-1] {
			if err := ReadSegment(fs, s, func(r Record) error {
				if r.Flags == flagClose {
					_ = patch(t, fs, s.File, r.Offset, make([]byte, closeRecordSpace))
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		if got, bodies := mustReplay(t, fs, 0); got.Unclean == closed || !slices.EqualFunc(bodies.bodies, want.bodies, bytes.Equal) {
			t.Fatalf("closed %v: %+v", closed, got)
		}
		mustGoOn(t, fs, 0, 81)
	}
}

// TestMissingFirstSegmentOfARunIsReported: a log that was closed and opened again does not end in the close record of the
// earlier run. Otherwise the epochs that were given out since would be given out again.
func TestMissingFirstSegmentOfARunIsReported(t *testing.T) {
	for _, closed := range []bool{true, false} {
		fs, rec, _ := smallLog(t, 30, closed)
		a, err := startLog(testOptions2(fs), rec)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.put([]byte("in the second run")); err != nil {
			t.Fatal(err)
		}
		first := a.cur.Load().path
		left := fs.Crash(1, vfs.SurviveNone)
		_ = a.log.Close()
		if err := left.Remove(first); err != nil {
			t.Fatal(err)
		}
		var c *CorruptionError
		if _, err := Replay(left, testDir, 0, Proof{}, ignoreAll); !errors.As(err, &c) || c.File != first {
			t.Fatalf("closed %v: %v", closed, err)
		}
	}
}

// TestCloseRecordsNeedNoSync: a rotation syncs nothing for its close record, whether the segment is full of durable records
// or not.
func TestCloseRecordsNeedNoSync(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	before := a.log.Stats()
	for i := range 400 { // one record a sync: each segment is durable before it is sealed
		if _, err := a.put(bodyOf(uint64(i), 150)); err != nil {
			t.Fatal(err)
		}
	}
	after := a.log.Stats()
	if rotations := after.Rotations - before.Rotations; rotations < 10 || after.Syncs-before.Syncs > 400 {
		t.Fatalf("%d rotations, %d syncs for 400 records", rotations, after.Syncs-before.Syncs)
	}
}

// TestCloseRecordProvesNothingAboutRecordsOfItsOwnWrite: a crash can leave a close record and tear a record before it that
// was written together with it. That is a torn tail and not damage.
func TestCloseRecordProvesNothingAboutRecordsOfItsOwnWrite(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	a.log.acquireFlusher() // nothing is written meanwhile
	first := a.cur.Load()
	for a.cur.Load() == first {
		a.mustAppend(t, bodyOf(1, 150))
	}
	a.log.releaseFlusher()
	if err := a.log.WaitDurable(t.Context(), a.cur.Load().First()); err != nil {
		t.Fatal(err)
	}
	next := a.cur.Load().path
	left := fs.Crash(1, vfs.SurviveNone)
	_ = a.log.Close()
	rec, _ := mustReplay(t, left, 0)
	all := locationsOf(t, left, rec)
	_ = patch(t, left, next, 0, make([]byte, headerPage))
	if rec, _ := mustReplay(t, left, 0); rec.tail.successor == 0 {
		t.Fatal("the close record is not in the same write as the records")
	}
	_ = patch(t, left, first.path, all[2].off, []byte{0xa5, 0x5a, 0xa5, 0x5a})
	if rec, got := mustReplay(t, left, 0); rec.Torn == nil || len(got.bodies) != 2 {
		t.Fatalf("%d records, %+v", len(got.bodies), rec)
	}
}

// TestSkippedEpochsAreKnownWhileTheLogHasTheirRecord: also to a replay that begins after them.
func TestSkippedEpochsAreKnownWhileTheLogHasTheirRecord(t *testing.T) {
	fs, rec, _ := smallLog(t, 60, true)
	patch(t, fs, rec.Segments[1].File, headerPage+3, []byte{0xee})
	dropped, err := Repair(fs, testDir, 0, Proof{})
	if err != nil {
		t.Fatal(err)
	}
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	e, err := a.put(bodyOf(1, 100))
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	for _, after := range []keys.Epoch{0, dropped.From - 1, e - 1, e} {
		found, _ := mustReplay(t, fs, after)
		if !slices.ContainsFunc(found.Skipped, func(r keys.EpochRange) bool { return r.First == dropped.From }) {
			t.Errorf("after epoch %d: %+v, and the repair has dropped those from %d on", after, found.Skipped, dropped.From)
		}
	}
}

// TestARepairBesideMissingSegmentsGivesNoEpochTwice: a record is damaged, and the files of the runs after it are missing, each of which a crash had
// ended.
func TestARepairBesideMissingSegmentsGivesNoEpochTwice(t *testing.T) {
	fs := vfs.NewMem()
	last := keys.Epoch(0)
	for range 5 {
		a := mustStart(t, testOptions2(fs))
		for i := range uint64(5) {
			e, err := a.put(bodyOf(i, 100))
			if err != nil {
				t.Fatal(err)
			}
			last = e
		}
		fs = fs.Crash(1, vfs.SurviveAll)
	}
	rec, _ := mustReplay(t, fs, 0)
	newest := rec.Segments[len(rec.Segments)-1]
	_ = patch(t, fs, rec.Segments[0].File, headerPage+recordHeaderSize, []byte{0xff})
	for _, s := range rec.Segments[1:] {
		if err := fs.Remove(s.File); err != nil {
			t.Fatal(err)
		}
	}
	mustRepair(t, fs, newest.number)
	if rec, _ := mustReplayFrom(t, fs, newest.number); rec.Next() <= last {
		t.Errorf("the log continues at epoch %d, and epoch %d was given out", rec.Next(), last)
	}
	mustGoOn(t, fs, newest.number, last+1)
}
