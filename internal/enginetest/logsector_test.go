package enginetest

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestAnUnreadableSectorOfTheLogIsDamage: when the device cannot read a page of the log, verification and salvage end, and the store
// starts with all commits, or names the file, and starts with the commits before the page after a repair of the log.
func TestAnUnreadableSectorOfTheLogIsDamage(t *testing.T) {
	mem := vfs.NewMem()
	o := tiny(mem)
	o.Storage.CheckpointBytes = 64 << 20
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	var committed []keys.Epoch
	for i := range 150 {
		committed = append(committed, mustPut(t, s, "key", fmt.Sprintf("%d %0700d", i, 0)))
	}
	mem = mem.Crash(1, vfs.SurviveAll)
	_ = s.Close()
	names, err := mem.List(wal.Dir("db"))
	if err != nil {
		t.Fatal(err)
	}
	repaired, harmless, salvaged := 0, 0, 0
	for _, name := range names {
		for _, page := range []int{0, 1, 4, 15} {
			if !strings.HasSuffix(name, ".log") {
				continue
			}
			faulty := vfs.NewFaulty(mem.Crash(1, vfs.SurviveProcess))
			rule := faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: name, Fault: vfs.Unreadable, Bytes: page << 12})
			o.Storage.FS = faulty
			last, found := startWithout(t, o, name, committed)
			if last < len(committed)-1 {
				if repaired++; found > last {
					salvaged++
				}
			} else if rule.Fired() > 0 {
				harmless++
			}
		}
	}
	if repaired < 4 || harmless == 0 || salvaged < repaired-1 {
		t.Errorf("%d repairs, before %d of which salvage found later commits, and %d pages that do not matter, of %q", repaired, salvaged, harmless, names)
	}
}

// startWithout starts a store of whose log a part of a file cannot be read, and returns the index of the newest commit that it has, and of the newest
// one that salvage brings out before.
func startWithout(t *testing.T, o mvcc.Options, name string, committed []keys.Epoch) (last, salvaged int) {
	t.Helper()
	report, err := inspect.VerifyDir(context.Background(), o.Storage.FS, "db", inspect.VerifyOptions{})
	if err != nil {
		t.Fatalf("verify: %v", err)
	}
	salvaged = -1
	if _, err := inspect.Salvage(context.Background(), o.Storage.FS, "db", func(e *inspect.Salvaged) error {
		_, err := fmt.Sscan(string(e.Value), &salvaged)
		return err
	}); err != nil {
		t.Fatalf("salvage: %v", err)
	}
	last = len(committed) - 1
	s, err := mvcc.Open(o)
	if report.OK() != (err == nil) {
		t.Fatalf("verify finds %+v; start: %v", report.Damages, err)
	}
	if err != nil {
		var damage *storage.CorruptionError
		if !errors.As(err, &damage) || path.Base(damage.File) != name || !strings.Contains(err.Error(), "input/output error") {
			t.Fatalf("start without a part of %s: %v", name, err)
		}
		dropped, failed := inspect.RepairLog(o.Storage.FS, "db")
		if failed != nil || dropped.Cause == nil {
			t.Fatalf("repair after %v: %v", err, failed)
		}
		for last >= 0 && committed[last] >= dropped.From {
			last--
		}
		if s, err = mvcc.Open(o); err != nil {
			t.Fatalf("start after a repair: %v", err)
		}
	}
	x := mustSession(t, s)
	v, err := x.Get(nil, []byte("key"), 0)
	x.Close()
	if got := -1; err != nil {
		t.Fatal(err)
	} else if _, _ = fmt.Sscan(string(v.Data), &got); got != last {
		t.Fatalf("commit %d is the newest, want %d", got, last)
	}
	mustPut(t, s, "key", "goes on")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return last, salvaged
}
