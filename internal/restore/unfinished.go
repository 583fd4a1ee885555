package restore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/epochkv/epochkv/internal/vfs"
)

// ErrUnfinished means that a restore that was killed has left a directory. A store in it is that of the base, or has commits up to some record; it
// may still have the lineage and the tokens of the original.
var ErrUnfinished = errors.New("restore: the directory is what a restore that was killed has left")

// unfinishedFile is in a directory until its store is whole and verified. It is empty.
const unfinishedFile = "RESTORING"

// CheckFinished refuses a data directory that a restore has not finished. No server must serve it.
func CheckFinished(dir string) error {
	_, err := os.Lstat(filepath.Join(dir, unfinishedFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: %s; remove it, and run kvctl restore again", ErrUnfinished, dir)
}

// markUnfinished is called before there is a store in the directory.
func markUnfinished(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, unfinishedFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), vfs.NewOS().SyncDir(dir))
}

// markFinished is called before the directory gets its name, which must not have the mark after a crash.
func markFinished(dir string) error {
	if err := os.Remove(filepath.Join(dir, unfinishedFile)); err != nil {
		return err
	}
	return vfs.NewOS().SyncDir(dir)
}

// giveName renames a directory whose store is whole. If that fails, the directory has the mark again before it is removed.
func giveName(partial, dir string) error {
	if err := markFinished(partial); err != nil {
		return err
	}
	err := os.Remove(dir) // an empty directory
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = os.Rename(partial, dir)
	}
	if err != nil {
		return errors.Join(err, markUnfinished(partial))
	}
	return vfs.NewOS().SyncDir(filepath.Dir(dir))
}

// removeUnfinished removes the directory, and the mark after all else: a kill meanwhile leaves what has it.
func removeUnfinished(dir string, remove func(name string) error) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if e.Name() != unfinishedFile {
			if err := remove(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return remove(dir)
}
