package storage

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"

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

func (f Files) lockPath() string { return LockFile(f.Dir) }

// OpenState opens the newest durable state for reading. The caller closes it. Errors are those of
// pager.OpenSnapshot; TranslateError turns them into the engine's.
func (f Files) OpenState() (*DurableState, error) {
	p, err := pager.OpenSnapshot(f.FS, f.DataPath())
	if err != nil {
		return nil, err
	}
	state := p.State()
	if err := checkFeatureLevel(&state); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return &DurableState{Files: f, Pages: p}, nil
}

// OpenUnknownState opens a data file without a readable superblock: its pages can be read, and
// nothing is known of its tree. The caller closes it.
func (f Files) OpenUnknownState() (*DurableState, error) {
	p, err := pager.OpenRaw(f.FS, f.DataPath())
	if err != nil {
		return nil, err
	}
	return &DurableState{Files: f, Pages: p}, nil
}

// ReadAllQuarantine reads everything that the quarantine files hold, for when no state is known:
// also what is in the unused one. Damage of one copy of the contents next to an intact one is
// returned in fault, as a CorruptionError. If err is damage, it joins one CorruptionError for each file.
func (f Files) ReadAllQuarantine() (versions []quarantine.Version, fault, err error) {
	var faults, damages []error
	for _, name := range quarantinePaths(f.Dir) {
		found, damage, unreadable := quarantine.ReadUnknown(f.FS, name)
		if errors.Is(unreadable, fs.ErrNotExist) || errors.Is(unreadable, quarantine.ErrUnwritten) {
			continue
		}
		unreadable = quarantineError(name, unreadable)
		if _, damaged := errors.AsType[*CorruptionError](unreadable); unreadable != nil && !damaged {
			return nil, nil, unreadable
		}
		versions = append(versions, found...)
		faults, damages = append(faults, quarantineFault(name, damage)), append(damages, unreadable)
	}
	return versions, errors.Join(faults...), errors.Join(damages...)
}

// ReadQuarantine reads the quarantine that belongs to a state: nothing if the state says that there
// is none. Versions that are newer than what the tree may hold are left out, because their commits
// are in the log.
func (f Files) ReadQuarantine(state *pager.State) (versions []quarantine.Version, fault, err error) {
	versions, _, fault, err = f.readQuarantine(state)
	return versions, fault, err
}

// readQuarantine is ReadQuarantine, and reports whether the file has newer versions.
func (f Files) readQuarantine(state *pager.State) (versions []quarantine.Version, newer bool, fault, err error) {
	used := quarantineFile(state)
	if used == 0 {
		return nil, false, nil, nil
	}
	name := quarantinePaths(f.Dir)[used-1]
	all, damage, err := quarantine.Read(f.FS, name)
	if err != nil {
		return nil, false, nil, quarantineError(name, err)
	}
	newest := newestEpoch(state)
	for _, v := range all {
		if v.Trailer.Epoch() <= newest {
			versions = append(versions, v)
		}
	}
	return versions, len(versions) < len(all), quarantineFault(name, damage), nil
}

func quarantineError(name string, err error) error {
	switch {
	case errors.Is(err, quarantine.ErrDamaged) || errors.Is(err, fs.ErrNotExist):
		return &CorruptionError{File: name, Reason: err.Error(), Remedy: quarantineRemedy}
	case errors.Is(err, quarantine.ErrVersion):
		return fmt.Errorf("%w: %w", ErrNewerFormat, err)
	}
	return err
}

// quarantineFault is damage of one of the two copies in a file.
func quarantineFault(name string, damage error) error {
	if damage == nil {
		return nil
	}
	return &CorruptionError{File: name, Reason: damage.Error(), Remedy: "the other copy of the contents is intact, and the next start restores this one"}
}
