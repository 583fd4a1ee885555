package mvcc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// awaitSync is a file system in which writes to the data file wait for a sync of it, if more than writesMax bytes were
// written since the last one.
type awaitSync struct {
	vfs.FS
	written atomic.Int64 // since the last sync
}

// writesMax leaves room for what is under way when the goroutine that syncs looks: it counts completed writes.
const writesMax = 36 << 20

// Open implements vfs.FS.
func (a *awaitSync) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := a.FS.Open(name, mode)
	if err != nil || !strings.HasSuffix(name, "data.ekv") {
		return f, err
	}
	return awaitSyncFile{f, a}, nil
}

type awaitSyncFile struct {
	vfs.File
	fs *awaitSync
}

func (f awaitSyncFile) WriteBatch(reqs []vfs.Request) error {
	for _, r := range reqs {
		f.fs.written.Add(int64(len(r.Buf)))
	}
	for began := time.Now(); f.fs.written.Load() > writesMax; time.Sleep(time.Millisecond) {
		if time.Since(began) > 10*time.Second {
			return errors.New("no sync")
		}
	}
	return f.File.WriteBatch(reqs)
}

func (f awaitSyncFile) SyncData() error {
	f.fs.written.Store(0)
	return f.File.SyncData()
}

// TestBulkLoadIsSyncedWhileItIsMerged: the device begins to write before the merge ends.
func TestBulkLoadIsSyncedWhileItIsMerged(t *testing.T) {
	testseed.SkipUnderRace(t)
	const count, valueBytes = 24_000, 2000
	fs := &awaitSync{FS: vfs.NewMem()}
	s := mustOpen(t, tiny(fs))
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	value := []byte(strings.Repeat("v", valueBytes))
	for i := range count {
		if err := l.Add(fmt.Appendf(nil, "%08d", i), value); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.Commit(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestCheckpointIsSyncedWhileItIsMerged: a checkpoint does not leave everything that it writes to one sync at its end, for
// which the syncs of the log would wait.
func TestCheckpointIsSyncedWhileItIsMerged(t *testing.T) {
	testseed.SkipUnderRace(t)
	const count, valueBytes = 24_000, 2000
	fs := &awaitSync{FS: vfs.NewMem()}
	o := tiny(fs)
	o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.Storage.CheckpointBytes = 64<<20, 64<<20, 128<<20
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	value := strings.Repeat("v", valueBytes)
	for i := range count {
		if _, err := put(x, fmt.Sprintf("%08d", i), value, DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
}
