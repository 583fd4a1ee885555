package wal

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestReserveTakesNoSegmentThatWasTruncated: the reserve has files with all their blocks. A segment whose torn tail was
// truncated at the start of the log does not become one of them.
func TestReserveTakesNoSegmentThatWasTruncated(t *testing.T) {
	fs, rec, _ := smallLog(t, 30, false)
	last := rec.Segments[len(rec.Segments)-1]
	for _, p := range locationsOf(t, fs, rec) {
		if p.file == last.File {
			_ = patch(t, fs, last.File, p.off+20, make([]byte, SegmentBytesMin-p.off-20))
			break
		}
	}
	rec, _ = mustReplay(t, fs, 0)
	if rec.Torn == nil {
		t.Fatal("no torn tail")
	}
	opts := testOptions2(fs)
	opts.Reserve = len(rec.Segments)
	a, err := startLog(opts, rec)
	if err != nil {
		t.Fatal(err)
	}
	a.mustAppend(t, []byte("body"))
	a.mustSealAndTruncate(t)
	mustClose(t, a.log) // the goroutine that prepares segments takes recyclable files until then
	owned := append(slices.Clone(a.log.preallocator.reserve.files), a.log.preallocator.recyclable...)
	for _, name := range owned {
		if size, err := fs.Size(name); err != nil || size != int64(opts.SegmentBytes) {
			t.Errorf("%s has %d bytes of %d, %v", name, size, opts.SegmentBytes, err)
		}
	}
	names, err := fs.List(Dir(testDir))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasPrefix(name, reservePrefix) && !slices.Contains(owned, path.Join(Dir(testDir), name)) {
			t.Errorf("%s is neither of the reserve nor recyclable", name)
		}
	}
	if kept, _ := a.log.Reserve(); kept != opts.Reserve {
		t.Errorf("the reserve has %d files, want %d", kept, opts.Reserve)
	}
}

