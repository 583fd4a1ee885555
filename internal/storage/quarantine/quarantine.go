// Package quarantine keeps the versions that the tree refuses in a file beside it, so that they do
// not block checkpoints.
//
//	checkpoint:  pages ─► sync ─► quarantine file ─► sync, rename, sync ─► superblock ─► sync ─► log given back
//	open:        superblock says that there is a file ─► read it, without versions newer than the superblock ─► replay
//
// Terms. A quarantined key is a key of which at least one version is in quarantine; then all of its
// versions that were merged since are. The file holds every version in quarantine, by key, newest
// first, with the reason that the tree gave.
//
// Invariants:
//   - a version is in the log, in the tree, or in the file, at every moment at which a crash may come: the file is durable before the superblock that
//     leaves the version out of the log's replay;
//   - of a key, everything in quarantine is newer than everything in the tree;
//   - the file is replaced as a whole, by a rename, and holds its contents twice: damage in one place loses nothing;
//   - it is bounded: at most VersionsMax versions and BytesMax bytes.
//
// The file may be newer than the superblock, if a checkpoint wrote it and did not finish. Its
// versions up to the superblock's epoch then still are what that state needs, for it lacks only
// what newer commits, which are in the log and durable, have made invisible.
//
// The package knows bytes, keys and files. Which versions go into quarantine, and which leave it,
// the engine decides.
package quarantine

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Bounds. The largest commit fits, so that no single one can block checkpoints; thousands of
// refused versions are no accident of one entry, and should be looked at.
const (
	VersionsMax = 4096
	BytesMax    = 80 << 20 // of keys, values and reasons
	ReasonMax   = 200      // bytes of a reason, which is for people
)

// Errors.
var (
	// ErrFull means that more is refused than the quarantine takes.
	ErrFull = errors.New("quarantine: full")
	// ErrDamaged means that both copies of the contents are damaged.
	ErrDamaged = errors.New("quarantine: damaged")
	// ErrVersion means that the file was written by a newer version.
	ErrVersion = errors.New("quarantine: newer format")
)

// Version is one version in quarantine.
type Version struct {
	Key     []byte // internal
	Trailer keys.Trailer
	Value   []byte
	Reason  string // why the tree refused the key; at most ReasonMax bytes
}

// Check reports whether the versions are within the bounds.
func Check(versions []Version) error {
	if len(versions) == 0 {
		return nil
	}
	bytes := 0
	for i := range versions {
		v := &versions[i]
		bytes += len(v.Key) + len(v.Value) + len(v.Reason)
	}
	if len(versions) > VersionsMax || bytes > BytesMax {
		first := &versions[0]
		return fmt.Errorf("%w: %d versions with %d bytes, at most %d and %d are kept; the tree refuses %.40q among others: %s",
			ErrFull, len(versions), bytes, VersionsMax, BytesMax, keys.User(first.Key), first.Reason)
	}
	return nil
}

// Write replaces the file by one with these versions. It is durable when Write returns; after an
// error the file is the old one or the new one.
func Write(fs vfs.FS, dir, path string, versions []Version) error {
	temporary := path + temporarySuffix
	if err := fs.Remove(temporary); err != nil && !isMissing(err) {
		return err
	}
	f, err := fs.Open(temporary, vfs.Create)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(encode(versions), 0)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := fs.Rename(temporary, path); err != nil {
		return err
	}
	return fs.SyncDir(dir)
}

// Read returns the versions in the file. A damaged copy beside an intact one is reported in fault.
// Errors: those of the file system, ErrDamaged and ErrVersion.
func Read(fs vfs.FS, path string) (versions []Version, fault, err error) {
	f, err := fs.Open(path, vfs.ReadOnly)
	if err != nil {
		return nil, nil, err
	}
	size, err := f.Size()
	if err == nil && size > fileBytesMax {
		err = fmt.Errorf("%w: %d bytes, at most %d are written", ErrDamaged, size, fileBytesMax)
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	content := make([]byte, size)
	if _, err = f.ReadAt(content, 0); err != nil {
		err = readInParts(f, content)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, nil, err
	}
	return decode(content)
}

// readInParts reads what can be read of a file that has places that the device cannot read, which
// stay zero.
func readInParts(f vfs.File, content []byte) error {
	const part = 4096
	for at := 0; at < len(content); at += part {
		if _, err := f.ReadAt(content[at:min(at+part, len(content))], int64(at)); err != nil && !errors.Is(err, vfs.ErrDevice) {
			return err
		}
	}
	return nil
}

// Remove removes the file and what a crash left of the next one, as far as they exist.
func Remove(fs vfs.FS, path string) error {
	for _, name := range []string{path, path + temporarySuffix} {
		if err := fs.Remove(name); err != nil && !isMissing(err) {
			return err
		}
	}
	return nil
}
