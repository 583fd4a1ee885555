package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"path"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

var errReadTooMuch = errors.New("more was read than a search needs")

// meteredFS fails reads once they have read more than a budget.
type meteredFS struct {
	vfs.FS
	left *int64
}

type meteredFile struct {
	vfs.File
	left *int64
}

func (f meteredFS) Open(name string, mode vfs.Mode) (vfs.File, error) {
	file, err := f.FS.Open(name, mode)
	if err != nil {
		return nil, err
	}
	return meteredFile{file, f.left}, nil
}

func (f meteredFile) ReadAt(p []byte, off int64) (int, error) {
	if *f.left -= int64(len(p)); *f.left < 0 {
		return 0, errReadTooMuch
	}
	return f.File.ReadAt(p, off)
}

// TestSearchInAnEmptyRecycledSegmentIsLinear: the header of a recycled file is durable and no record is, as in a store
// that was idle when it was killed. Its old contents are values of which each word looks like the length of a long
// record; a replay that computes the checksum of each of them would practically never end.
func TestSearchInAnEmptyRecycledSegmentIsLinear(t *testing.T) {
	const segment = 4 << 20
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, segment))
	for range 16 {
		e, err := a.put(bytes.Repeat([]byte{0, 0, 16, 0}, segment/8)) // as a length 1 MiB
		if err != nil {
			t.Fatal(err)
		}
		if err := a.log.TruncateBefore(e); err != nil {
			t.Fatal(err)
		}
	}
	if a.log.Stats().Recycled < 4 {
		t.Fatal("no file was recycled")
	}
	a.mustSealAndTruncate(t)
	left := fs.Crash(1, vfs.SurviveNone)
	rec, err := Replay(left, testDir, 16, Proof{}, ignored)
	if err != nil || len(rec.Segments) == 0 {
		t.Fatal(rec, err)
	}
	newest := rec.Segments[len(rec.Segments)-1].File
	if size, err := left.Size(newest); err != nil || size != segment {
		t.Fatal(size, err)
	}
	stale := make([]byte, 8)
	readAt(t, left, newest, segment/4, stale)
	if binary.LittleEndian.Uint32(stale) == 0 {
		t.Fatal("the newest file is not a recycled one")
	}
	budget := int64(8 * segment)
	if _, err := Replay(meteredFS{left, &budget}, testDir, 16, Proof{}, ignored); err != nil {
		t.Fatal(err)
	}
}

func ignored(keys.Epoch, []byte) error { return nil }

// mustSealAndTruncate begins a new segment and truncates the log before it, so that its header is durable, and no record.
func (a *appender) mustSealAndTruncate(t *testing.T) {
	t.Helper()
	reservation, outcome := a.cur.Load().Seal()
	if outcome != Crossed {
		t.Fatal(outcome)
	}
	s, err := a.log.NewSegment(t.Context(), reservation.Epoch, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.cur.Store(s)
	if err := a.log.Flush(reservation.Epoch - 1); err != nil {
		t.Fatal(err)
	}
	if _, err := a.log.flushOnce(); err != nil { // leaves the sealed segment
		t.Fatal(err)
	}
	if err := a.log.TruncateBefore(reservation.Epoch); err != nil {
		t.Fatal(err)
	}
}

// TestDamagedSkipRecordIsDetectedByALaterRecord: a record after a skip record that cannot be read proves that the skip
// record was durable.
func TestDamagedSkipRecordIsDetectedByALaterRecord(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions2(fs))
	if _, err := a.put(bodyOf(1, 100)); err != nil {
		t.Fatal(err)
	}
	fs = fs.Crash(1, vfs.SurviveNone)
	a = mustStart(t, testOptions2(fs))
	for i := range uint64(3) {
		if _, err := a.put(bodyOf(i, 100)); err != nil {
			t.Fatal(err)
		}
	}
	fs = fs.Crash(1, vfs.SurviveNone)
	rec, _ := mustReplay(t, fs, 0)
	newest := rec.Segments[len(rec.Segments)-1]
	undo := patch(t, fs, newest.File, headerPage+recordHeaderSize, []byte{0xff})
	defer undo()
	var damage *CorruptionError
	if _, _, err := replayAll(fs, 0); !errors.As(err, &damage) || path.Base(damage.File) != path.Base(newest.File) || damage.Offset != headerPage {
		t.Fatalf("a replay over a damaged skip: %v", err)
	}
}
