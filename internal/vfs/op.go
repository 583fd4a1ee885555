package vfs

import "strings"

// Op is a set of operations of FS and File. Rules and hooks use it to select operations.
type Op uint32

// The operations. A request of a batch counts as one OpRead or OpWrite.
const (
	OpOpen Op = 1 << iota
	OpCreate
	OpRead
	OpWrite
	OpTruncate
	OpPreallocate
	OpSync
	OpSyncData
	OpRename
	OpRemove
	OpMkdir
	OpSyncDir
	OpList
	OpSize
	OpLock
	OpFree
	OpClose

	opEnd
)

const (
	// OpAny is every operation.
	OpAny = opEnd - 1
	// OpMutating is the operations that change what may remain after a crash.
	OpMutating = OpCreate | OpWrite | OpTruncate | OpPreallocate | OpSync | OpSyncData | OpRename | OpRemove |
		OpMkdir | OpSyncDir
	// OpAnySync is the operations that make something durable.
	OpAnySync = OpSync | OpSyncData | OpSyncDir
)

// opNames is in the order of the constants.
var opNames = [...]string{
	"open", "create", "read", "write", "truncate", "preallocate", "sync", "syncdata", "rename", "remove", "mkdir",
	"syncdir", "list", "size", "lock", "free", "close",
}

// String lists the operations of the set, joined by "|".
func (o Op) String() string {
	var names []string
	for i, name := range opNames {
		if o&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, "|")
}
