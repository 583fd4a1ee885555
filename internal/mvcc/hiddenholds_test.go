package mvcc

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAHoldThatADamagedPageHidDoesNotComeBack: a start could not read the record of a hold, or of the floor, and merges have dropped what it
// kept. A later start can read it. Holds that the first start has read stay, unless the page hides which have ended.
func TestAHoldThatADamagedPageHidDoesNotComeBack(t *testing.T) {
	for _, what := range []string{"hold", "first hold", "floor"} {
		t.Run(what, func(t *testing.T) {
			fs := vfs.NewMem()
			o := tiny(fs)
			o.Storage.PageSize = 512
			if what == "floor" {
				o.Retention = time.Hour
			}
			s := mustOpen(t, o)
			at := mustPut(t, s, "key", "old")
			record, userKey := keys.Append(nil, keys.SpaceSystem, floorKey), keys.Append(nil, keys.SpaceUser, []byte("key"))
			if what != "floor" {
				record = keys.Append(nil, keys.SpaceSystem, holdKey(holdBefore(t, s).ID))
				at = s.Holds()[9].Epoch
				if what == "first hold" {
					record = keys.Append(nil, keys.SpaceSystem, holdKey(s.Holds()[0].ID))
				}
			}
			for i := range 20 {
				mustPut(t, s, fmt.Sprint("filler ", i), strings.Repeat("v", 100))
			}
			mustPut(t, s, "key", "new")
			mustCheckpoint(t, s)
			mustClose(t, s)

			intact := dataFile(t, fs)
			if damageLeaves(t, fs, o.Storage.PageSize, func(first, last []byte) bool {
				return bytes.Compare(first, record) <= 0 && bytes.Compare(record, last) <= 0 && bytes.Compare(last, userKey) < 0
			}) == 0 {
				t.Fatal("no leaf is damaged")
			}
			damaged := dataFile(t, fs)
			o.Retention = 0
			s = mustStart(t, o)
			known := s.Holds()
			if (what == "floor") != (len(known) == 0) || s.LowWatermark() <= at {
				t.Fatalf("the start has read %v, low watermark %d", known, s.LowWatermark())
			}
			mustPut(t, s, "key", "newest")
			mustCheckpoint(t, s)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}

			restoreBytes(t, fs, intact, damaged)
			fs.SetCapacity(0)
			s = mustStart(t, o)
			defer func() { _ = s.Close() }()
			mustNotReadWrongly(t, s, "key", "old", at)
			for _, h := range known {
				if got := s.timeline.holds[h.ID]; what == "hold" && (got == nil || *got != h) {
					t.Errorf("hold %+v is %+v", h, got)
				}
			}
		})
	}
}

// TestAHiddenRecordKeepsWhatItDidUntilThatHasEnded: a start on a full disk can neither read the record of a hold, or of the floor, nor write that it means nothing any more.
// Its merges drop nothing, because the next start reads the record. Once there is space, the record is ended.
func TestAHiddenRecordKeepsWhatItDidUntilThatHasEnded(t *testing.T) {
	for _, c := range []struct {
		what  string
		space bool
	}{{"hold", false}, {"floor", false}, {"hold", true}, {"floor", true}} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			fs := vfs.NewMem()
			o := tiny(fs)
			o.Storage.PageSize, o.Storage.StartPatience = 512, time.Millisecond
			o.Storage.ChangeLog = storage.ChangeLog{Age: time.Hour, Bytes: 1 << 30} // so that starts find no file of the log to use again
			if c.what == "floor" {
				o.Retention = time.Hour
			}
			s := mustStart(t, o)
			for i := range 300 {
				mustPut(t, s, fmt.Sprintf("filler %03d", i), strings.Repeat("v", 100))
			}
			at, record := mustPut(t, s, "key", "old"), floorKey
			if c.what == "hold" {
				record = holdAmongOthers(t, s, at)
			}
			mustPut(t, s, "key", "new")
			mustCheckpoint(t, s)
			mustClose(t, s)
			start := func() (awaits bool) { // pages have room, and a segment of the log has not
				fs.LeaveFree(30_000)
				o.Storage.FS = fs
				s = mustStart(t, o)
				for range 5 {
					_ = s.Checkpoint(t.Context())
				}
				return s.engine.AwaitsSegment()
			}
			for starts := 0; !start(); starts++ {
				if starts == 60 {
					t.Fatal("each start has a segment")
				}
				fs = fs.Crash(1, vfs.SurviveProcess)
				_ = s.Close()
			}
			_ = s.Close()
			intact := dataFile(t, fs)
			mustDamageLeafOf(t, fs, &o, record)
			damaged := dataFile(t, fs)
			if !start() || s.LowWatermark() <= at {
				t.Fatalf("a segment is awaited: %v; the low watermark is %d", s.engine.AwaitsSegment(), s.LowWatermark())
			}
			if c.space {
				fs.SetCapacity(0)
			}
			for deadline := time.Now().Add(10 * time.Second); c.space && s.MinVisible() <= at; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("versions are kept from epoch %d on", s.MinVisible())
				}
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			restoreBytes(t, fs, intact, damaged)
			fs.SetCapacity(0)
			s = mustStart(t, o)
			defer func() { _ = s.Close() }()
			mustNotReadWrongly(t, s, "key", "old", at)
			if gone := s.LowWatermark() > at; gone != c.space {
				t.Errorf("the low watermark is %d; there was space: %v", s.LowWatermark(), c.space)
			}
		})
	}
}

