package enginetest

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWhatIsKeptOfTheLogRefusesNoWrite: what the log keeps for watches that come back takes the disk, and gives way to writes, also to those that
// need a file of their own. A large record also needs room for its pages, beside the pages of the records that no merge has taken yet.
func TestWhatIsKeptOfTheLogRefusesNoWrite(t *testing.T) {
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
