package mvcc

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
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
