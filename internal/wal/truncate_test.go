package wal

import (
	"bytes"
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

func fileCount(t *testing.T, fs vfs.FS) int {
	t.Helper()
	names, err := fs.List(Dir(testDir))
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

func TestTruncatedSegmentsAreUsedAgainAndTheirNumberIsBounded(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	for i := range 600 {
		e, err := a.put(bodyOf(uint64(i), 200))
		if err != nil {
			t.Fatal(err)
		}
		if i%20 == 0 {
			if err := a.log.TruncateBefore(e); err != nil {
				t.Fatal(err)
			}
		}
	}
	s := a.log.Stats()
	if s.Recycled < s.Rotations/2 {
		t.Fatalf("%d of %d segments recycled", s.Recycled, s.Rotations)
	}
	if s.Segments > 4 || fileCount(t, fs) > s.Segments+recyclableMin+1 {
		t.Fatalf("%d files for %d segments", fileCount(t, fs), s.Segments)
	}
	if s.Records != 600 || s.Syncs == 0 || s.Bytes != 600*(recordHeaderSize+200) {
		t.Fatalf("%+v", s)
	}
}

// creations counts the files that are created.
type creations struct {
	vfs.FS
	count *atomic.Int64
}

func (f creations) Open(name string, mode vfs.Mode) (vfs.File, error) {
	if mode == vfs.Create {
		f.count.Add(1)
	}
	return f.FS.Open(name, mode)
}

// TestAsManyFilesAreKeptAsATruncationFrees: a checkpoint frees several segments at once, and all of them become new ones. When
// truncations free fewer, fewer are kept.
func TestAsManyFilesAreKeptAsATruncationFrees(t *testing.T) {
	mem, made := vfs.NewMem(), new(atomic.Int64)
	a := mustStart(t, testOptions(creations{mem, made}, SegmentBytesMin))
	var last keys.Epoch
	fill := func(segments uint64) {
		for from := a.log.Stats().Rotations; a.log.Stats().Rotations < from+segments; {
			e, err := a.put(bodyOf(1, 200))
			if err != nil {
				t.Fatal(err)
			}
			last = e
		}
		if err := a.log.TruncateBefore(last); err != nil {
			t.Fatal(err)
		}
	}
	fill(12)
	waitForPreallocated(t, a.log)
	before := made.Load()
	for range 5 {
		fill(12)
	}
	waitForPreallocated(t, a.log)
	if n := made.Load() - before; n > 5*2 { // one that is filled and one that is ready are not free in time
		t.Errorf("%d files were created for 60 segments", n)
	}
	if n := fileCount(t, mem); n < 10 {
		t.Errorf("%d files after a truncation of twelve segments", n)
	}
	fill(1)
	if n := fileCount(t, mem); n < 7 {
		t.Errorf("%d files after a truncation of one segment between those of twelve", n)
	}
	for range 4 {
		fill(1)
	}
	waitForPreallocated(t, a.log)
	if n, s := fileCount(t, mem), a.log.Stats(); n > s.Segments+recyclableMin+1 {
		t.Errorf("%d files for %d segments after truncations of one", n, s.Segments)
	}
	mustClose(t, a.log)
}

// TestRecycledFileNeverYieldsItsOldRecords fills recycled files with records of one size, so that the old records are
// exactly at the offsets of the next records, and replays the log after every record.
func TestRecycledFileNeverYieldsItsOldRecords(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	after := keys.Epoch(0)
	for i := range 300 {
		e, err := a.put(bodyOf(uint64(i+1), 232))
		if err != nil {
			t.Fatal(err)
		}
		if i%10 == 9 {
			if err := a.log.TruncateBefore(e - 3); err != nil {
				t.Fatal(err)
			}
			after = e - 4
		}
		if i < 100 {
			continue
		}
		waitForPreallocated(t, a.log) // no file is renamed while the log is read
		rec, got := mustReplay(t, fs, after)
		if rec.Last != e || rec.Torn != nil {
			t.Fatalf("after %d records: last %d, torn %+v", e, rec.Last, rec.Torn)
		}
		for j, body := range got.bodies {
			if tag, ok := isBody(body); !ok || tag != uint64(got.first)+uint64(j) {
				t.Fatalf("epoch %d has the body of %d", int(got.first)+j, tag)
			}
		}
	}
	if a.log.Stats().Recycled == 0 {
		t.Fatal("nothing was recycled")
	}
}

func TestRecordIsReadOnlyWithTheIdentityItWasWrittenFor(t *testing.T) {
	rec := make([]byte, 64)
	copy(rec[recordHeaderSize:], bodyOf(1, 40))
	sealRecord(rec, seedOf(0x0123456789abcdef), 64, 9, 0, 8)
	if r, ok := decodeRecord(rec, seedOf(0x0123456789abcdef)); !ok || r.epoch != 9 || r.durable != 8 || !bytes.Equal(r.body, bodyOf(1, 40)) {
		t.Fatal("not read with its own identity")
	}
	for bit := range 64 {
		if _, ok := decodeRecord(rec, seedOf(0x0123456789abcdef^1<<bit)); ok {
			t.Fatalf("read with an identity that differs in bit %d", bit)
		}
	}
}

func TestSegmentsThatHoldNewerRecordsAreNotTruncated(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	for i := range 100 {
		if _, err := a.put(bodyOf(uint64(i), 200)); err != nil {
			t.Fatal(err)
		}
	}
	waitForPreallocated(t, a.log)
	before, _ := mustReplay(t, fs, 0)
	second := before.Segments[1].First
	if err := a.log.TruncateBefore(second - 1); err != nil { // epoch second-1 must stay
		t.Fatal(err)
	}
	if rec, _ := mustReplay(t, fs, 0); rec.Last != 100 || a.log.Stats().Recycled != 0 {
		t.Fatalf("last %d, %d segments recycled", rec.Last, a.log.Stats().Recycled)
	}
	if err := a.log.TruncateBefore(1000); err != nil { // all that is sealed may go, the open one stays
		t.Fatal(err)
	}
	last := before.Segments[len(before.Segments)-1].First
	if rec, _ := mustReplay(t, fs, last-1); rec.Last != 100 {
		t.Fatalf("last %d", rec.Last)
	}
	if _, err := a.put(bodyOf(1, 200)); err != nil {
		t.Fatal(err)
	}
}

func TestOldSegmentsOfEarlierRunsAreTruncatedToo(t *testing.T) {
	fs := vfs.NewMem()
	for range 8 {
		a := mustStart(t, testOptions2(fs))
		for i := range 60 {
			if _, err := a.put(bodyOf(uint64(i), 200)); err != nil {
				t.Fatal(err)
			}
		}
		mustClose(t, a.log)
	}
	a := mustStart(t, testOptions2(fs))
	waitForPreallocated(t, a.log)
	many := fileCount(t, fs)
	if err := a.log.TruncateBefore(481); err != nil {
		t.Fatal(err)
	}
	if n := fileCount(t, fs); n > 2+recyclableMax || n >= many {
		t.Fatalf("%d files of %d left", n, many)
	}
	mustClose(t, a.log)
	if rec, _ := mustReplay(t, fs, 480); rec.Last != 480 {
		t.Fatalf("last %d", rec.Last)
	}
}

func TestStalledRotationsAreCounted(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	for i := range 50 {
		if _, err := a.put(bodyOf(uint64(i), 5*pageSize)); err != nil { // each wants its own segment
			t.Fatal(err)
		}
	}
	if s := a.log.Stats(); s.Rotations < 50 || s.BufferBytes > (BuffersMin+2)*6*pageSize {
		t.Fatalf("%+v", s)
	}
}

// TestReplayFromBeforeATruncationFails: a replay that starts too early reports missing records, even if nothing was written
// since the truncation, and also after an earlier run.
func TestReplayFromBeforeATruncationFails(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions2(fs))
	for i := range 100 { // more segments than are kept
		if _, err := a.append(bodyOf(uint64(i), 5*pageSize)); err != nil {
			t.Fatal(err)
		}
	}
	reservation, outcome := a.cur.Load().Seal()
	if outcome != Crossed {
		t.Fatal(outcome)
	}
	next, err := a.log.NewSegment(context.Background(), reservation.Epoch, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.cur.Store(next)
	refused := func(when string) {
		t.Helper()
		var damage *CorruptionError
		rec, _, err := replayAll(fs, 50)
		for errors.Is(err, os.ErrNotExist) { // the open log recycles an old file meanwhile
			rec, _, err = replayAll(fs, 50)
		}
		if !errors.As(err, &damage) {
			t.Fatalf("%s: replay after 50 of a log truncated before 101 ends at %d: %v", when, rec.Last, err)
		}
	}
	if err := errors.Join(a.log.Flush(100), a.log.TruncateBefore(101)); err != nil {
		t.Fatal(err)
	}
	refused("truncated")
	mustClose(t, a.log)
	refused("closed")
	rec, _ := mustReplay(t, fs, 100)
	b, err := startLog(testOptions2(fs), rec)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.log.TruncateBefore(101); err != nil {
		t.Fatal(err)
	}
	refused("truncated by the next run")
	mustClose(t, b.log)
}

// TestDamagedHeaderBeforeTheReplayDoesNotKeepTheLog: an unreadable header that replay does not need must not prevent the
// truncation of the segments before it.
func TestDamagedHeaderBeforeTheReplayDoesNotKeepTheLog(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions2(fs))
	for i := range uint64(200) {
		if _, err := a.put(bodyOf(i, 200)); err != nil {
			t.Fatal(err)
		}
	}
	mustClose(t, a.log)
	rec, _ := mustReplay(t, fs, 0)
	if len(rec.Segments) < 5 {
		t.Fatal(len(rec.Segments))
	}
	patch(t, fs, rec.Segments[1].File, 20, []byte{0xff})
	after := rec.Segments[3].First
	rec, _ = mustReplay(t, fs, after)
	b, err := startLog(testOptions2(fs), rec)
	if err != nil {
		t.Fatal(err)
	}
	e, err := b.put(bodyOf(1, 200))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.log.TruncateBefore(e); err != nil {
		t.Fatal(err)
	}
	if n := b.log.Stats().Segments; n != 1 {
		t.Errorf("%d segments are kept, one is needed", n)
	}
	mustClose(t, b.log)
}

// TestTruncationsThatFailTogetherKeepTheOrder: the header of the newest segment cannot be written while two goroutines truncate,
// one further than the other. Each of them puts back what it has taken, in the order of the segments; otherwise the next
// truncation would take a segment for old whose successor has no durable header, and stop the log.
func TestTruncationsThatFailTogetherKeepTheOrder(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	last := a.mustRun(t, 100)
	if err := a.log.Flush(last); err != nil {
		t.Fatal(err)
	}
	r := &a.log.completed
	first := r.takeBefore(last / 2)
	second := r.takeBefore(last)
	r.putBack(first)
	r.putBack(second)
	for i := range r.segments[1:] {
		if r.segments[i].info.number >= r.segments[i+1].info.number {
			t.Fatalf("segment %d is before segment %d", r.segments[i].info.number, r.segments[i+1].info.number)
		}
	}
	if err := errors.Join(a.log.TruncateBefore(last), a.log.Err()); err != nil || len(first) == 0 || len(second) == 0 {
		t.Fatal(err)
	}
}

// TestASegmentThatWasDurableBeforeItsEndIsTruncated: no record comes after it with which the flusher would leave it.
func TestASegmentThatWasDurableBeforeItsEndIsTruncated(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewMem(), 64<<10))
	last, err := a.put(bodyOf(1, 100))
	if err != nil {
		t.Fatal(err)
	}
	if err := a.log.Flush(last); err != nil {
		t.Fatal(err)
	}
	reservation, outcome := a.cur.Load().Seal()
	if outcome != Crossed {
		t.Fatal(outcome)
	}
	if _, err := a.log.NewSegment(t.Context(), reservation.Epoch, 0); err != nil {
		t.Fatal(err)
	}
	if err := a.log.LeaveDurable(); err != nil {
		t.Fatal(err)
	}
	if err := a.log.TruncateBefore(reservation.Epoch); err != nil {
		t.Fatal(err)
	}
	if n := a.log.Stats().Segments; n != 1 {
		t.Errorf("the log has %d segments", n)
	}
}
