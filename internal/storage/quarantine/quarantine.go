// Package quarantine keeps the versions that the tree refuses in files beside it, so that they do not
// block checkpoints.
//
//	checkpoint:  pages ─► sync ─► unused quarantine file ─► sync ─► superblock names the file ─► sync ─► log given back
//	open:        superblock names a file ─► read it, without versions newer than its newest epoch ─► replay
//
// Terms. A quarantined key is a key of which at least one version is in quarantine; then all of its
// versions that were merged since are. There are two files, numbered 1 and 2. The newest superblock
// uses one of them or none; the next contents go into the unused one. A file holds every version in
// quarantine, by key, newest first, with the reason that the tree gave.
//
// Invariants:
//   - a version is in the log, in the tree, or in the used file, at every moment at which a crash may come: a file is durable before the superblock
//     that uses it, and that superblock is durable before the version leaves the log;
//   - of a key, everything in quarantine is newer than everything in the tree;
//   - the used file is never written. It holds its contents twice: damage in one place loses nothing;
//   - it is bounded: at most VersionsMax versions and BytesMax bytes.
//
// The used file needs no new sync after a start, not even after a failed one: the superblock that
// uses it was written after a sync of the file had succeeded.
//
// A file may be newer than its superblock, if two superblocks are damaged and an older one is used.
// The versions up to the superblock's newest epoch then still are what that state needs, for the file lacks
// only what newer commits, which are in the log and durable, have made invisible.
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
	// ErrUnwritten means that the file holds no contents yet: a kind of ErrDamaged, if a superblock uses the file.
	ErrUnwritten = fmt.Errorf("%w: nothing was written to the file", ErrDamaged)
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

// Read returns the versions in the file. A damaged copy beside an intact one is reported in fault.
// Errors: those of the file system, ErrDamaged and ErrVersion.
func Read(fs vfs.FS, path string) (versions []Version, fault, err error) {
	content, err := readContent(fs, path)
	if err != nil {
		return nil, nil, err
	}
	return decode(content)
}

// ReadRaw reads a file that Read accepts, as it is.
func ReadRaw(fs vfs.FS, path string) ([]byte, error) {
	content, err := readContent(fs, path)
	if err == nil {
		_, _, err = decode(content)
	}
	return content, err
}

// ReadUnknown is Read for a file of which nothing is known, not even whether a superblock uses it. As a reserve, the
// unused file gets another size. Then its first copy is still where it was, and is followed by anything.
func ReadUnknown(fs vfs.FS, path string) (versions []Version, fault, err error) {
	content, err := readContent(fs, path)
	if err != nil {
		return nil, nil, err
	}
	versions, fault, err = decode(content)
	if err == nil || errors.Is(err, ErrUnwritten) || errors.Is(err, ErrVersion) {
		return versions, fault, err
	}
	if first, firstErr := decodeCopy(cutFirstCopy(content)); firstErr == nil {
		return first, nil, nil
	}
	return nil, nil, err
}

func readContent(fs vfs.FS, path string) ([]byte, error) {
	f, err := fs.Open(path, vfs.ReadOnly)
	if err != nil {
		return nil, err
	}
	size, err := f.Size()
	if err == nil && size > fileBytesMax {
		err = fmt.Errorf("%w: %d bytes, at most %d are written", ErrDamaged, size, fileBytesMax)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	content := make([]byte, size)
	if _, err = f.ReadAt(content, 0); err != nil {
		err = readInParts(f, content)
	}
	return content, errors.Join(err, f.Close())
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
