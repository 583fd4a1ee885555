package storage

import "path"

// Names in the data directory. All of them stand here, but for log segments, whose names belong to the log.
const (
	lockName = "LOCK"
	dataName = "data.ekv"

	// Temporary files of a bulk load: prefix, number, suffix. What a crash left is removed at start-up.
	spoolPrefix = "bulk-"
	spoolSuffix = ".tmp"
)

func (o *Options) lockPath() string { return path.Join(o.Dir, lockName) }
func (o *Options) dataPath() string { return path.Join(o.Dir, dataName) }
