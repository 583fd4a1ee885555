package wal

import (
	"errors"
	"fmt"

	"epochkv/internal/storage/keys"
	"epochkv/internal/vfs"
)

// Dropped is what a repair took away.
type Dropped struct {
	Cause *CorruptionError // what was wrong; nil if nothing was, and then nothing was dropped
	From  keys.Epoch       // every epoch from here on is gone
	Bytes int64            // cut from the damaged file; recycled leftovers count
	Files []string         // removed whole
}

// Repair cuts a corrupt log at the first record that cannot be read, and removes the segments after it. It loses
// commits that were acknowledged as durable, so that only an operator may decide on it. A log that Replay accepts is left as it is,
// and so is one of a newer version.
func Repair(fs vfs.FS, dataDir string, after keys.Epoch) (Dropped, error) {
	_, err := Replay(fs, dataDir, after, func(keys.Epoch, []byte) error { return nil })
	var cause *CorruptionError
	if !errors.As(err, &cause) {
		return Dropped{}, err
	}
	d := Dropped{Cause: cause, From: cause.Epoch}
	if err := d.removeFrom(fs, dataDir); err != nil {
		return d, err
	}
	if cause.Offset == 0 {
		return d, nil
	}
	return d, d.cut(fs)
}

// removeFrom removes the files behind the damage, and the damaged one if its header is what is damaged. The newest goes first
// and the cut comes last, so that a repair that is interrupted leaves a log that is still seen to be corrupt.
func (d *Dropped) removeFrom(fs vfs.FS, dataDir string) error {
	_, files, err := list(fs, Dir(dataDir))
	if err != nil {
		return err
	}
	for i := len(files) - 1; i >= 0; i-- {
		name := files[i].File
		if name < d.Cause.File || name == d.Cause.File && d.Cause.Offset > 0 {
			break
		}
		if err := fs.Remove(name); err != nil {
			return fmt.Errorf("wal: repair: %w", err)
		}
		if err := fs.SyncDir(Dir(dataDir)); err != nil {
			return fmt.Errorf("wal: repair: %w", err)
		}
		d.Files = append(d.Files, name)
	}
	return nil
}

func (d *Dropped) cut(fs vfs.FS) error {
	f, err := fs.Open(d.Cause.File, vfs.ReadWrite)
	if err != nil {
		return fmt.Errorf("wal: repair: %w", err)
	}
	size, err := f.Size()
	if err == nil {
		err = f.Truncate(d.Cause.Offset)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("wal: repair: %w", err)
	}
	d.Bytes = size - d.Cause.Offset
	return nil
}
