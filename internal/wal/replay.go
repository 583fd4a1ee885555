package wal

import (
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"path"
	"slices"

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
	// Skipped are the epochs of the skip records that were read: no commit has them any more. A repair of the log removed them, or
	// an unclean end may have lost them, which skips no more than EpochWindow.
	Skipped []keys.EpochRange
	// Torn is the incomplete end of the log, or nil. Nothing in it was ever acknowledged as durable.
	Torn *TornTail
	// Unclean means that the log was not closed: epochs after Last may have been given out and lost.
	Unclean bool

	after        keys.Epoch // at which replay began
	tail         tail
	uncut        []TornTail // what an interrupted repair has left: see replayer.notCut
	terms        terms
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

// Continues reports whether the log continues without a word of the data file: it has the epoch after which replay began, and its
// newest segment has the lineage that the next one will have. A segment that continues otherwise must not be durable before the
// superblock from which all that is known.
func (rec *Recovery) Continues(lineage keys.Lineage) bool {
	if len(rec.Segments) == 0 || rec.tail.next <= rec.after {
		return false
	}
	newest := &rec.Segments[len(rec.Segments)-1]
	return newest.version >= version2 && newest.lineage == prefixOf(lineage) || newest.version < version2 && lineage == keys.Lineage{}
}

// Term is the term of the last epoch.
func (rec *Recovery) Term() keys.Term { return rec.terms.last() }

// SegmentInfo is a segment file.
type SegmentInfo struct {
	File   string
	First  keys.Epoch // epoch of its first record
	Limit  keys.Epoch // later segments supersede its records from this epoch on; zero if they supersede none
	Bytes  int64
	Damage error // the header cannot be read, so that First is unknown; nil if it can

	version   uint32
	number    uint64
	identity  uint64
	skipped   keys.EpochRange // by its skip record, as far as that can be read; zero without one
	limitTerm keys.Term       // of Limit
	history
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

// Replay calls fn for each epoch after the given one, in order, with the batch body of its record, which is empty
// for a no-op record. The body is valid during the call only. Replay writes nothing: Open truncates the torn
// tail that Replay reports.
//
// The log ends at the first record that is not intact. If later bytes prove that this record was durable,
// the result is a CorruptionError; the calls of fn until then are still right. The result is the same if a
// segment is missing that a close record names, or if the log ends before what the data file proves. A file of
// another lineage is a LineageError.
func Replay(fs vfs.FS, dataDir string, after keys.Epoch, proof Proof, fn func(e keys.Epoch, body []byte) error) (Recovery, error) {
	return replay(fs, dataDir, after, proof, onlyCommits(fn))
}

// onlyCommits leaves out skip records.
func onlyCommits(fn func(e keys.Epoch, body []byte) error) func(Commit) error {
	return func(c Commit) error {
		if c.Skipped != 0 {
			return nil
		}
		return fn(c.Epoch, c.Body)
	}
}

// Commit is a replayed record.
type Commit struct {
	Epoch keys.Epoch
	Term  keys.Term
	Body  []byte // a batch body, empty for a no-op record; valid during the call only

	// Skipped is not zero for a skip record: no commit has the epochs from Skipped through Epoch.
	Skipped keys.Epoch
}

func replay(fs vfs.FS, dataDir string, after keys.Epoch, proof Proof, fn func(Commit) error) (Recovery, error) {
	rec, files, err := list(fs, Dir(dataDir))
	if err != nil {
		return Recovery{}, err
	}
	if err := proof.checkLineage(files); err != nil {
		return rec, err
	}
	files = live(files)
	rec.after, rec.Last, rec.Unclean = after, after, after > 0 || len(files) > 0
	r := replayer{rec: &rec, fs: fs, after: after, proof: &proof, fn: fn}
	if err := r.run(files); err != nil {
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
	// Lineage is that of the store, and Term the term of its epoch.
	Lineage keys.Lineage
	Term    keys.Term
	// NoLineage means that the data file has none: so no segment has one either.
	NoLineage bool
}

// known reports whether the data file has a lineage.
func (p *Proof) known() bool { return p.Lineage != keys.Lineage{} }

// Foreign reports whether a segment is of another history than the data file.
func (p *Proof) Foreign(s *SegmentInfo) bool {
	if s.Damage != nil || s.version < version2 {
		return false
	}
	return p.NoLineage || p.known() && s.lineage != prefixOf(p.Lineage)
}

// checkLineage refuses a file of another history.
func (p *Proof) checkLineage(files []SegmentInfo) error {
	for i := range files {
		if s := &files[i]; p.Foreign(s) {
			return &LineageError{File: s.File, Found: fmt.Sprintf("%x...", s.lineage), Want: p.lineage()}
		}
	}
	return nil
}

func (p *Proof) lineage() string {
	if p.known() {
		return p.Lineage.String()
	}
	return "none"
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

// replayer reads the live segments in order.
type replayer struct {
	rec    *Recovery
	fs     vfs.FS
	after  keys.Epoch
	proof  *Proof
	fn     func(Commit) error
	reader segmentReader
	term   keys.Term // of the next record
	joined bool      // the term of the epoch after which replay begins was compared with that of the data file
}

func (r *replayer) run(files []SegmentInfo) error {
	start, err := startOf(files, r.after)
	if err != nil || start == len(files) {
		return err
	}
	for i := range files[:start] { // what they skipped is not in the tree
		if s := &files[i]; s.skipped.Last != 0 {
			r.rec.Skipped = append(r.rec.Skipped, s.skipped)
		}
	}
	r.suppress(files[start:])
	expected, before := files[start].First, TornTail{}
	r.rec.terms.begin(max(expected, 1)-1, files[start].previousTerm)
	for i := range files[start:] {
		s, last := &files[start+i], start+i == len(files)-1
		if s.Damage != nil {
			return atEpoch(s.Damage, expected)
		}
		if err := r.checkFollows(s, expected); err != nil {
			return err
		}
		if expected, err = r.segment(s, last); err != nil {
			return err
		}
		if r.notCut(s, &before); !r.rec.tail.closed {
			before = TornTail{File: s.File, Offset: r.rec.tail.offset, Bytes: s.Bytes - r.rec.tail.offset}
		}
		expected = max(expected, r.after+1) // no earlier epoch is needed, whether epochs were skipped there (Log.Skip) or not
		if last || files[start+i+1].Damage != nil || files[start+i+1].First == expected {
			continue
		}
		if next := r.rec.tail.successor; next != 0 && next != files[start+i+1].number {
			return corruption(path.Join(path.Dir(s.File), FileName(next)), 0, expected, missingAfter(s.File))
		}
		if bad := r.reader.lost(expected); bad != nil {
			return deviceDamage(s.File, r.reader.pos, expected, bad.cause)
		}
		return corruption(s.File, r.reader.pos, expected, "a later segment proves that this record was durable")
	}
	return r.join()
}

// notCut notes what is after the end of the segment before s, if a repair has made s. The repair was interrupted before it cut the damaged
// record there. What cannot be read now may be readable later, and would be taken for a part of the history again.
func (r *replayer) notCut(s *SegmentInfo, before *TornTail) {
	if repaired := s.skipped.Last-s.skipped.First >= EpochWindow; repaired && before.Bytes > 0 {
		r.rec.uncut = append(r.rec.uncut, *before)
	}
	*before = TornTail{}
}

// suppress lets replay pass nothing on if a later header cannot be read: that segment may supersede what is before it. The
// replay ends with an error then, and only finds out at which epoch.
func (r *replayer) suppress(files []SegmentInfo) {
	if slices.ContainsFunc(files, func(s SegmentInfo) bool { return s.Damage != nil }) {
		r.fn = func(Commit) error { return nil }
	}
}

// checkFollows checks that a segment continues where the log was read to.
func (r *replayer) checkFollows(s *SegmentInfo, expected keys.Epoch) error {
	if s.First != expected {
		return missing(*s, expected)
	}
	if before := r.rec.terms.of(max(s.First, 1) - 1); s.previousTerm != before {
		return corruption(s.File, 0, expected, fmt.Sprintf("the segment follows an epoch of term %d, and the epoch before it has term %d", s.previousTerm, before))
	}
	r.rec.terms.begin(s.First, s.term)
	return nil
}

// join compares the term of the epoch after which replay begins, once, with the one in the data file.
func (r *replayer) join() error {
	if r.joined || !r.proof.known() {
		return nil
	}
	r.joined = true
	if found := r.rec.terms.of(r.after); found != r.proof.Term {
		return corruption(r.rec.tail.file, r.rec.tail.offset, r.after+1, fmt.Sprintf("epoch %d has term %d in the log, and in the data file term %d", r.after, found, r.proof.Term))
	}
	return nil
}

// missingAfter is the reason for damage if a segment is missing that the close record of another names.
func missingAfter(file string) string {
	return fmt.Sprintf("the file is missing; the close record of %s names it as the next segment", path.Base(file))
}

// segment replays one segment and returns the epoch after its last record.
func (r *replayer) segment(s *SegmentInfo, last bool) (next keys.Epoch, err error) {
	if err := r.reader.start(r.fs, *s); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.reader.file.Close()) }()
	next, err = r.records(s)
	if err != nil || !last {
		return next, err
	}
	rec := r.rec
	rec.Unclean = !rec.tail.closed || rec.tail.successor != 0
	if rec.tail.closed {
		return next, nil
	}
	if bad := r.reader.lost(next); bad != nil { // it may have been durable
		return 0, deviceDamage(s.File, r.reader.pos, next, bad.cause)
	}
	t, err := r.reader.findProof(next)
	if err != nil {
		return 0, err
	}
	if t.durable >= next {
		return 0, corruption(s.File, r.reader.pos, next, "a later record proves that this one was durable")
	}
	if t.end > r.reader.pos {
		rec.Torn = &TornTail{File: s.File, Offset: r.reader.pos, Bytes: t.end - r.reader.pos, Epoch: next}
	}
	return next, nil
}

// records passes the intact records from the reader's position on to fn, up to the first one that a later segment
// supersedes, and records where they end.
func (r *replayer) records(s *SegmentInfo) (next keys.Epoch, err error) {
	next, r.term = s.First, s.term
	defer func() { r.rec.tail.next = next }()
	for {
		at := r.reader.pos
		r.rec.tail = tail{file: s.File, offset: at, seed: r.reader.seed}
		one, ok, err := r.reader.next()
		if err != nil {
			return 0, err
		}
		if !ok || one.epoch != next {
			r.reader.pos = at
			return r.within(s, next), nil
		}
		if err := checkFlags(s, at, one.flags); err != nil {
			return 0, err
		}
		if s.limited(next) && one.flags != flagClose {
			return r.within(s, next), checkSuperseded(s, at, &one, r.term)
		}
		if one.flags == flagClose {
			r.rec.tail.closed = true
			r.rec.tail.successor, err = successorOf(s, at, &one)
			return r.within(s, next), err
		}
		if next, err = r.record(s, at, &one); err != nil {
			return 0, err
		}
	}
}

// within is the epoch up to which the segment is part of the history, if it was read up to next: a skip record may lead past
// its limit.
func (r *replayer) within(s *SegmentInfo, next keys.Epoch) keys.Epoch {
	if !s.limited(next) {
		return next
	}
	r.rec.Last = min(r.rec.Last, max(r.after, s.Limit-1))
	return s.Limit
}

// record replays one record, which is not a close record, and returns the epoch after it.
func (r *replayer) record(s *SegmentInfo, at int64, one *record) (next keys.Epoch, err error) {
	switch one.flags {
	case flagSkip:
		if next, err = skipTo(s, at, one); err != nil {
			return 0, err
		}
		r.rec.Last = max(r.rec.Last, next-1)
		r.rec.Skipped = append(r.rec.Skipped, keys.EpochRange{First: one.epoch, Last: next - 1})
		if next-1 > r.after && !s.limited(next-1) {
			err = r.fn(Commit{Epoch: next - 1, Term: r.term, Skipped: one.epoch})
		}
		return next, err
	case flagTerm:
		return one.epoch, r.beginTerm(s, at, one)
	}
	body, err := batchOf(s, at, one)
	if err != nil || one.epoch <= r.after {
		return one.epoch + 1, err
	}
	if err := r.join(); err != nil {
		return 0, err
	}
	if err := r.fn(Commit{Epoch: one.epoch, Term: r.term, Body: body}); err != nil {
		return 0, fmt.Errorf("wal: replay of epoch %d: %w", one.epoch, err)
	}
	r.rec.Records++
	r.rec.Bytes += uint64(len(body))
	r.rec.Last = one.epoch
	return one.epoch + 1, nil
}

// beginTerm replays a term record.
func (r *replayer) beginTerm(s *SegmentInfo, at int64, one *record) error {
	term, previous, ok := termsOf(one.body)
	switch {
	case !ok:
		return malformed(s, at, "term", one.body)
	case previous != r.term || term <= previous:
		return corruption(s.File, at, one.epoch, fmt.Sprintf("a term record leads from term %d to %d, and the epoch before it has term %d", previous, term, r.term))
	}
	r.term = term
	r.rec.terms.begin(one.epoch, term)
	return nil
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

// deviceDamage is the error about what a device cannot read: damage, unless the next attempt can read it.
func deviceDamage(file string, offset int64, epoch keys.Epoch, cause error) error {
	return &CorruptionError{
		File: file, Offset: offset, Epoch: epoch, Reason: fmt.Sprintf("the device cannot read it: %v", cause),
		Remedy: "check the device, and try again; if it stays so, " + remedy,
	}
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
	setLimits(files)
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
	switch _, err := f.ReadAt(page[:], 0); {
	case errors.Is(err, vfs.ErrDevice):
		s.Damage = deviceDamage(s.File, 0, 0, err)
		return true, nil
	case err != nil && !errors.Is(err, io.EOF):
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
	s.version, s.First, s.identity, s.history = h.version, h.first, h.identity, h.history
	s.readSkip(f)
	return true, nil
}

// readSkip fills in what the segment skips. A skip record that cannot be read is not looked at here.
func (s *SegmentInfo) readSkip(f vfs.File) {
	var rec [skipSpace]byte
	if _, err := f.ReadAt(rec[:], headerPage); err != nil {
		return
	}
	if one, ok := decodeRecord(rec[:], seedOf(s.identity)); ok && one.flags == flagSkip && one.epoch == s.First {
		if next, err := skipTo(s, headerPage, &one); err == nil {
			s.skipped = keys.EpochRange{First: one.epoch, Last: next - 1}
		}
	}
}