// TestFilesOfASparseCopyHaveTheirBlocks: in a copy of a log, what was allocated and never written is a hole, as programs that copy files make one.
// A start allocates it, before other files take the rest of the disk: the reserve is one, and no record meets a full disk.
func TestFilesOfASparseCopyHaveTheirBlocks(t *testing.T) {
	for _, full := range []bool{false, true} { // when the copy is started
		original := vfs.NewMem()
		opts := testOptions(original, 8*pageSize)
		opts.Reserve = 2
		a := mustStart(t, opts)
		if err := a.log.FillReserve(); err != nil {
			t.Fatal(err)
		}
		for i := range uint64(100) {
			if _, err := a.put(bodyOf(i, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		mustClose(t, a.log)
		sparse := sparseCopy(t, original)
		if full {
			sparse.LeaveFree(10 * pageSize)
		}
		rec, _ := mustReplay(t, sparse, 0)
		opts.FS = sparse
		a, err := startLog(opts, rec)
		if err != nil {
			t.Fatal(err)
		}
		short := a.log.FillReserve()
		if full != errors.Is(short, vfs.ErrNoSpace) {
			t.Fatalf("the reserve of a disk that is full, %v: %v", full, short)
		}
		kept, _ := a.log.Reserve()
		sparse.LeaveFree(0)
		if err := a.log.TruncateBefore(rec.Last + 1); err != nil {
			t.Fatal(err)
		}
		rotations := 0
		for segment := a.cur.Load(); err == nil; {
			if _, err = a.put(bodyOf(1, 1000)); a.cur.Load() != segment {
				segment, rotations = a.cur.Load(), rotations+1
			}
		}
		if !errors.Is(err, vfs.ErrNoSpace) || a.log.Err() != nil {
			t.Errorf("full %v: after %d new segments: %v", full, rotations, err)
		}
		if rotations < kept {
			t.Errorf("full %v: %d new segments, and the reserve had %d", full, rotations, kept)
		}
		sparse.SetCapacity(0)
		mustClose(t, a.log)
	}
}

// sharing is a file system in which all files share their blocks with a copy.
type sharing struct{ vfs.FS }

type sharingFile struct{ vfs.File }

func (sharingFile) SharesBlocks() bool { return true }

func (s sharing) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := s.FS.Open(name, mode)
	return sharingFile{f}, err
}

// TestFilesThatShareBlocksAreNoReserve: a write to them needs space, so that a full disk would end the log.
func TestFilesThatShareBlocksAreNoReserve(t *testing.T) {
	opts := testOptions(vfs.NewMem(), 8*pageSize)
	opts.Reserve = 2
	a := mustStart(t, opts)
	if err := a.log.FillReserve(); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	for _, want := range []int{2, 0} {
		if want == 0 {
			opts.FS = sharing{opts.FS}
		}
		a := mustStart(t, opts)
		if kept, _ := a.log.Reserve(); kept != want {
			t.Errorf("the reserve has %d files, want %d", kept, want)
		}
		if err := a.log.FillReserve(); err != nil {
			t.Fatal(err)
		}
		if kept, _ := a.log.Reserve(); kept != 2 {
			t.Errorf("the reserve has %d files after it was filled", kept)
		}
		mustClose(t, a.log)
	}
}

// sparseCopy copies a log. Pages of zeros become holes.
func sparseCopy(t *testing.T, from *vfs.Mem) *vfs.Mem {
	t.Helper()
	to := vfs.NewMem()
	names, err := from.List(Dir(testDir))
	err = errors.Join(err, to.MkdirAll(Dir(testDir)))
	for _, name := range names {
		name = path.Join(Dir(testDir), name)
		size, failed := from.Size(name)
		source, opened := from.Open(name, vfs.ReadOnly)
		f, created := to.Open(name, vfs.Create)
		if err = errors.Join(err, failed, opened, created); err != nil {
			t.Fatal(err)
		}
		var page [pageSize]byte
		for at := int64(0); at < size; at += pageSize {
			if _, err := source.ReadAt(page[:], at); err != nil {
				t.Fatal(err)
			}
			if !allZero(page[:]) {
				_, failed = f.WriteAt(page[:], at)
				err = errors.Join(err, failed)
			}
		}
		err = errors.Join(err, f.Truncate(size), f.Sync(), f.Close(), source.Close())
	}
	if err = errors.Join(err, to.SyncDir(Dir(testDir))); err != nil {
		t.Fatal(err)
	}
	return to
}

// TestSmallerSegmentBytes: what tells the size of an earlier run are files whose size a segment can have, those of the reserve first.
func TestSmallerSegmentBytes(t *testing.T) {
	const reserve, size = 2, 64 << 10
	for name, c := range map[string]struct {
		sizes []int64 // of the reserve
		log   []int64 // of segments, the newest last
		want  int64
	}{
		"no directory":                     {},
		"smaller":                          {sizes: []int64{32 << 10, 32 << 10}, log: []int64{32 << 10}, want: 32 << 10},
		"the same":                         {sizes: []int64{size, size}, log: []int64{32 << 10}},
		"larger":                           {sizes: []int64{2 * size}, log: []int64{32 << 10}},
		"of several runs":                  {sizes: []int64{32 << 10, 2 * size, 16 << 10}, want: 16 << 10},
		"a start that was killed":          {sizes: []int64{32 << 10, size}, want: 32 << 10},
		"a start with a reserve":           {sizes: []int64{32 << 10, size, size}},
		"smallest":                         {sizes: []int64{SegmentBytesMin}, want: SegmentBytesMin},
		"no segment can have it":           {sizes: []int64{0, 4096, SegmentBytesMin + 1}},
		"cut by a crash":                   {sizes: []int64{0, 32 << 10}, want: 32 << 10},
		"only segments":                    {log: []int64{32 << 10, 32 << 10, 5000}, want: 32 << 10},
		"a segment of a large record":      {log: []int64{32 << 10, 48 << 10}, want: 32 << 10},
		"segments of before, and the same": {log: []int64{32 << 10, size}},
	} {
		fs := vfs.NewMem()
		write := func(name string, size int64) {
			f, err := fs.Open(path.Join(Dir(testDir), name), vfs.Create)
			if err == nil {
				err = errors.Join(f.Truncate(size), f.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if len(c.sizes)+len(c.log) > 0 {
			if err := fs.MkdirAll(Dir(testDir)); err != nil {
				t.Fatal(err)
			}
			write("other", SegmentBytesMin)
		}
		for i, size := range c.sizes {
			write(fmt.Sprint(reservePrefix, i+1), size)
		}
		for i, size := range c.log {
			write(FileName(uint64(i+1)), size)
		}
		if got, err := SmallerSegmentBytes(fs, testDir, size, reserve); got != c.want || err != nil {
			t.Errorf("%s: %d, %v; want %d", name, got, err, c.want)
		}
	}
}
