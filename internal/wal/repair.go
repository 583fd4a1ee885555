package wal

import (
	"errors"
	"fmt"
	iofs "io/fs"
	"path"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
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
//
// A new segment takes the place of what is dropped. It skips every epoch that can have been in there, so that none is given out again. Its number
// is no less than the given one, which the data file knows (see Replay).
// The damage comes last: a repair that is interrupted leaves a log that is still seen to be corrupt, or one that is repaired.
func Repair(fs vfs.FS, dataDir string, after keys.Epoch, segment uint64) (Dropped, error) {
	_, err := Replay(fs, dataDir, after, segment, func(keys.Epoch, []byte) error { return nil })
	var cause *CorruptionError
	if !errors.As(err, &cause) {
		return Dropped{}, err
	}
	r := repair{fs: fs, dir: Dir(dataDir), Dropped: Dropped{Cause: cause, From: cause.Epoch}}
	if err := r.run(after, segment); err != nil {
		return r.Dropped, fmt.Errorf("wal: repair: %w", err)
	}
	return r.Dropped, nil
}

// lostEpochs is more than segments that are missing can have held: records of 24 TiB.
const lostEpochs = 1 << 40

type repair struct {
	Dropped
	fs  vfs.FS
	dir string
}

func (r *repair) run(after keys.Epoch, segment uint64) error {
	rec, files, err := list(r.fs, r.dir)
	if err != nil {
		return err
	}
	next, err := r.pastEnd(files, after)
	if err != nil {
		return err
	}
	// The skip comes first, under a number beyond all others: from then on the epochs of the files that go are known even if the repair is
	// interrupted.
	number := max(rec.lastNumber+1, segment)
	if err := r.writeSkip(number, next); err != nil {
		return err
	}
	if err := r.removeAfter(files); err != nil {
		return err
	}
	switch {
	case r.Cause.Offset != 0:
		return r.cut()
	case r.Cause.File == path.Join(r.dir, FileName(number)): // it was missing, and the skip has taken its place
		return nil
	}
	return r.remove(r.Cause.File)
}

// beyond is an epoch past all that these segments can have held.
func (r *repair) pastEnd(files []SegmentInfo, after keys.Epoch) (keys.Epoch, error) {
	next := max(after, r.From) + 1
	if !slices.ContainsFunc(files, func(s SegmentInfo) bool { return s.File == r.Cause.File }) {
		next += lostEpochs
	}
	for _, s := range files {
		from := next // where the segment can have begun, if its header does not tell
		if s.Damage == nil {
			from = s.First
			err := ReadSegment(r.fs, s, func(one Record) error {
				from = max(from, one.Epoch+1, one.SkipsTo())
				return nil
			})
			if err != nil {
				return 0, err
			}
		}
		// What cannot be read may be a skip, and as many records as have room.
		next = max(next, from+EpochWindow+keys.Epoch(s.Bytes/recordHeaderSize))
	}
	return next, nil
}

// removeBehind removes the files behind the damage, the newest first. A file whose header is the damage is the last to go.
func (r *repair) removeAfter(files []SegmentInfo) error {
	if r.Cause.Offset == 0 {
		for _, s := range files {
			if s.File == r.Cause.File {
				r.Files = append(r.Files, s.File)
			}
		}
	}
	for i := len(files) - 1; i >= 0 && files[i].File > r.Cause.File; i-- {
		if err := r.remove(files[i].File); err != nil {
			return err
		}
		r.Files = append(r.Files, files[i].File)
	}
	return nil
}

// remove removes a file that is no part of the log any more. It may be missing.
func (r *repair) remove(name string) error {
	if err := r.fs.Remove(name); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return err
	}
	return r.fs.SyncDir(r.dir)
}

// writeSkip puts a segment in place, whole or not at all, that goes on where the log is cut and holds nothing but a skip.
func (r *repair) writeSkip(number uint64, next keys.Epoch) error {
	buffer := make([]byte, SegmentBytesMin)
	h := header{identity: randomIdentity(), number: number, first: r.From}
	putHeader(buffer, h)
	putSkip(buffer[headerPage:headerPage+skipSpace], seedOf(h.identity), h.first, next)
	name := path.Join(r.dir, FileName(number))
	building := name + ".new"
	if err := r.fs.Remove(building); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return err
	}
	f, err := r.fs.Open(building, vfs.Create)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(buffer, 0)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := r.fs.Rename(building, name); err != nil {
		return err
	}
	return r.fs.SyncDir(r.dir)
}

func (r *repair) cut() error {
	f, err := r.fs.Open(r.Cause.File, vfs.ReadWrite)
	if err != nil {
		return err
	}
	size, err := f.Size()
	if err == nil {
		err = f.Truncate(r.Cause.Offset)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	r.Bytes = size - r.Cause.Offset
	return nil
}
