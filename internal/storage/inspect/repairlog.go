package inspect

import (
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// RepairedLog says what RepairLog took away.
type RepairedLog = wal.Dropped

// RepairLog cuts a corrupt log at the first record that cannot be read. It loses acknowledged commits, so that only an operator may decide
// on it. A sound log, or one that ends in a torn record, is left as it is. The store must not be open.
func RepairLog(fsys vfs.FS, dir string) (dropped RepairedLog, err error) {
	files, lock, err := storage.LockFiles(fsys, dir)
	if err != nil {
		return RepairedLog{}, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	state, err := files.OpenState()
	if err != nil {
		return RepairedLog{}, storage.TranslateError(err)
	}
	after, segment := state.Pages.State().Epoch, state.LogSegment()
	if state.Pages.SuperblockMissing() {
		if _, err := wal.Replay(files.FS, dir, after, 0, func(keys.Epoch, []byte) error { return nil }); err != nil {
			return RepairedLog{}, errors.Join(state.ExplainLog(err), state.Close())
		}
	}
	if err := state.Close(); err != nil {
		return RepairedLog{}, err
	}
	return wal.Repair(files.FS, dir, after, segment)
}
