package storage

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/quarantine"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Files are the files of a store. Package inspect opens them without an engine.
type Files struct {
	FS  vfs.FS
	Dir string
}

// LockFiles prepares work on the files of a store that is not open: the store must exist, and its
// lock is taken. The caller closes the lock. A nil file system is the operating system's. Errors:
// ErrNoStore, before anything is created; vfs.ErrLocked if the store is open; and those of the file
// system.
func LockFiles(fsys vfs.FS, dir string) (Files, io.Closer, error) {
	f := Files{fsys, dir}
	if f.FS == nil {
		f.FS = vfs.NewOS()
	}
	names, err := f.FS.List(dir)
	if err != nil {
		return f, nil, err
	}
	if !holdsStore(names) {
		return f, nil, fmt.Errorf("%s: %w", dir, ErrNoStore)
	}
	lock, err := f.FS.Lock(f.lockPath())
	return f, lock, err
}

// DataPath is the path of the data file.
func (f Files) DataPath() string { return path.Join(f.Dir, dataName) }

// QuarantinePath is the path of the quarantine file, which exists only while a version is in
// quarantine.
func (f Files) QuarantinePath() string { return path.Join(f.Dir, quarantineName) }

func (f Files) lockPath() string { return path.Join(f.Dir, lockName) }

// OpenState opens the newest durable state for reading. The caller closes it. Errors are those of
// pager.OpenSnapshot; TranslateError turns them into the engine's.
func (f Files) OpenState() (*DurableState, error) {
	p, err := pager.OpenSnapshot(f.FS, f.DataPath())
	if err != nil {
		return nil, err
	}
	return &DurableState{Files: f, Pages: p}, nil
}

// OpenUnknownState opens a data file without a readable superblock: its pages can be read, and
// nothing is known of its tree. The caller closes it.
func (f Files) OpenUnknownState() (*DurableState, error) {
	p, err := pager.OpenRaw(f.FS, f.DataPath(), 0)
	if err != nil {
		return nil, err
	}
	return &DurableState{Files: f, Pages: p}, nil
}

// ReadAllQuarantine reads everything that the quarantine file holds, for when no state is known:
// nothing if there is no file. A damaged copy of the contents next to an intact one is reported in
// fault.
func (f Files) ReadAllQuarantine() (versions []quarantine.Version, fault, err error) {
	if _, err := f.FS.Size(f.QuarantinePath()); err != nil {
		return nil, nil, nil //nolint:nilerr // no file
	}
	return f.readQuarantine(keys.MaxEpoch)
}

// ReadQuarantine reads the quarantine that belongs to a state: nothing if the state says that there
// is none. Versions that are newer than the state are left out, because their commits are in the
// log.
func (f Files) ReadQuarantine(state *pager.State) (versions []quarantine.Version, fault, err error) {
	if !hasQuarantine(state) {
		return nil, nil, nil
	}
	return f.readQuarantine(state.Epoch)
}

func (f Files) readQuarantine(epochMax keys.Epoch) (versions []quarantine.Version, fault, err error) {
	versions, fault, err = quarantine.Read(f.FS, f.QuarantinePath())
	switch {
	case errors.Is(err, quarantine.ErrDamaged) || errors.Is(err, fs.ErrNotExist):
		return nil, nil, &CorruptionError{File: f.QuarantinePath(), Reason: err.Error(), Remedy: quarantineRemedy}
	case errors.Is(err, quarantine.ErrVersion):
		return nil, nil, fmt.Errorf("%w: %w", ErrNewerFormat, err)
	case err != nil:
		return nil, nil, err
	}
	newer := func(v quarantine.Version) bool { return v.Trailer.Epoch() > epochMax }
	return slices.DeleteFunc(versions, newer), fault, nil
}
