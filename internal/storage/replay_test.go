package storage

import (
	"context"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// writeLog writes a log of so many puts into segments of the least size.
func writeLog(t *testing.T, fs vfs.FS, puts int) {
	t.Helper()
	l, err := wal.Open(wal.Options{FS: fs, Dir: "db", SegmentBytes: wal.SegmentBytesMin}, wal.Recovery{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.NewSegment(context.Background(), 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	body := func(i int) []byte {
		var b batch.Builder
		b.Reset()
		b.Set(keys.SpaceUser, []byte{byte(i >> 8), byte(i)}, make([]byte, 500))
		out, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	for i := 0; i < puts; {
		b := body(i)
		claim, outcome := s.Reserve(len(b))
		if outcome != wal.Reserved {
			if s, err = l.NewSegment(context.Background(), claim.Epoch, 0); err != nil {
				t.Fatal(err)
			}
			continue
		}
		copy(s.Body(claim), b)
		s.Publish(claim)
		i++
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func replayOptions(fs vfs.FS) Options {
	return Options{Dir: "db", FS: fs, MemoryBytes: 1 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: wal.SegmentBytesMin}
}

// TestTreeIsNotAheadOfALogThatIsReplayed: what replay has read may be only in the kernel's cache. It is synced before it is merged.
func TestTreeIsNotAheadOfALogThatIsReplayed(t *testing.T) {
	const puts = 3000
	disk, sound := vfs.NewMem(), vfs.NewMem()
	writeLog(t, disk, puts)
	writeLog(t, sound, puts)
	e, recovery, err := Open(t.Context(), replayOptions(sound), pin.NewRegistry(new(atomic.Uint64)))
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Close(); err != nil || recovery.Checkpoints == 0 {
		t.Fatalf("%d checkpoints while a sound log of that length is replayed: the test tests nothing; %v", recovery.Checkpoints, err)
	}
	fs := vfs.NewFaulty(disk)
	fs.Inject(vfs.Rule{Op: vfs.OpSync | vfs.OpSyncData, Name: "*.log", Err: syscall.EIO})
	e, _, err = Open(t.Context(), replayOptions(fs), pin.NewRegistry(new(atomic.Uint64)))
	if err == nil {
		t.Fatal("opened, though the log cannot be synced", e.Close())
	}
	report, err := Inspect.Files(t.Context(), disk, "db")
	if err != nil || len(report.Damages) > 0 || report.Epoch != 0 {
		t.Fatalf("the tree is at epoch %d, and nothing of the log was synced: %v, %v", report.Epoch, err, report.Damages)
	}
}

// TestReplayReportsItsProgress in whole segments, and of those only that it reads.
func TestReplayReportsItsProgress(t *testing.T) {
	fs := vfs.NewMem()
	writeLog(t, fs, 1000)
	segments, err := wal.Segments(fs, "db")
	if err != nil || len(segments) < 5 {
		t.Fatal(len(segments), err)
	}
	var told []ReplayProgress
	o := replayOptions(fs)
	o.OnReplay = func(p ReplayProgress) { told = append(told, p) }
	r := replayer{engine: &Engine{fs: fs, options: o}, after: segments[1].First + 1}
	for epoch := r.after + 1; epoch <= 1000; epoch++ {
		if err := r.progress(epoch); err != nil {
			t.Fatal(err)
		}
		r.lastReported = time.Time{}
	}
	size := segments[0].Bytes
	if len(told) != len(segments)-1 {
		t.Fatalf("told %d times about %d segments", len(told), len(segments))
	}
	for i, p := range told {
		if p.BytesTotal != size*int64(len(segments)-1) || p.Bytes != size*int64(i) {
			t.Errorf("in segment %d: %d of %d bytes, of %d segments of %d", i+1, p.Bytes, p.BytesTotal, len(segments), size)
		}
	}
}
