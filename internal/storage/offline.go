package storage

import (
	"context"
	"fmt"
	"io"

	"github.com/epochkv/epochkv/internal/vfs"
)

// lockOffline prepares work on the files of a store that is not open: it must exist, and its lock is taken. The caller closes the
// lock. Errors: ErrNoStore, before anything is created; vfs.ErrLocked if the store is open; and those of the file system.
func lockOffline(fsys vfs.FS, dir string) (*Options, io.Closer, error) {
	options := &Options{Dir: dir, FS: fsys}
	options.setDefaults()
	names, err := options.FS.List(dir)
	if err != nil {
		return nil, nil, err
	}
	if !holdsStore(names) {
		return nil, nil, fmt.Errorf("%s: %w", dir, ErrNoStore)
	}
	lock, err := options.FS.Lock(options.lockPath())
	return options, lock, err
}

// unlessDamage is the error that ends a walk over damaged files, or nil if err is damage, beside which it goes on.
func unlessDamage(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if isDamage(err) {
		return nil
	}
	return err
}
