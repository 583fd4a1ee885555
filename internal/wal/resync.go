package wal

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Recover is Replay for a caller that continues the log: the records that it passes to fn are on the device,
// and not only in the kernel's page cache. fn also gets the skip records.
func Recover(fs vfs.FS, dataDir string, after keys.Epoch, proof Proof, fn func(Commit) error) (Recovery, error) {
	if err := resync(fs, dataDir); err != nil {
		return Recovery{}, err
	}
	rec, err := replay(fs, dataDir, after, proof, fn)
	rec.resynced = true
	return rec, err
}

// resync writes and syncs again all parts of the log's files that do not themselves prove that they are on
// the device.
//
// A sync is not enough. After a failed sync the kernel may count the pages as clean: reads return what was
// written, a later sync reports success without writing the pages, and a crash loses them. A new process
// cannot tell such pages from others. Rewriting makes them dirty again.
//
// The records prove what was durable. Each one has the durable epoch of the moment when it was published,
// and that is true wherever the record is read from. A segment's header was written after everything in
// earlier segments was durable. So resync has to write only the records of the newest segment after the
// largest durable epoch in it, and its header if that epoch is older than the segment. Nothing is truncated:
// resync replaces bytes by the same bytes.
func resync(fs vfs.FS, dataDir string) error {
	_, files, err := list(fs, Dir(dataDir))
	if err != nil || len(files) == 0 {
		return err
	}
	if err := errors.Join(fs.SyncDir(dataDir), fs.SyncDir(Dir(dataDir))); err != nil {
		return fmt.Errorf("wal: %w", err)
	}
	newest := files[len(files)-1]
	if !newest.readable() {
		return nil // replay refuses it
	}
	return confirm(fs, newest)
}

// confirm writes and syncs the end of a segment again.
func confirm(fs vfs.FS, s SegmentInfo) error {
	from, to, err := unconfirmed(fs, s)
	if err != nil {
		return err
	}
	if err := rewrite(fs, s.File, from, to); err != nil {
		return fmt.Errorf("wal: rewrite the log tail: %w", err)
	}
	return nil
}

// unconfirmed is the part of a segment that no record in it proves to be durable, up to the first record that
// is not intact, and the space of a close record there: a start whose sync failed may have removed one, so that it
// can be read no more and is still on the device.
func unconfirmed(fs vfs.FS, s SegmentInfo) (from, to int64, err error) {
	proven := keys.Epoch(0)
	err = ReadSegment(fs, s, func(r Record) error {
		proven = max(proven, r.Durable)
		return nil
	})
	if err != nil {
		return 0, 0, err
	}
	from, to = headerPage, headerPage
	if proven < s.First {
		from = 0
	}
	err = ReadSegment(fs, s, func(r Record) error {
		end := r.Offset + int64(recordSpace(uint32(recordHeaderSize+len(r.Body))))
		if r.Epoch <= proven {
			from = end
		}
		to = end
		return nil
	})
	return from, max(to, min(to+closeRecordSpace, s.Bytes)), err
}

// rewrite writes [from, to) of a file again, in whole pages, with the bytes that it reads there, and syncs the
// file. It ends at what the device cannot read, which the replay refuses.
func rewrite(fs vfs.FS, name string, from, to int64) error {
	f, err := fs.Open(name, vfs.ReadWrite)
	if err != nil {
		return err
	}
	w := window{file: f, size: to}
	for at := from &^ (pageSize - 1); at < to && err == nil; {
		if _, err = w.at(at, 1); err != nil || len(w.buf) == 0 {
			break
		}
		_, err = f.WriteAt(w.buf, at)
		at += int64(len(w.buf))
	}
	if unreadable := new(unreadableError); errors.As(err, &unreadable) {
		err = nil
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