// holdAmongOthers takes a hold of an epoch among holds of the newest one, and returns the key of its record.
func holdAmongOthers(t *testing.T, s *Store, at keys.Epoch) []byte {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	take := func(at keys.Epoch) Hold {
		h, err := x.TakeHold(t.Context(), strings.Repeat("o", 100), at, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	first := take(at)
	mustPut(t, s, "key", "between")
	for range 8 {
		take(0)
	}
	hold := take(at)
	for range 8 {
		take(0)
	}
	if _, err := x.EndHold(t.Context(), first.ID); err != nil {
		t.Fatal(err)
	}
	return holdKey(hold.ID)
}

// mustDamageLeafOf damages the leaves that may have a record of the store, and not what "key" has.
func mustDamageLeafOf(t *testing.T, fs *vfs.Mem, o *Options, record []byte) {
	t.Helper()
	record, user := keys.Append(nil, keys.SpaceSystem, record), keys.Append(nil, keys.SpaceUser, []byte("key"))
	if damageLeaves(t, fs, o.Storage.PageSize, func(first, last []byte) bool {
		return bytes.Compare(first, record) <= 0 && bytes.Compare(record, last) <= 0 && bytes.Compare(last, user) < 0
	}) == 0 {
		t.Fatal("no leaf is damaged")
	}
}

// TestAFullDiskTakesTheEndOfHiddenRecords: merges drop nothing before that, so that deletions would not free space.
func TestAFullDiskTakesTheEndOfHiddenRecords(t *testing.T) {
	for _, what := range []string{"hold", "floor", "floor of no retention"} {
		t.Run(what, func(t *testing.T) {
			fs := vfs.NewMem()
			o := tiny(fs)
			o.Storage.PageSize, o.Storage.StartPatience = 512, time.Millisecond
			if what != "hold" {
				o.Retention = time.Hour
			}
			s := mustStart(t, o)
			at, record := mustPut(t, s, "key", "old"), floorKey
			if what == "hold" {
				record = holdAmongOthers(t, s, at)
			}
			for i := range 20 {
				mustPut(t, s, fmt.Sprint("filler ", i), strings.Repeat("v", 100))
			}
			mustCheckpoint(t, s)
			mustClose(t, s)
			mustDamageLeafOf(t, fs, &o, record)
			if what == "floor of no retention" {
				o.Retention = 0
			}
			o.Storage.DiskReserve = 1 << 20
			fs.LeaveFree(0)
			s = mustStart(t, o)
			defer func() { _ = s.Close() }()
			if s.Shortage() == nil || s.engine.AwaitsSegment() {
				t.Fatalf("shortage: %v; a segment is awaited: %v", s.Shortage(), s.engine.AwaitsSegment())
			}
			if s.MinVisible() <= at {
				t.Errorf("versions are kept from epoch %d on; the low watermark is %d", s.MinVisible(), s.LowWatermark())
			}
		})
	}
}

// holdBefore takes ten holds, of which the last one has an earlier epoch than the others.
func holdBefore(t *testing.T, s *Store) (last Hold) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	take := func(at keys.Epoch) Hold {
		h, err := x.TakeHold(t.Context(), strings.Repeat("o", 100), at, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	first := take(0)
	for range 9 {
		mustPut(t, s, "key", "new")
		take(0)
	}
	last = take(first.Epoch)
	if _, err := x.EndHold(t.Context(), first.ID); err != nil {
		t.Fatal(err)
	}
	return last
}

// mustStart is mustOpen of a store that may be damaged when the test ends.
func mustStart(t *testing.T, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func dataFile(t *testing.T, fs vfs.FS) []byte {
	t.Helper()
	f, err := fs.Open("db/data.ekv", vfs.ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	size, err := f.Size()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, size)
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

// restoreBytes makes those bytes of the data file intact that were damaged.
func restoreBytes(t *testing.T, fs vfs.FS, intact, damaged []byte) {
	t.Helper()
	f, err := fs.Open("db/data.ekv", vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for i := range damaged {
		if damaged[i] == intact[i] {
			continue
		}
		if _, err := f.WriteAt(intact[i:i+1], int64(i)); err != nil {
			t.Fatal(err)
		}
	}
}
