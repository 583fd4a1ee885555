package enginetest

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestWhatIsKeptOfTheLogRefusesNoWrite: what the log keeps for watches that come back takes the disk, and gives way to writes, also to those that
// need a file of their own. A large record also needs room for its pages, beside the pages of the records that no merge has taken yet.
func TestWhatIsKeptOfTheLogRefusesNoWrite(t *testing.T) {
	testseed.SkipUnderRace(t)
	t.Run("small", func(t *testing.T) { keptLogRefusesNoWrite(t, 16<<20, 1000, 3*(16<<20)/1000) })
	t.Run("large", func(t *testing.T) { keptLogRefusesNoWrite(t, 48<<20, 2<<20, 48) })
}

func keptLogRefusesNoWrite(t *testing.T, disk int64, valueBytes, puts int) {
	t.Helper()
	fs := vfs.NewMem()
	o := reserving(fs)
	// Of what no merge has taken yet, however slow merges are, the disk has room for log and pages.
	o.Storage.MemoryBytes = disk / 3
	o.Storage.DiskReserve, o.Storage.ChangeLog = 4<<20, storage.ChangeLog{Age: time.Hour} // free pages are enough for the memtables
	s := mustOpen(t, o)
	fs.SetCapacity(disk)
	fs.SetHook(func(op vfs.Op, _ string) {
		if op == vfs.OpRemove { // a device takes a while to give files up
			time.Sleep(100 * time.Microsecond)
		}
	})
	x := mustSession(t, s)
	defer x.Close()
	value, given := strings.Repeat("v", valueBytes), uint64(0)
	for i := range puts {
		_, err := put(x, fmt.Sprint("k", i%(1+100_000/len(value))), value, mvcc.DurabilityAsync)
		if errors.Is(err, vfs.ErrNoSpace) {
			free, _ := fs.Free("db")
			t.Fatalf("put %d was refused: %v; a moment later %d bytes are free", i, err, free)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	for _, ended := range s.Stats().Storage.Log.HoldersEnded {
		given += ended
	}
	if given == 0 {
		t.Error("the log had room for all: this tests nothing")
	}
	fs.SetCapacity(0)
}

// TestADeletionWaitsForWhatIsKeptOfTheLog: it comes while the disk is full and the reserve of the log is used up, before the check of the reserve gives up
// what the log keeps.
func TestADeletionWaitsForWhatIsKeptOfTheLog(t *testing.T) {
	fs := vfs.NewMem()
	o := reserving(fs)
	o.Storage.DiskReserve, o.Storage.ChangeLog = 4<<20, storage.ChangeLog{Age: time.Hour}
	s := mustOpen(t, o)
	mustPut(t, s, "k", strings.Repeat("v", 1000))
	fs.LeaveFree(0)
	var first atomic.Bool
	fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpPreallocate && strings.Contains(name, "reserve-") && !first.Swap(true) {
			time.Sleep(200 * time.Millisecond)
		}
	})
	x := mustSession(t, s)
	defer x.Close()
	for i := range 500 {
		w := mvcc.Write{Durability: mvcc.DurabilityAsync}
		w.Delete(fmt.Appendf(nil, "%01000d", i))
		if _, err := x.Commit(t.Context(), &w); err != nil {
			t.Fatalf("deletion %d: %v", i, err)
		}
	}
	if ended := s.Stats().Storage.Log.HoldersEnded; !first.Load() || ended[wal.HolderYielded] == 0 {
		t.Errorf("%v: this tests nothing", ended)
	}
}
