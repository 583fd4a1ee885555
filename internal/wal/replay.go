package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"path"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Recovery is the result of a replay. Open continues from it.
type Recovery struct {
	// Last is the last epoch of the log, or the epoch after which replay began if the log has nothing newer.
	Last keys.Epoch
	// Records and Bytes count the bodies that were replayed.
	Records, Bytes uint64
	// Segments are the files with records, oldest first, including those before the start of the replay.
	Segments []SegmentInfo
	// Torn is the incomplete end of the log, or nil. Nothing in it was ever acknowledged as durable.
	Torn *TornTail
	// Unclean means that the log was not closed: epochs after Last may have been given out and lost.
	Unclean bool

	tail         tail
	resynced     bool // the replayed records are on the device: see Recover
	lastNumber   uint64
	preallocated []preallocatedFile
}

// Next is the epoch at which the log continues. After an unclean end it skips every epoch that can have been
// given out: a client may have seen the epochs of commits that were never durable, and no epoch may name two
// commits.
func (rec *Recovery) Next() keys.Epoch {
	if rec.Unclean {
		return rec.Last + 1 + EpochWindow
	}
	return rec.Last + 1
}

// tail is the end of a segment's records, with or without a close record.
type tail struct {
	file      string // empty without a segment
	offset    int64  // after the last record; of the close record if there is one
	seed      uint32
	next      keys.Epoch
	closed    bool
	successor uint64 // number of the next segment; zero without a close record, and in that of a log that was closed
}

// SegmentInfo is a segment file.
type SegmentInfo struct {
	File  string
	First keys.Epoch // epoch of its first record
	Bytes int64

	number   uint64
	identity uint64
	Damage   error // the header cannot be read, so that First is unknown; nil if it can
}

// readable reports whether the header could be read.
func (s *SegmentInfo) readable() bool { return s.Damage == nil }

// TornTail is an incomplete record that a crash left at the end of the log.
type TornTail struct {
	File   string
	Offset int64
	Bytes  int64 // from Offset to the end of the last recognizable record
	Epoch  keys.Epoch
}

// preallocatedFile is the file of a preallocated segment that was never used.
type preallocatedFile struct {
	path string
	size int64
}

// Replay calls fn for each epoch after the given one, in order, with the body of its record, which is empty
// for a no-op record. The body is valid during the call only. Replay writes nothing: Open truncates the torn
// tail that Replay reports.
//
// The log ends at the first record that is not intact. If later bytes prove that this record was durable,
// the result is a CorruptionError; the calls of fn until then are still right. The result is the same if a
// segment is missing that a close record names, or if the log ends before what the data file proves.
func Replay(fs vfs.FS, dataDir string, after keys.Epoch, proof Proof, fn func(e keys.Epoch, body []byte) error) (Recovery, error) {
	rec, files, err := list(fs, Dir(dataDir))
	if err != nil {
		return Recovery{}, err
	}
	rec.Last, rec.Unclean = after, after > 0 || len(files) > 0
	if err := rec.replay(fs, files, after, fn); err != nil {
		return rec, err
	}
	return rec, rec.checkEnd(fs, Dir(dataDir), files, after, proof)
}

// Proof is what the data file knows of the log. Zero values mean that it is not known.
type Proof struct {
	// Segment is the number of a segment: it exists, or a newer one does (see Log.NewestDurableHeader).
	Segment uint64
	// Durable is an epoch: it and everything before it was durable, and the log still has what the data file lacks.
	Durable keys.Epoch
}

// checkEnd looks for segments and records that must be there after the last one.
func (rec *Recovery) checkEnd(fs vfs.FS, dir string, files []SegmentInfo, after keys.Epoch, proof Proof) error {
	expected := max(after+1, rec.tail.next)
	if next := rec.tail.successor; next != 0 {
		name := path.Join(dir, FileName(next))
		if _, err := fs.Size(name); errors.Is(err, iofs.ErrNotExist) {
			return corruption(name, 0, expected, missingAfter(rec.tail.file))
		} else if err != nil {
			return fmt.Errorf("wal: %w", err)
		}
	}
	if proof.Segment != 0 && (len(files) == 0 || files[len(files)-1].number < proof.Segment) {
		return corruption(path.Join(dir, FileName(proof.Segment)), 0, expected, "the file is missing or has no records, and so are all newer ones; the data file names it as part of the log")
	}
	if rec.Last < proof.Durable && rec.tail.file != "" {
		return corruption(rec.tail.file, rec.tail.offset, expected, fmt.Sprintf("the data file proves that this record was durable: it has parts of commits up to epoch %d", proof.Durable))
	}
	return nil
}

