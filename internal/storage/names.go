package storage

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// Names in the data directory. All are listed here, except those of log segments, which belong to the log.
const (
	lockName = "LOCK"
	dataName = "data.ekv"

	// The two files for what the tree refuses. The superblock names the used one.
	quarantineName  = "quarantine.ekv"
	quarantine2Name = "quarantine-2.ekv"

	// Temporary files of a bulk load: prefix, number, suffix. Open removes those that a crash left.
	sortFilePrefix = "bulk-"
	sortFileSuffix = ".tmp"
)

// ErrNoStore means that a directory holds neither a data file nor a log.
var ErrNoStore = errors.New("storage: no store in this directory (neither " + dataName + " nor a log); check its name")

// holdsStore reports whether the names in a directory are those of a store. A lock file alone is none.
func holdsStore(names []string) bool {
	return slices.Contains(names, dataName) || slices.Contains(names, path.Base(wal.Dir("")))
}

// sortFilePath is the path of the temporary file of a bulk load with this number.
func (o *Options) sortFilePath(number int) string {
	return path.Join(o.Dir, fmt.Sprintf("%s%06d%s", sortFilePrefix, number, sortFileSuffix))
}

// removeSortFiles removes the temporary files of a bulk load that a crash ended.
func removeSortFiles(fs vfs.FS, dir string) error {
	names, err := fs.List(dir)
	for _, name := range names {
		if strings.HasPrefix(name, sortFilePrefix) && strings.HasSuffix(name, sortFileSuffix) {
			err = errors.Join(err, fs.Remove(path.Join(dir, name)))
		}
	}
	return err
}

func (o *Options) lockPath() string { return LockFile(o.Dir) }
func (o *Options) dataPath() string { return path.Join(o.Dir, dataName) }

// LockFile is the lock file of a data directory, which an open store has locked.
func LockFile(dir string) string { return path.Join(dir, lockName) }

// quarantinePaths are the paths of the two quarantine files in a data directory.
func quarantinePaths(dir string) [2]string {
	return [2]string{path.Join(dir, quarantineName), path.Join(dir, quarantine2Name)}
}
