package wal

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestFilesThatWaitToBecomeSegmentsAreNoPartOfTheLog: the log keeps old files, of which some have become new segments when it
// ends. The next run does not take the others for a part of its log, which would have holes: its readers read from the oldest
// epoch on.
func TestFilesThatWaitToBecomeSegmentsAreNoPartOfTheLog(t *testing.T) {
	for rotations := range recyclableMax + 2 {
		for _, survival := range []vfs.Survival{vfs.SurviveProcess, vfs.SurviveAll, vfs.SurviveNone} {
			t.Run(fmt.Sprintf("%d rotations/survival %d", rotations, survival), func(t *testing.T) {
				fs := vfs.NewMem()
				a := mustStart(t, testOptions(fs, SegmentBytesMin))
				last := a.mustRun(t, 200) // of which a truncation frees more segments than are kept
				if err := errors.Join(a.log.Flush(last), a.log.TruncateBefore(last)); err != nil {
					t.Fatal(err)
				}
				for range rotations {
					last = a.mustRun(t, 20)
				}
				if err := a.log.Flush(last); err != nil {
					t.Fatal(err)
				}
				again := fs.Crash(1, survival)
				rec, _ := mustReplay(t, again, last-3)
				b, err := startLog(testOptions(again, SegmentBytesMin), rec)
				if err != nil {
					t.Fatal(err)
				}
				defer mustClose(t, b.log)
				oldest := b.log.OldestEpoch()
				r := b.log.ReadFrom(oldest, TailMark{})
				defer r.Close()
				if got := tailed(t, r, last); int64(len(got)) != int64(last-oldest+1) {
					t.Errorf("epochs %v, want %d to %d", got, oldest, last)
				}
				if s, files := b.log.Stats(), fileCount(t, again); files > s.Segments+recyclableMax+2 {
					t.Errorf("%d files for %d segments", files, s.Segments)
				}
			})
		}
	}
}

// TestHoleAmongOldSegmentsIsNoDamage: a start finds old segments of which some are missing, as earlier versions left them, or as a
// crash has brought them back, perhaps without close records. The commits before the hole are of no use, and those in the hole
// are not in the log any more. Without a hole the same is damage.
func TestHoleAmongOldSegmentsIsNoDamage(t *testing.T) {
	for _, closed := range []bool{true, false} {
		for _, hole := range []bool{true, false} {
			t.Run(fmt.Sprintf("close record %v/hole %v", closed, hole), func(t *testing.T) { testHole(t, closed, hole) })
		}
	}
}

func testHole(t *testing.T, closed, hole bool) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	last := a.mustRun(t, 100)
	mustClose(t, a.log)
	rec, _ := mustReplay(t, fs, last)
	before, oldest := rec.Segments[2], rec.Segments[4].First
	if hole {
		if err := fs.Remove(rec.Segments[3].File); err != nil {
			t.Fatal(err)
		}
	}
	if !closed {
		err := ReadSegment(fs, before, func(r Record) error {
			if r.Flags&flagClose != 0 {
				_ = patch(t, fs, before.File, r.Offset, make([]byte, closeRecordSpace))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if !hole { // damage of the last record
		_ = patch(t, fs, before.File, lastRecordOf(t, fs, before)+recordHeaderSize, []byte{0xff, 0xff, 0xff})
	}
	rec, _ = mustReplay(t, fs, last)
	b, err := startLog(testOptions(fs, SegmentBytesMin), rec)
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, b.log)
	for from := keys.Epoch(1); from < rec.Segments[3].First; from++ {
		r := b.log.ReadFrom(from, TailMark{})
		ok, err := true, error(nil)
		for ok && err == nil {
			_, ok, err = r.Next(last)
		}
		truncated, is := errors.AsType[*TruncatedError](err)
		if is != hole || is && truncated.Oldest != oldest || !is && !errors.Is(err, ErrCorrupt) {
			t.Errorf("from epoch %d: %v", from, err)
		}
		_ = r.Close()
	}
	r := b.log.ReadFrom(oldest, TailMark{})
	defer r.Close()
	wantTail(t, tailed(t, r, last), int64(oldest), int64(last))
}

// lastRecordOf is the offset of the last record with an epoch.
func lastRecordOf(t *testing.T, fs vfs.FS, s SegmentInfo) (offset int64) {
	t.Helper()
	err := ReadSegment(fs, s, func(r Record) error {
		if r.HoldsEpoch() {
			offset = r.Offset
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return offset
}

// TestOldFileThatCannotBeRenamedIsRemoved: the log goes on, with a new file.
func TestOldFileThatCannotBeRenamedIsRemoved(t *testing.T) {
	e := mustStartErrnoLog(t)
	e.mustRotate(t, recyclableMax+6)
	truncated := e.acknowledged - 4
	rule := e.faulty.Inject(vfs.Rule{Op: vfs.OpRename, Name: "*" + fileSuffix})
	if err := e.log.TruncateBefore(truncated + 1); err != nil {
		t.Fatal(err)
	}
	if rule.Fired() == 0 || e.log.Stats().Recycled != 0 {
		t.Fatalf("%d failures, %d files kept", rule.Fired(), e.log.Stats().Recycled)
	}
	if n := fileCount(t, e.mem); n > 4 {
		t.Errorf("%d files are left", n)
	}
	rule.Remove()
	e.mustRotate(t, 6)
	e.mustKeep(t, truncated)
}