func (rec *Recovery) replay(fs vfs.FS, files []SegmentInfo, after keys.Epoch, fn func(e keys.Epoch, body []byte) error) error {
	start, err := startOf(files, after)
	if err != nil || start == len(files) {
		return err
	}
	expected := files[start].First
	var r segmentReader
	for i, s := range files[start:] {
		if s.Damage != nil {
			return atEpoch(s.Damage, expected)
		}
		last := start+i == len(files)-1
		if s.First != expected {
			return missing(s, expected)
		}
		if expected, err = rec.segment(&r, fs, s, last, after, fn); err != nil {
			return err
		}
		expected = max(expected, after+1) // no earlier epoch is needed, whether epochs were skipped there (Log.Skip) or not
		if last || files[start+i+1].Damage != nil || files[start+i+1].First == expected {
			continue
		}
		if next := rec.tail.successor; next != 0 && next != files[start+i+1].number {
			return corruption(path.Join(path.Dir(s.File), FileName(next)), 0, expected, missingAfter(s.File))
		}
		return corruption(s.File, r.pos, expected, "a later segment proves that this record was durable")
	}
	return nil
}

// missingAfter is the reason for damage if a segment is missing that the close record of another names.
func missingAfter(file string) string {
	return fmt.Sprintf("the file is missing; the close record of %s names it as the next segment", path.Base(file))
}

// segment replays one segment and returns the epoch after its last record.
func (rec *Recovery) segment(r *segmentReader, fs vfs.FS, s SegmentInfo, last bool, after keys.Epoch,
	fn func(e keys.Epoch, body []byte) error,
) (next keys.Epoch, err error) {
	if err := r.start(fs, s); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.file.Close()) }()
	next, err = rec.records(r, s, after, fn)
	if err != nil || !last {
		return next, err
	}
	rec.Unclean = !rec.tail.closed || rec.tail.successor != 0
	if rec.tail.closed {
		return next, nil
	}
	t, err := r.findProof(next)
	if err != nil {
		return 0, err
	}
	if t.durable >= next {
		return 0, corruption(s.File, r.pos, next, "a later record proves that this one was durable")
	}
	if t.end > r.pos {
		rec.Torn = &TornTail{File: s.File, Offset: r.pos, Bytes: t.end - r.pos, Epoch: next}
	}
	return next, nil
}

// records passes the intact records from the reader's position on to fn, and records where they end.
func (rec *Recovery) records(r *segmentReader, s SegmentInfo, after keys.Epoch,
	fn func(e keys.Epoch, body []byte) error,
) (next keys.Epoch, err error) {
	next = s.First
	defer func() { rec.tail.next = next }()
	for {
		at := r.pos
		rec.tail = tail{file: s.File, offset: at, seed: r.seed}
		one, ok, err := r.next()
		if err != nil {
			return 0, err
		}
		if !ok || one.epoch != next {
			r.pos = at
			return next, nil
		}
		if one.flags&^flagsKnown != 0 {
			return 0, &VersionError{File: s.File, Offset: at, What: fmt.Sprintf("unknown record flags %#x", one.flags)}
		}
		if one.flags&flagClose != 0 {
			rec.tail.closed = true
			rec.tail.successor, err = successorOf(s, at, one)
			return next, err
		}
		if one.flags&flagSkip != 0 {
			if next, err = skipTo(s, at, one); err != nil {
				return 0, err
			}
			rec.Last = max(rec.Last, next-1)
			continue
		}
		if next > after {
			body := one.body
			if one.flags&flagNoOp != 0 {
				body = nil
			}
			if err := fn(next, body); err != nil {
				return 0, fmt.Errorf("wal: replay of epoch %d: %w", next, err)
			}
			rec.Records++
			rec.Bytes += uint64(len(body))
			rec.Last = next
		}
		next++
	}
}

