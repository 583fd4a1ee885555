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
// kept. A later start can read it. Holds that the first start has read stay.
func TestAHoldThatADamagedPageHidDoesNotComeBack(t *testing.T) {
	for _, what := range []string{"hold", "floor"} {
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
			if what == "hold" {
				x := mustSession(t, s)
				for range 10 {
					if _, err := x.TakeHold(t.Context(), strings.Repeat("o", 100), 0, time.Hour); err != nil {
						t.Fatal(err)
					}
					mustPut(t, s, "key", "new")
				}
				x.Close()
				at = s.Holds()[0].Epoch
				record = keys.Append(nil, keys.SpaceSystem, holdKey(s.Holds()[0].ID))
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
			if (what == "hold") != (len(known) > 0) || s.LowWatermark() <= at {
				t.Fatalf("the start has read %v, low watermark %d: the test tests nothing", known, s.LowWatermark())
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
				if got := s.timeline.holds[h.ID]; got == nil || *got != h {
					t.Errorf("hold %+v is %+v", h, got)
				}
			}
		})
	}
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
