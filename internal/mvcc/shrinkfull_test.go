package mvcc

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// fullHeader is a store on which the header of the second log segment meets a full disk once. A checkpoint needs that
// header after its state is durable and published, to recycle the first segment; a copy-on-write file system may have
// no space for it.
type fullHeader struct {
	*testing.T
	store  *Store
	x      *Session
	faults *vfs.Faulty
	header *vfs.Injected
	want   map[string]string
}

func newFullHeader(t *testing.T) *fullHeader {
	t.Helper()
	mem := vfs.NewMem()
	faults := vfs.NewFaulty(mem)
	o := tiny(faults)
	o.SyncInterval, o.GCInterval = time.Hour, time.Hour
	o.Storage.CheckpointBytes, o.Storage.DiskReserve = 64<<20, storage.DiskReserveDerived
	s := mustOpen(t, o)
	f := &fullHeader{T: t, store: s, x: mustSession(t, s), faults: faults, want: map[string]string{}}
	t.Cleanup(f.x.Close)
	f.fill(0)
	for before := int64(-1); before != mem.Mutations(); time.Sleep(100 * time.Millisecond) {
		before = mem.Mutations() // the log prepares the second segment in the background; its header comes later
	}
	f.header = faults.Inject(vfs.Rule{Op: vfs.OpWrite, Name: "0000000000000002.log", Err: vfs.ErrNoSpace, Nth: 1})
	return f
}

// fill puts twenty keys.
func (f *fullHeader) fill(from int) {
	f.Helper()
	for i := from; i < from+20; i++ {
		key := fmt.Sprintf("k%05d", i)
		if _, err := put(f.x, key, "v", DurabilityAsync); err != nil {
			f.Fatal(err)
		}
		f.want[key] = "v"
	}
}

// TestFullDiskAfterPublishDoesNotMergeTwice: generations that a checkpoint published are not merged again because the log
// cannot be truncated.
func TestFullDiskAfterPublishDoesNotMergeTwice(t *testing.T) {
	f := newFullHeader(t)
	if err := f.store.Checkpoint(t.Context()); err != nil && !errors.Is(err, vfs.ErrNoSpace) {
		t.Error(err)
	}
	if f.header.Fired() == 0 {
		t.Error("no write of the header failed: the test proves nothing")
	}
	if generations := f.store.Stats().Storage.Generations; len(generations) != 1 {
		t.Errorf("generations after the checkpoint: %+v", generations)
	}
	f.header.Remove()
	f.fill(100)
	if err := f.store.Checkpoint(t.Context()); err != nil {
		t.Error(err)
	}
	mustHold(t, f.store, f.want)
}

// TestFullDiskAfterPublishLosesNoLaterCommits is the same while a writer fills the next memtable: it stays in the view.
func TestFullDiskAfterPublishLosesNoLaterCommits(t *testing.T) {
	f := newFullHeader(t)
	f.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "data.ekv", Nth: 3, Fault: vfs.Slow, Delay: 500 * time.Millisecond})
	done := make(chan error, 1)
	go func() { done <- f.store.Checkpoint(t.Context()) }()
	for deadline := time.Now().Add(5 * time.Second); f.header.Fired() == 0 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	f.fill(100)
	if err := f.store.engine.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil && !errors.Is(err, vfs.ErrNoSpace) { // of the header
		t.Error(err)
	}
	mustHold(t, f.store, f.want)
	f.header.Remove()
	if err := f.store.Checkpoint(t.Context()); err != nil {
		t.Error(err)
	}
	mustHold(t, f.store, f.want)
}
