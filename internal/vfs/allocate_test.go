package vfs

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestAFileLargerThanTheFreeSpaceGrows on a file system that wants free space for all of a range, whatever is allocated of it, as XFS and ZFS do.
// Only what the file lacks counts.
func TestAFileLargerThanTheFreeSpaceGrows(t *testing.T) {
	const free, chunk, chunks = 256 << 10, 64 << 10, 16
	for name, test := range map[string]struct {
		holes  []int64 // chunks that are not allocated
		grow   int64
		refuse bool
	}{
		"whole file":              {},
		"whole file, and more":    {grow: chunk},
		"whole file, and all":     {grow: free},
		"whole file, too much":    {grow: free + chunk, refuse: true},
		"holes":                   {holes: []int64{0, 3, 4, 15}},
		"holes, and more":         {holes: []int64{1, 7}, grow: chunk},
		"holes, too many":         {holes: []int64{1, 3, 5, 7, 9}, refuse: true},
		"holes, and no room left": {holes: []int64{1, 3, 5, 7}, grow: chunk, refuse: true},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := os.Create(filepath.Join(t.TempDir(), "file"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			fd := int(f.Fd())
			if _, err := f.Write(make([]byte, chunks*chunk)); err != nil {
				t.Fatal(err)
			}
			if err := f.Sync(); err != nil { // so that the file system has allocated what was written
				t.Fatal(err)
			}
			for _, i := range test.holes {
				if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, i*chunk, chunk); err != nil {
					t.Skip(err)
				}
			}
			left := int64(free)
			err = allocate(fd, chunks*chunk+test.grow, func(fd int, off, length int64) error {
				if length > left {
					return unix.ENOSPC
				}
				left -= length
				return fallocate(fd, off, length)
			})
			if test.refuse {
				if err != unix.ENOSPC {
					t.Fatalf("more than is free: %v", err)
				}
				return
			}
			var st unix.Stat_t
			if failed := unix.Fstat(fd, &st); err != nil || failed != nil {
				t.Fatal(err, failed)
			}
			if want := chunks*chunk + test.grow; st.Size != want || st.Blocks*512 < want {
				t.Errorf("the file has %d bytes and blocks for %d, want %d", st.Size, st.Blocks*512, want)
			}
		})
	}
}

// TestAHoleThatIsFilledMeanwhileIsLeftOut: a writer may fill a hole after allocate has found it, and before it has found its end. Nothing is left to
// allocate, and the system refuses a range of no bytes, which would be a failed write of the file.
func TestAHoleThatIsFilledMeanwhileIsLeftOut(t *testing.T) {
	const page, pages, within = 4 << 10, 1 << 10, 200 * time.Millisecond // the writer is met after 3 ms, 40 ms at most
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	fd := int(f.Fd())
	if err := f.Truncate(pages * page); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	written := make(chan error, 1)
	go func() {
		for start := time.Now(); time.Since(start) < within && !stop.Load(); {
			if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, pages*page); err != nil {
				written <- err
				return
			}
			for i := range int64(pages) {
				_, _ = unix.Pwrite(fd, []byte{1}, i*page)
			}
		}
		written <- nil
	}()
	for {
		err := allocateHoles(fd, pages*page, func(_ int, off, length int64) error {
			if length <= 0 && !stop.Swap(true) {
				t.Errorf("%d bytes are to be allocated from %d", length, off)
			}
			return nil
		})
		if err != nil && !stop.Swap(true) {
			t.Error(err)
		}
		select {
		case err := <-written:
			if err != nil {
				t.Skip(err)
			}
			return
		default:
		}
	}
}
