package inspect

import (
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// RepairedLog says what RepairLog removed.
type RepairedLog = wal.Dropped

// RepairLog truncates a damaged log at the first record that cannot be read. Acknowledged commits
// are lost, so only an operator may decide on it. An intact log, or one that ends in a torn record,
// is not changed. The store must not be open.
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
	after, proof := state.Pages.State().Epoch, state.LogProof()
	if state.Pages.SuperblockMissing() {
		if _, err := wal.Replay(files.FS, dir, after, wal.Proof{}, func(keys.Epoch, []byte) error { return nil }); err != nil {
			return RepairedLog{}, errors.Join(state.ExplainLog(err), state.Close())
		}
	}
	if err := state.Close(); err != nil {
		return RepairedLog{}, err
	}
	return wal.Repair(files.FS, dir, after, proof)
}
