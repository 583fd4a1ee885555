package enginetest

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAStartWithLargerSegmentsOnAFullDiskTakesDeletions: the files of the log's reserve have the size of an earlier run, and there is no room for
// larger ones. The store goes on with that size, until a start finds room. Meanwhile others take every byte that it gives back.
func TestAStartWithLargerSegmentsOnAFullDiskTakesDeletions(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, s *mvcc.Store, fs *vfs.Mem, want map[string]string) *vfs.Mem{
		"stopped":                                leaveStopped,
		"killed":                                 leaveKilled,
		"killed, without a reserve":              leaveWithoutReserve,
		"killed after a record of several files": leaveLargeRecord,
		"killed with old files":                  leaveOldFiles,
	} {
		for _, factor := range []int64{2, 8, 128} {
			t.Run(fmt.Sprint(name, ", times ", factor), func(t *testing.T) {
				t.Parallel()
				fs, want := vfs.NewMem(), map[string]string{}
				fs.SetCapacity(fullDiskBytes)
				former := reserving(fs)
				former.Storage.MemoryBytes = 4 << 20 // so that the log has few segments in memory
				s := mustOpen(t, former)
				fillSmall(t, s, want, 12000, "v")
				_ = fillDisk(t, s, want)
				fs = leave(t, s, fs, want)
				former.Storage.FS = fs
				larger := former
				larger.Storage.SegmentBytes *= factor

				s = mustOpen(t, larger)
				if kept := s.Recovery().SegmentBytes; kept != former.Storage.SegmentBytes {
					t.Errorf("segments of %d bytes, want %d", kept, former.Storage.SegmentBytes)
				}
				mustDeleteMany(t, s, fs, want)
				for i := 100; i < 9000; i += 400 { // in parts: one record of all has more than the reserve, if there is one
					mustDeleteRange(t, s, want, numbered(i), numbered(i+400))
				}
				awaitSpace(t, s, "later")
				want["later"] = "v"
				mustHold(t, s, want)
				_ = fillDisk(t, s, want)
				mustClose(t, s)

				fs.LeaveFree(0)
				s = mustOpen(t, former)
				if kept := s.Recovery().SegmentBytes; kept != 0 {
					t.Errorf("with the size of before: segments of %d bytes", kept)
				}
				mustDeleteMany(t, s, fs, want)
				mustClose(t, s)

				fs.SetCapacity(0)
				s = mustOpen(t, larger)
				awaitSpace(t, s, "with space")
				want["with space"] = "v"
				mustHold(t, s, want)
				mustClose(t, s)
				if kept := s.Recovery().SegmentBytes; kept != 0 {
					t.Errorf("with space: segments of %d bytes", kept)
				}
				mustHaveReserve(t, fs, larger.Storage.SegmentBytes)
			})
		}
	}
}

func leaveStopped(t *testing.T, s *mvcc.Store, fs *vfs.Mem, _ map[string]string) *vfs.Mem {
	t.Helper()
	mustClose(t, s)
	fs.LeaveFree(0)
	return fs
}

func leaveKilled(t *testing.T, s *mvcc.Store, fs *vfs.Mem, _ map[string]string) *vfs.Mem {
	t.Helper()
	left := fs.Crash(1, vfs.SurviveProcess)
	_ = s.Close()
	left.LeaveFree(0)
	return left
}

// leaveWithoutReserve removes what the log has as its reserve. Others take all but what a reserve of the former size needs: without one, a start on a
// disk without a free byte may refuse deletions.
func leaveWithoutReserve(t *testing.T, s *mvcc.Store, fs *vfs.Mem, want map[string]string) *vfs.Mem {
	t.Helper()
	fs = leaveKilled(t, s, fs, want)
	for _, name := range reserveFiles(t, fs) {
		if err := fs.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	fs.LeaveFree(2 * reserving(fs).Storage.SegmentBytes)
	return fs
}

// leaveLargeRecord ends the run after a record with a segment of its own.
func leaveLargeRecord(t *testing.T, s *mvcc.Store, fs *vfs.Mem, want map[string]string) *vfs.Mem {
	t.Helper()
	mustDeleteRange(t, s, want, numbered(5000), numbered(11990))
	return leaveKilled(t, s, fs, want)
}

// leaveOldFiles gives the log old files besides: without all of the former size, there is room for three segments of twice the size.
func leaveOldFiles(t *testing.T, s *mvcc.Store, fs *vfs.Mem, want map[string]string) *vfs.Mem {
	t.Helper()
	fs = leaveKilled(t, s, fs, want)
	fs.SetCapacity(0)
	for i := range 4 {
		f, err := fs.Open(fmt.Sprint("db/wal/reserve-", 1000+i), vfs.Create)
		if err == nil {
			err = errors.Join(vfs.Preallocate(f, reserving(fs).Storage.SegmentBytes), f.Sync(), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	fs.LeaveFree(0)
	return fs
}

// mustDeleteMany deletes keys one by one, while others take what becomes free.
func mustDeleteMany(t *testing.T, s *mvcc.Store, fs *vfs.Mem, want map[string]string) {
	t.Helper()
	n := 0
	for key := range maps.Clone(want) {
		fs.LeaveFree(0)
		mustDelete(t, s, key)
		delete(want, key)
		if n++; n == 50 {
			break
		}
	}
	mustHold(t, s, want)
}

// reserveFiles are the files of the log that hold no record.
func reserveFiles(t *testing.T, fs *vfs.Mem) (files []string) {
	t.Helper()
	names, err := fs.List("db/wal")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasPrefix(name, "reserve-") {
			files = append(files, "db/wal/"+name)
		}
	}
	return files
}

// mustHaveReserve checks that the log has a reserve with files of this size alone.
func mustHaveReserve(t *testing.T, fs *vfs.Mem, bytes int64) {
	t.Helper()
	files := reserveFiles(t, fs)
	if len(files) < 2 {
		t.Errorf("the reserve of the log has %q", files)
	}
	for _, name := range files {
		if size, err := fs.Size(name); size != bytes || err != nil {
			t.Errorf("%s has %d bytes (%v), want %d", name, size, err, bytes)
		}
	}
}