// successorOf is the number of the segment that a close record names, or zero.
func successorOf(s SegmentInfo, at int64, r record) (uint64, error) {
	switch len(r.body) {
	case 0:
		return 0, nil
	case closeRecordSpace - recordHeaderSize:
		return binary.LittleEndian.Uint64(r.body), nil
	}
	return 0, &VersionError{File: s.File, Offset: at, What: fmt.Sprintf("a close record of %d bytes", len(r.body))}
}

// skipTo is the epoch at which a log continues after a skip record.
func skipTo(s SegmentInfo, at int64, r record) (keys.Epoch, error) {
	if len(r.body) != skipSpace-recordHeaderSize {
		return 0, &VersionError{File: s.File, Offset: at, What: fmt.Sprintf("a skip record of %d bytes", len(r.body))}
	}
	next := keys.Epoch(binary.LittleEndian.Uint64(r.body))
	if next <= r.epoch || next > keys.MaxEpoch {
		return 0, corruption(s.File, at, r.epoch, fmt.Sprintf("a skip record leads to epoch %d", next))
	}
	return next, nil
}

// startOf is the index of the newest segment that begins at or before the epoch to start with. Damage in older
// segments does not matter.
func startOf(files []SegmentInfo, after keys.Epoch) (int, error) {
	for i := len(files) - 1; i >= 0; i-- {
		if files[i].Damage == nil && files[i].First <= after+1 {
			return i, nil
		}
	}
	if len(files) == 0 {
		return 0, nil
	}
	if files[0].Damage != nil {
		return 0, atEpoch(files[0].Damage, after+1)
	}
	return 0, missing(files[0], after+1)
}

func corruption(file string, offset int64, epoch keys.Epoch, reason string) error {
	return &CorruptionError{File: file, Offset: offset, Epoch: epoch, Reason: reason, Remedy: remedy}
}

func missing(s SegmentInfo, expected keys.Epoch) error {
	return corruption(s.File, 0, expected, fmt.Sprintf("the segment starts at epoch %d: an earlier one is missing", s.First))
}

// atEpoch adds the epoch to damage in a header, where it follows from the context only.
func atEpoch(damage error, e keys.Epoch) error {
	var c *CorruptionError
	if errors.As(damage, &c) {
		c.Epoch = e
	}
	return damage
}

// list reads the headers of the log's files, in the order of their numbers, and separates the files that were
// never used. It returns the error about an unreadable header with the file: whether it matters depends on
// where replay starts.
func list(fs vfs.FS, dir string) (rec Recovery, files []SegmentInfo, err error) {
	names, err := fs.List(dir)
	if errors.Is(err, iofs.ErrNotExist) {
		return Recovery{}, nil, nil
	}
	if err != nil {
		return Recovery{}, nil, fmt.Errorf("wal: %w", err)
	}
	for _, name := range names {
		number, ok := parseFileName(name)
		if !ok {
			continue
		}
		s := SegmentInfo{File: path.Join(dir, name), number: number}
		started, err := s.readHeader(fs)
		if err != nil {
			return Recovery{}, nil, err
		}
		if started {
			files = append(files, s)
		} else {
			rec.preallocated = append(rec.preallocated, preallocatedFile{path: s.File, size: s.Bytes})
		}
		rec.lastNumber = number
	}
	rec.Segments = files
	return rec, files, nil
}

// readHeader fills in the fields of the header. A file was never used if its header was never written: the
// file is too short for one, or the header is zero, or it is the header of the segment from which the file
// was recycled.
func (s *SegmentInfo) readHeader(fs vfs.FS) (started bool, err error) {
	f, err := fs.Open(s.File, vfs.ReadOnly)
	if err != nil {
		return false, fmt.Errorf("wal: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if s.Bytes, err = f.Size(); err != nil {
		return false, fmt.Errorf("wal: %w", err)
	}
	var page [headerSize]byte
	if _, err := f.ReadAt(page[:], 0); err != nil && !errors.Is(err, io.EOF) {
		return false, fmt.Errorf("wal: %w", err)
	}
	h, started, err := decodeHeader(s.File, page[:])
	if err != nil {
		s.Damage = err
		return true, nil
	}
	if !started || h.number != s.number {
		return false, nil
	}
	s.First, s.identity = h.first, h.identity
	return true, nil
}
