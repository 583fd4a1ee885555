package wal

import (
	"errors"
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
