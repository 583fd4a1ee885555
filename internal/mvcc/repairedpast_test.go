package mvcc

import (
	"cmp"
	"errors"
	"io"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestARepairOfTheLogBringsNoPastBack: a repair of the log drops the record that a hold has ended, or that the floor has gone. What was
// dropped from the tree since then must not be read.
func TestARepairOfTheLogBringsNoPastBack(t *testing.T) {
	for _, what := range []string{"hold", "floor"} {
		t.Run(what, func(t *testing.T) {
			o := tiny(vfs.NewMem())
			if what == "floor" {
				o.Retention = time.Hour
			}
			s := mustOpen(t, o)
			at := mustPut(t, s, "key", "old")
			x := mustSession(t, s)
			defer x.Close()
			var h Hold
			var err error
			if what == "hold" {
				if h, err = x.TakeHold(t.Context(), "test", at, time.Hour); err != nil {
					t.Fatal(err)
				}
			}
			mustPut(t, s, "key", "new")
			mustCheckpoint(t, s)
			if v := get(t, s, "key", at); v != "old" {
				t.Fatalf("%q", v)
			}
			if what == "hold" {
				_, err = x.EndHold(t.Context(), h.ID)
			} else {
				s.timeline.keep = 0 // as in a run without a retention
				err = s.endRetention(t.Context(), x)
			}
			if err != nil {
				t.Fatal(err)
			}
			repairWithoutTheEnd(t, s, &o)
			var since keys.Epoch // what comes after the repair stays readable
			for range 2 {
				s = mustOpen(t, o)
				x := mustSession(t, s)
				if since != 0 && o.Retention > 0 && get(t, s, "another", since) != "value 1" {
					t.Errorf("at %d: %q", since, get(t, s, "another", since))
				}
				if _, err := x.OpenSnapshot(at); !errors.As(err, new(*SnapshotGoneError)) {
					t.Errorf("epoch %d is read after the repair, with %q; holds %v", at, get(t, s, "key", at), s.Holds())
				}
				x.Close()
				since = cmp.Or(since, mustPut(t, s, "another", "value 1"))
				mustPut(t, s, "another", "value 2")
				mustCheckpoint(t, s)
				mustClose(t, s)
			}
		})
	}
}

// TestAHoldFromBeforeARepairIsNotRenewed: its owner would believe that versions are kept which may be gone, and those since then would be
// kept for it.
func TestAHoldFromBeforeARepairIsNotRenewed(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	at := mustPut(t, s, "key", "old")
	x := mustSession(t, s)
	defer x.Close()
	h, err := x.TakeHold(t.Context(), "test", at, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, "key", "new")
	mustCheckpoint(t, s)
	for range 3 {
		mustPut(t, s, "other", "value")
	}
	fs := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveAll)
	_ = s.Close()
	repairNewestSegment(t, fs, &o)
	s = mustOpen(t, o)
	x = mustSession(t, s)
	defer x.Close()
	if h, err := x.RenewHold(t.Context(), h.ID, time.Hour); !errors.Is(err, ErrNoHold) {
		t.Errorf("%+v, %v", h, err)
	}
}

// repairWithoutTheEnd lets merges drop versions, and a repair of the log drop what was committed after the last checkpoint of everything.
func repairWithoutTheEnd(t *testing.T, s *Store, o *Options) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); s.engine.Stats().Vacuum.Versions == 0; time.Sleep(time.Millisecond) {
		if err := s.mergeImmutables(t.Context()); err != nil || time.Now().After(deadline) {
			t.Fatalf("no version was dropped: %v", err)
		}
	}
	for range 3 {
		mustPut(t, s, "other", "value")
	}
	fs := o.Storage.FS.(*vfs.Mem).Crash(1, vfs.SurviveAll)
	_ = s.Close()
	repairNewestSegment(t, fs, o)
}

// repairNewestSegment damages the newest segment of a store that is closed, and repairs its log.
func repairNewestSegment(t *testing.T, fs *vfs.Mem, o *Options) {
	t.Helper()
	o.Storage.FS = fs
	damageNewestSegment(t, fs)
	if _, err := Open(*o); err == nil {
		t.Fatal("the damage is not found: the test proves nothing")
	}
	if dropped, err := inspect.RepairLog(fs, "db"); err != nil || dropped.Cause == nil {
		t.Fatalf("%+v, %v", dropped, err)
	}
}

// damageNewestSegment damages the first record of the newest segment.
func damageNewestSegment(t *testing.T, fs vfs.FS) {
	t.Helper()
	names, err := fs.List(wal.Dir("db"))
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, ".log") })
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range slices.Backward(names) {
		f, err := fs.Open(path.Join(wal.Dir("db"), name), vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		var b [40]byte
		if _, err = f.ReadAt(b[:], 0); err == nil && b != [40]byte{} {
			_, err = f.ReadAt(b[:], 4096)
			if b != [40]byte{} {
				b[30]++
				_, err = f.WriteAt(b[:], 4096)
				_ = f.Close()
				if err != nil {
					t.Fatal(err)
				}
				return
			}
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, io.EOF) { // the next segment was being created
			t.Fatal(err)
		}
	}
	t.Fatal("no segment has a record")
}
