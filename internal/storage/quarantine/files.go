package quarantine

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"github.com/epochkv/epochkv/internal/vfs"
)

// Files are the two files of an open store. The unused one has space for the next contents in
// advance, if Reserve has been called: on a full disk, deletions of quarantined keys would otherwise
// wait for space that only their checkpoint frees.
//
// Invariant: neither the used file nor one that was written for a superblock is changed, until a
// superblock that does not use it is durable.
type Files struct {
	fs    vfs.FS
	dir   string
	paths [2]string

	mu       sync.Mutex
	used     int   // the number of the used file; zero for none
	contents int64 // bytes of a copy in it
	kept     bool  // a superblock that may be durable may use the unused file: Reserve leaves it
	suspect  bool  // an operation on the unused file has failed: it is made anew
	reserved int64 // durable size of the unused file, as far as known
	leftover bool  // files may exist that nothing needs
}

// reserveHalfMin is the least space for one copy that Reserve keeps.
const reserveHalfMin = 64 << 10

// NewFiles returns the files of a store whose superblock uses the numbered one, with these versions.
// Reserve changes nothing before the first Use: the superblock may have been read from the page cache
// after a failed sync, and then a power cut brings the one before it back, with the other file.
func NewFiles(fsys vfs.FS, dir string, paths [2]string, used int, versions []Version) *Files {
	f := &Files{fs: fsys, dir: dir, paths: paths, kept: true}
	f.useLocked(used, versions)
	return f
}

// unused is the number of the file that takes the next contents.
func (f *Files) unused() int {
	if f.used == 1 {
		return 2
	}
	return 1
}

// Write makes these versions durable in the unused file, and returns its number for the superblock.
func (f *Files) Write(versions []Version) (number int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	number, copied := f.unused(), encode(versions)
	f.kept, f.reserved = true, 0
	err = f.change(number, int64(len(copied)), func(file vfs.File, size int64) error {
		half := make([]byte, size/2)
		copy(half, copied)
		if _, err := file.WriteAt(half, 0); err != nil {
			return err
		}
		_, err := file.WriteAt(half, size/2)
		return err
	})
	return number, err
}

// Reserve makes the unused file as large as the next contents may need: twice the present ones, so
// that each key can be deleted once more. The error matches vfs.ErrNoSpace if the disk is full.
func (f *Files) Reserve() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kept || f.reserved >= reserveFor(f.contents) {
		return nil
	}
	return f.change(f.unused(), f.contents, func(file vfs.File, size int64) error {
		if size < reserveFor(f.contents) {
			return fmt.Errorf("quarantine: reserve: %w", vfs.ErrNoSpace)
		}
		if err := vfs.Preallocate(file, size); err != nil { // a sparse copy of a file lacks blocks
			return fmt.Errorf("quarantine: reserve: %w", err)
		}
		f.reserved = size
		return nil
	})
}

// Use records that a superblock that is durable for certain uses the numbered file, with these
// versions, or none.
func (f *Files) Use(number int, versions []Version) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kept = false; number != f.used {
		f.useLocked(number, versions)
	}
}

func (f *Files) useLocked(number int, versions []Version) {
	f.used, f.contents, f.suspect, f.reserved, f.leftover = number, 0, false, 0, number == 0
	if number != 0 {
		f.contents = int64(len(encode(versions)))
	}
}

// Clean removes the files if nothing is in quarantine, but for the one that Reserve needs.
func (f *Files) Clean(reserve bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.leftover {
		return nil
	}
	for i, name := range f.paths {
		if reserve && i+1 == f.unused() {
			continue
		}
		if err := removeIfExists(f.fs, name); err != nil {
			return err
		}
	}
	f.leftover = false
	return nil
}

// change opens the numbered file with space for a copy of so many bytes, lets fill write to it, and
// makes it durable.
func (f *Files) change(number int, copyBytes int64, fill func(vfs.File, int64) error) error {
	name := f.paths[number-1]
	file, err := f.open(name)
	if err != nil {
		return err
	}
	size, err := enlarge(file, copyBytes)
	if err == nil {
		err = fill(file, size)
	}
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = f.fs.SyncDir(f.dir)
	}
	if err != nil {
		if f.reserved, f.suspect = 0, !errors.Is(err, vfs.ErrNoSpace); f.suspect { // another process would not know
			err = errors.Join(err, removeIfExists(f.fs, name))
		}
		return err
	}
	f.suspect = false
	return nil
}

// open opens a file, or makes it. After a failed sync the file or its name may not be on the device
// though a later sync succeeds, so both are made anew. If it could not be removed then, it is now.
func (f *Files) open(name string) (vfs.File, error) {
	if f.suspect {
		if err := removeIfExists(f.fs, name); err != nil {
			return nil, err
		}
	}
	file, err := f.fs.Open(name, vfs.ReadWrite)
	if errors.Is(err, fs.ErrNotExist) {
		return f.fs.Open(name, vfs.Create)
	}
	return file, err
}

// reserveFor is the size of a file for the contents that may follow a copy of so many bytes.
func reserveFor(copyBytes int64) int64 {
	return 2 * min(max(reserveHalfMin, alignCopy(2*copyBytes)), halfBytesMax)
}

// enlarge gives a file allocated space for what may follow a copy of so many bytes, or on a full disk
// at least for the copy. A file that is far larger becomes smaller. It returns the size, of which half
// is a multiple of copyAlign.
func enlarge(file vfs.File, copyBytes int64) (int64, error) {
	const tooLarge = 4
	want := reserveFor(copyBytes)
	size, err := file.Size()
	if err != nil {
		return 0, err
	}
	if size < want {
		err = vfs.Preallocate(file, want)
	} else if size > tooLarge*want {
		err = file.Truncate(want)
	}
	if err != nil && !errors.Is(err, vfs.ErrNoSpace) {
		return 0, err
	}
	full := err
	if size, err = file.Size(); err != nil {
		return 0, err
	}
	usable := min(size, fileBytesMax) / (2 * copyAlign) * (2 * copyAlign)
	if usable == 0 || usable < 2*alignCopy(copyBytes) {
		return 0, full
	}
	if usable != size {
		err = file.Truncate(usable)
	}
	return usable, err
}

// Restore writes the intact copy over the damaged one. A crash leaves the intact one as it is.
func Restore(fsys vfs.FS, path string) error {
	file, err := fsys.Open(path, vfs.ReadWrite)
	if err != nil {
		return err
	}
	return errors.Join(restore(file), file.Close())
}

func restore(file vfs.File) error {
	size, err := file.Size()
	if err != nil {
		return err
	}
	content, half := make([]byte, size), size/2
	if err := readInParts(file, content); err != nil {
		return err
	}
	intact, damaged := content[half:], int64(0)
	if _, err := decodeCopy(content[:half]); err == nil {
		intact, damaged = content[:half], half
	}
	if _, err := file.WriteAt(intact, damaged); err != nil {
		return err
	}
	return file.Sync()
}

func removeIfExists(fsys vfs.FS, name string) error {
	if err := fsys.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
