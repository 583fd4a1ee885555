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

// TestWhatIsKeptOfTheLogRefusesNoWrite: what the log keeps for watches that come back takes the disk, and gives way to writes.
func TestWhatIsKeptOfTheLogRefusesNoWrite(t *testing.T) {
	const disk = 16 << 20
	fs := vfs.NewMem()
	o := reserving(fs)
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
	value, given := strings.Repeat("v", 1000), uint64(0)
	for i := range 3 * disk / len(value) {
		_, err := put(x, fmt.Sprint("k", i%100), value, mvcc.DurabilityAsync)
		if short := new(storage.ShortageError); errors.As(err, &short) {
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
