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

// giveName renames a directory whose store is whole. If that fails, the directory has the mark again before it is removed.
func giveName(partial, dir string, syncDir func(dir string) error) error {
	err := renameFinished(partial, dir, syncDir)
	if err == nil {
		return syncDir(filepath.Dir(dir))
	}
	if again := markUnfinished(partial); !errors.Is(again, fs.ErrExist) {
		err = errors.Join(err, again)
	}
	return err
}

// renameFinished removes the mark first: what has the name must not have it after a crash.
func renameFinished(partial, dir string, syncDir func(dir string) error) error {
	if err := os.Remove(filepath.Join(partial, unfinishedFile)); err != nil {
		return err
	}
	if err := syncDir(partial); err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) { // an empty directory
		return err
	}
	return os.Rename(partial, dir)
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
