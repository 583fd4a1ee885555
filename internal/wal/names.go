package wal

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/vfs"
)

// errNamesLost means that a sync of the directory has succeeded, and that a name may not be on the device.
var errNamesLost = errors.New("another sync of the directory has failed meanwhile, and may have lost the name")

// names makes the names in the log's directory durable. Several goroutines make names. After a failed sync the kernel may count the
// names of all of them as written, so that the next sync succeeds without them. A name is therefore durable only if no sync has failed
// since before it was made.
type names struct {
	fs  vfs.FS
	dir string

	mu     sync.Mutex    // held during a sync: one that fails does not end beside one that succeeds
	failed atomic.Uint64 // syncs
}

// begin is called before a name is made. Its result is for sync.
func (n *names) begin() uint64 { return n.failed.Load() }

// sync makes a name durable that was made since begin. After an error, the name must be made anew.
func (n *names) sync(begun uint64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err := n.fs.SyncDir(n.dir)
	if err != nil {
		n.failed.Add(1)
		return err
	}
	if n.failed.Load() != begun {
		return errNamesLost
	}
	return nil
}
