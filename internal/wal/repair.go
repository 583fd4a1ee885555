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

// Dropped is what a repair removed.
type Dropped struct {
	Cause *CorruptionError // the damage; nil if there was none, and then nothing was dropped
	From  keys.Epoch       // every epoch from here on is gone; after that of Cause if the data file has the commits between
	Parts keys.Epoch       // of the dropped commits up to this epoch, the tree has parts; zero if it has none
	Bytes int64            // truncated from the damaged file, with old contents of a recycled file
	Files []string         // removed files
}

// Repair truncates a corrupt log at the first record that cannot be read, and removes the segments after it.
// It loses commits that were acknowledged as durable, so that only an operator may decide on it. It does not
// change a log that Replay accepts, or a log of a newer version.
//
// What the data file has is not lost: the epochs up to after, of which records may be removed, too. They are not skipped, because that
// would mean that they name no commit. They are missing: a reader of the log fails there.
//
// A new segment replaces the dropped ones. It skips every epoch that the dropped segments can have held, so
// that no epoch is given out again. Its number is not less than the one that the data file knows. Repair removes the damage last: after an interrupted repair, the log is either still known to be
// corrupt, or repaired.
func Repair(fs vfs.FS, dataDir string, after keys.Epoch, proof Proof) (Dropped, error) {
	rec, err := Replay(fs, dataDir, after, proof, func(keys.Epoch, []byte) error { return nil })
	var cause *CorruptionError
	if !errors.As(err, &cause) {
		return Dropped{}, err
	}
	r := repair{fs: fs, dir: Dir(dataDir), version: version1, Dropped: Dropped{Cause: cause, From: max(cause.Epoch, after+1)}}
	if proof.Durable >= r.From {
		r.Parts = proof.Durable
	}
	if proof.known() {
		r.version, r.history = version2, history{term: rec.terms.last(), previousTerm: rec.terms.of(r.From - 1), lineage: prefixOf(proof.Lineage)}
		if r.From == after+1 { // a term record may be among what cannot be read
			r.history.term, r.history.previousTerm = max(r.history.term, proof.Term), proof.Term
		}
	}
	err = r.confirm(&rec)
	if err == nil {
		err = r.run(after, proof)
	}
	if err != nil {
		return r.Dropped, fmt.Errorf("wal: repair: %w", err)
	}
	return r.Dropped, nil
}

// confirm makes what the log keeps durable: the header of the segment that continues it says that it is. A server that was killed, or
// stopped because a sync failed, leaves records that are in the kernel's memory only.
func (r *repair) confirm(rec *Recovery) error {
	for i := range rec.Segments {
		if rec.Segments[i].File == rec.tail.file {
			return confirm(r.fs, rec.Segments[i])
		}
	}
	return nil // it keeps nothing
}

// lostEpochs is more than the number of epochs in missing segments: records of 24 TiB.
const lostEpochs = 1 << 40

// Begin makes the log of a store whose state another history had at an epoch, with other commits after it. It skips as many epochs as
// that history can have used since: each of its unclean ends alone has skipped EpochWindow. The lineage is zero for a store without one.
func Begin(fs vfs.FS, dataDir string, after keys.Epoch, term keys.Term, lineage keys.Lineage) error {
	h := header{version: version1, identity: randomIdentity(), number: 1, first: after + 1}
	if lineage != (keys.Lineage{}) {
		h.version, h.history = version2, history{term: term, previousTerm: term, lineage: prefixOf(lineage)}
	}
	dir := Dir(dataDir)
	err := fs.MkdirAll(dir)
	if err == nil {
		err = fs.SyncDir(dataDir)
	}
	if err == nil {
		err = writeSkip(fs, dir, h, after+1+lostEpochs)
	}
	if err != nil {
		return fmt.Errorf("wal: begin after epoch %d: %w", after, err)
	}
	return nil
}

type repair struct {
	Dropped
	fs  vfs.FS
	dir string

	version uint32 // of the new segment
	history history
}

func (r *repair) run(after keys.Epoch, proof Proof) error {
	rec, files, err := list(r.fs, r.dir)
	if err != nil {
		return err
	}
	next, err := r.pastEnd(files, max(after, proof.Durable), proof.Segment)
	if err != nil {
		return err
	}
	if err := r.fs.MkdirAll(r.dir); err != nil { // which may be lost with all files
		return err
	}
	// The skip record is written first, in a segment with the largest number: from then on the epochs of the
	// removed files stay skipped even if the repair is interrupted.
	number := max(rec.lastNumber+1, proof.Segment)
	if err := r.writeSkip(number, next); err != nil {
		return err
	}
	if err := r.removeAfter(files); err != nil {
		return err
	}
	switch {
	case r.Cause.Offset != 0:
		return r.cut()
	case r.Cause.File == path.Join(r.dir, FileName(number)): // it was missing, and the segment with the skip record replaces it
		return nil
	}
	return r.remove(r.Cause.File)
}

// pastEnd is an epoch after all epochs that these segments can have held, and those that are missing up to a number.
func (r *repair) pastEnd(files []SegmentInfo, after keys.Epoch, newest uint64) (keys.Epoch, error) {
	next := max(after, r.From) + 1
	found := slices.ContainsFunc(files, func(s SegmentInfo) bool { return s.File == r.Cause.File })
	if !found || files[len(files)-1].number < newest {
		next += lostEpochs
	}
	for _, s := range files {
		from := next // the largest epoch at which the segment can begin, if its header cannot be read
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
		// The unreadable part may be a skip record and as many records as fit.
		next = max(next, from+EpochWindow+keys.Epoch(s.Bytes/recordHeaderSize))
	}
	return next, nil
}

// removeAfter removes the files after the damage, the newest first. A file with a damaged header is removed
// last.
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

// remove removes a file that does not belong to the log any more. The file may be missing.
func (r *repair) remove(name string) error {
	if err := r.fs.Remove(name); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return err
	}
	return r.fs.SyncDir(r.dir)
}

// writeSkip makes the segment that continues where the log is truncated.
func (r *repair) writeSkip(number uint64, next keys.Epoch) error {
	return writeSkip(r.fs, r.dir, header{version: r.version, identity: randomIdentity(), number: number, first: r.From, history: r.history}, next)
}

// writeSkip makes a segment, atomically, that holds only a skip record.
func writeSkip(fs vfs.FS, dir string, h header, next keys.Epoch) error {
	buffer := make([]byte, SegmentBytesMin)
	putHeader(buffer, h)
	putSkip(buffer[headerPage:headerPage+skipSpace], seedOf(h.identity), h.first, next)
	name := path.Join(dir, FileName(h.number))
	building := name + ".new"
	if err := fs.Remove(building); err != nil && !errors.Is(err, iofs.ErrNotExist) {
		return err
	}
	f, err := fs.Open(building, vfs.Create)
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
	if err := fs.Rename(building, name); err != nil {
		return err
	}
	return fs.SyncDir(dir)
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
