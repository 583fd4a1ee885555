package storage

import (
	"errors"
	"path"
	"slices"

	"github.com/epochkv/epochkv/internal/wal"
)

// Names in the data directory. All of them stand here, but for log segments, whose names belong to the log.
const (
	lockName = "LOCK"
	dataName = "data.ekv"

	// Temporary files of a bulk load: prefix, number, suffix. What a crash left is removed at start-up.
	spoolPrefix = "bulk-"
	spoolSuffix = ".tmp"
)

// ErrNoStore means that a directory holds neither a data file nor a log.
var ErrNoStore = errors.New("storage: no store in this directory (neither " + dataName + " nor a log); check its name")

// holdsStore reports whether the names in a directory are those of a store. A lock file alone is none.
func holdsStore(names []string) bool {
	return slices.Contains(names, dataName) || slices.Contains(names, path.Base(wal.Dir("")))
}

func (o *Options) lockPath() string { return path.Join(o.Dir, lockName) }
func (o *Options) dataPath() string { return path.Join(o.Dir, dataName) }
