package wal

import (
	"errors"
	"fmt"
	"io"
	iofs "io/fs"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// tailWindowBytes is how much of a file a TailReader reads at a time. Only a larger record makes it read more.
const tailWindowBytes = 256 << 10

// TruncatedError says that the log does not have an epoch any more.
type TruncatedError struct {
	Epoch  keys.Epoch // that is asked for
	Oldest keys.Epoch // the first one that the log has
}

func (e *TruncatedError) Error() string {
	return fmt.Sprintf("wal: epoch %d is not in the log any more, which begins at epoch %d", e.Epoch, e.Oldest)
}

// TailReader reads the records of an open log from its files, in the order of their epochs, while the log is written. It
// reads what is durable, and never a segment buffer. It is for one goroutine.
//
// The reader keeps nothing of the log: without a Holder, the next record may be gone (TruncatedError). It takes no lock
// but the one of the list of segments, briefly, whenever it comes to the end of what it has read.
type TailReader struct {
	log  *Log
	next keys.Epoch // the first epoch that was not returned

	segment    tailSegment // zero before the first one
	superseded uint64      // completed.superseded when the segment was looked up
	file       vfs.File
	pos        int64      // of the next record
	at         keys.Epoch // its epoch
	term       keys.Term  // of the records from there on
	buf        []byte     // bytes of the file
	bufAt      int64      // where they begin
	read       int64
	admit      func(bytes int) error
	held       bool // nothing is read, so that what was returned stays valid
}

// TailRecord is what the log has of one epoch, or that it has none.
type TailRecord struct {
	Epoch keys.Epoch
	Term  keys.Term // of a record, or of the one after skipped epochs
	Body  []byte    // a batch body, empty for a no-op record; valid until the next call of Next, or the caller's if it is Owned
	Owned bool      // the reader keeps nothing of Body: the record was larger than what it reads at a time
	// Gap means that no record has the epochs from the one before up to this one. Skipped tells that a restart skipped them:
	// they name no commit. Without it a bulk load took effect at Epoch, or several did at epochs up to it.
	Gap, Skipped bool
	First        keys.Epoch // of the epochs that were skipped, also if the reader began between them
}

// TailMark is where a TailReader was, from which another one can go on without reading what is before. The zero mark is
// nowhere.
type TailMark struct {
	number uint64
	offset int64
	epoch  keys.Epoch
	term   keys.Term
}

// Epoch is that of the record that begins at the mark; zero for the zero mark.
func (m TailMark) Epoch() keys.Epoch { return m.epoch }

// BytesTo is the number of bytes of the log from m to other, if both are in one segment.
func (m TailMark) BytesTo(other TailMark) (int64, bool) {
	return other.offset - m.offset, m.number == other.number && m.number != 0
}

// ReadFrom reads the log from the epoch next on. If mark is in the segment of next, and not after it, the reader begins there.
func (l *Log) ReadFrom(next keys.Epoch, mark TailMark) *TailReader {
	r := &TailReader{log: l, next: next}
	if s, found, err := l.completed.find(next); err == nil && found && s.number == mark.number && mark.epoch <= next {
		if r.open(s) == nil {
			r.pos, r.at, r.term = mark.offset, mark.epoch, mark.term
		}
	}
	return r
}

// Mark is where the reader is.
func (r *TailReader) Mark() TailMark {
	if r.file == nil {
		return TailMark{}
	}
	return TailMark{r.segment.number, r.pos, r.at, r.term}
}

// Seek goes back to a mark that the reader had, to return the records with epochs from next on, without reading again what it has in
// memory. It reports false, and changes nothing, if the reader is in another segment now.
func (r *TailReader) Seek(next keys.Epoch, mark TailMark) bool {
	if r.file == nil || r.segment.number != mark.number || mark.epoch > next {
		return false
	}
	r.next, r.pos, r.at, r.term = next, mark.offset, mark.epoch, mark.term
	return true
}

// Position is the first epoch that Next has not returned.
func (r *TailReader) Position() keys.Epoch { return r.next }

// BytesRead is how many bytes the reader has read.
func (r *TailReader) BytesRead() int64 { return r.read }

// Admit sets what is asked before memory is taken for a record that is larger than what is read at a time. Its error is that of
// Next, which changes nothing.
func (r *TailReader) Admit(admit func(bytes int) error) { r.admit = admit }

// Close closes the file.
func (r *TailReader) Close() error {
	if cap(r.buf) > tailWindowBytes {
		r.buf = nil
	}
	if r.file == nil {
		return nil
	}
	err := r.file.Close()
	r.file = nil
	return err
}

// Next returns the next record with an epoch up to through, which must be durable. It reports false if there is none.
// Errors: *TruncatedError, *CorruptionError, *VersionError, and those of the file system. After an error the next call
// tries again.
func (r *TailReader) Next(through keys.Epoch) (rec TailRecord, ok bool, err error) {
	if r.file != nil && r.superseded != r.log.completed.superseded.Load() {
		_ = r.Close() // what is buffered may not be part of the history any more
	}
	for r.next <= through {
		if r.file == nil || r.next > r.segment.last() {
			gap, found, err := r.locate()
			if err != nil || !found {
				return TailRecord{}, false, err
			}
			if gap != 0 {
				return r.gap(gap, through)
			}
		}
		rec, ok, err := r.step()
		if err != nil {
			_ = r.Close()
			return TailRecord{}, false, r.explain(err)
		}
		if ok {
			return rec, true, nil
		}
	}
	return TailRecord{}, false, nil
}

// More is Next for a record that is in memory already: the bodies that were returned before it stay valid. It reports false if that
// is not so; then Next goes on, and says what is wrong.
func (r *TailReader) More(through keys.Epoch) (rec TailRecord, ok bool) {
	r.held = true
	defer func() { r.held = false }()
	for r.file != nil && r.next <= min(through, r.segment.last()) && r.superseded == r.log.completed.superseded.Load() {
		rec, ok, err := r.step()
		if ok || err != nil {
			return rec, ok
		}
	}
	return TailRecord{}, false
}

// gap returns the epochs up to the last one as passed, once all of them are durable and visible.
func (r *TailReader) gap(last, through keys.Epoch) (TailRecord, bool, error) {
	if last > through {
		return TailRecord{}, false, nil
	}
	r.next = last + 1
	return TailRecord{Epoch: last, Gap: true}, true, nil
}

// locate opens the segment that has the next epoch, or returns the last epoch of a gap that begins with it. It reports
// false if the log does not have the next epoch yet.
func (r *TailReader) locate() (gap keys.Epoch, found bool, err error) {
	r.superseded = r.log.completed.superseded.Load()
	s, found, err := r.log.completed.find(r.next)
	if err != nil || !found {
		return 0, false, err
	}
	if s.gap != 0 {
		return s.gap, true, nil
	}
	if r.file != nil && r.segment.number == s.number {
		r.segment = s
		return 0, true, nil
	}
	return 0, true, r.open(s)
}

// open goes to the beginning of a segment.
func (r *TailReader) open(s tailSegment) error {
	if err := errors.Join(r.Close(), s.Damage); err != nil {
		return r.explain(err)
	}
	f, err := r.log.opts.FS.Open(s.File, vfs.ReadOnly)
	if err != nil {
		return r.explain(fmt.Errorf("wal: %w", err))
	}
	r.segment, r.file, r.pos, r.at, r.term, r.buf = s, f, headerPage, s.First, s.term, r.buf[:0]
	return nil
}

// step reads the record at the reader's position. It reports false for a record that is not to be returned.
func (r *TailReader) step() (TailRecord, bool, error) {
	head, err := r.bytes(recordHeaderSize)
	if err != nil {
		return TailRecord{}, false, err
	}
	length, fits := recordLength(head, r.segment.end()-r.pos)
	if !fits {
		return TailRecord{}, false, r.damaged("the record is not intact")
	}
	if e, flags := epochAt(head), flagsAt(head); r.at < r.next && e == r.at && holdsEpoch(flags) { // before the start: only its length is needed
		r.pos, r.at = r.pos+int64(recordSpace(length)), r.at+1
		return TailRecord{}, false, nil
	}
	src, err := r.bytes(int(recordSpace(length)))
	if err != nil {
		return TailRecord{}, false, err
	}
	one, ok := decodeRecord(src, seedOf(r.segment.identity))
	if !ok || one.epoch != r.at {
		return TailRecord{}, false, r.damaged("the record is not intact")
	}
	return r.record(&one)
}

// record passes an intact record, and returns it if it has an epoch that was not returned.
func (r *TailReader) record(one *record) (rec TailRecord, ok bool, err error) {
	s, at := &r.segment.SegmentInfo, r.pos
	if err := checkFlags(s, at, one.flags); err != nil {
		return rec, false, err
	}
	switch one.flags {
	case flagClose:
		return r.closeRecord(one)
	case flagTerm:
		r.term, _, ok = termsOf(one.body)
		if !ok {
			return rec, false, malformed(s, at, "term", one.body)
		}
		ok = false
	case flagSkip:
		next, err := skipTo(s, at, one)
		if err != nil {
			return rec, false, err
		}
		r.at = next
		rec, ok = TailRecord{Epoch: next - 1, Term: r.term, Gap: true, Skipped: true, First: one.epoch}, next > r.next
	default:
		body, err := batchOf(s, at, one)
		if err != nil {
			return rec, false, err
		}
		r.at++
		rec, ok = TailRecord{Epoch: one.epoch, Term: r.term, Body: body}, one.epoch >= r.next
		if rec.Owned = cap(r.buf) > tailWindowBytes; rec.Owned {
			r.buf = nil
		}
	}
	r.pos += int64(one.space)
	if ok {
		r.next = rec.Epoch + 1
	}
	return rec, ok, nil
}

// closeRecord passes the close record of a segment of an earlier run before the last epoch that the segment could have: a
// bulk load took effect between it and the next segment.
func (r *TailReader) closeRecord(one *record) (TailRecord, bool, error) {
	successor, err := successorOf(&r.segment.SegmentInfo, r.pos, one)
	if err != nil {
		return TailRecord{}, false, err
	}
	following, readable := r.log.completed.following(r.segment.number)
	switch {
	case !r.segment.complete || !readable:
		return TailRecord{}, false, r.damaged("the segment ends before it, and the next one cannot be read")
	case successor != 0 && successor != following.number: // this file is left of those that an earlier run gave up
		return TailRecord{}, false, &TruncatedError{Epoch: r.next, Oldest: following.First}
	}
	rec := TailRecord{Epoch: r.segment.lastOne, Gap: true}
	r.next, r.at = rec.Epoch+1, rec.Epoch+1
	return rec, true, nil
}

var errNotInMemory = errors.New("wal: the record is not in memory")

// bytes are n bytes at the reader's position, valid until the next call that reads.
func (r *TailReader) bytes(n int) ([]byte, error) {
	if r.pos >= r.bufAt && r.pos+int64(n) <= r.bufAt+int64(len(r.buf)) {
		return r.buf[r.pos-r.bufAt:][:n], nil
	}
	if r.held {
		return nil, errNotInMemory
	}
	end := r.segment.end()
	if r.pos+int64(n) > end {
		return nil, r.damaged("the segment ends before it")
	}
	want := int(min(max(int64(n), tailWindowBytes), end-r.pos))
	if cap(r.buf) < want {
		if want > tailWindowBytes && r.admit != nil {
			if err := r.admit(want); err != nil {
				return nil, err
			}
		}
		r.buf = make([]byte, want)
	}
	r.buf, r.bufAt = r.buf[:want], r.pos
	read, err := r.file.ReadAt(r.buf, r.pos)
	if read < n && errors.Is(err, vfs.ErrDevice) { // the kernel reads many pages at once, and may return none because of a later one
		read, err = r.file.ReadAt(r.buf[:n], r.pos)
	}
	r.read += int64(read)
	r.buf = r.buf[:read]
	if read < n {
		if err == nil || errors.Is(err, io.EOF) {
			return nil, r.damaged("the file ends before it")
		}
		return nil, fmt.Errorf("wal: read %s at offset %d: %w", r.segment.File, r.pos, err)
	}
	return r.buf[:n], nil
}

// damaged is the error about a record that cannot be read. If it may be in a segment that is missing, it counts as truncated.
func (r *TailReader) damaged(reason string) error {
	if next, hole := r.log.completed.holeAfter(r.segment.number); hole {
		return &TruncatedError{Epoch: r.next, Oldest: next}
	}
	return corruption(r.segment.File, r.pos, r.at, reason)
}

// explain replaces the error about a file that was recycled meanwhile.
func (r *TailReader) explain(err error) error {
	var truncated *TruncatedError
	if _, _, gone := r.log.completed.find(r.next); errors.As(gone, &truncated) {
		return gone
	}
	if errors.Is(err, iofs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}

func flagsAt(head []byte) uint8 { return head[epochOffset+7] }

// tailSegment is a segment as a TailReader sees it, or a gap between two segments.
type tailSegment struct {
	SegmentInfo
	gap      keys.Epoch // not zero: no segment has the epochs up to this one
	complete bool
	lastOne  keys.Epoch // its last epoch if it is complete
	segment  *Segment   // if it is not complete
}

// last is the last epoch of the segment, as far as it is known.
func (s *tailSegment) last() keys.Epoch {
	if s.complete {
		return s.lastOne
	}
	if _, next, sealed := s.segment.sealedAt(); sealed {
		return next - 1
	}
	return keys.MaxEpoch
}

// end is the offset up to which the segment can be read.
func (s *tailSegment) end() int64 {
	if s.complete {
		return s.Bytes
	}
	return int64(s.segment.synced.Load())
}

// find returns the segment that has an epoch, or the gap that begins with it: the newest segment that begins at or before
// the epoch. It reports false if the epoch was not given out yet.
func (r *completed) find(e keys.Epoch) (s tailSegment, found bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	after := r.skipped // the first epoch after the segment
	for i := len(r.open) - 1; i >= 0 && !found; i-- {
		if o := r.open[i]; o.header.first <= e {
			s, found = tailSegment{SegmentInfo: o.info(), segment: o}, true
		} else {
			after = o.header.first
		}
	}
	for i := len(r.segments) - 1; i >= 0 && !found; i-- {
		if c := &r.segments[i]; c.info.First <= e && c.info.readable() {
			s, found = tailSegment{SegmentInfo: c.info, complete: true, lastOne: c.end}, true
		} else if c.info.readable() {
			after = c.info.First
		}
	}
	if found && e <= s.last() {
		return s, true, nil
	}
	if after > e && found {
		return tailSegment{gap: after - 1}, true, nil
	}
	if !found {
		return s, false, &TruncatedError{Epoch: e, Oldest: max(after, e+1)}
	}
	return s, false, nil
}

// following is the segment after a complete one. It reports false if there is none, or if its header cannot be read.
func (r *completed) following(number uint64) (s SegmentInfo, readable bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.segments {
		if s := &r.segments[i].info; s.number > number {
			return *s, s.readable()
		}
	}
	if len(r.open) == 0 {
		return SegmentInfo{}, false
	}
	return r.open[0].info(), true
}

// holeAfter reports whether a segment may be missing after one that an earlier run has written, and returns the first epoch of the one
// that is there. An earlier run may have given segments up, and a crash may have brought a part of them back, without the
// close records that tell. Segments with consecutive numbers have none between them.
func (r *completed) holeAfter(number uint64) (next keys.Epoch, hole bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.segments {
		if !r.segments[i].earlier || r.segments[i].info.number != number {
			continue
		}
		if i+1 < len(r.segments) {
			s := &r.segments[i+1].info
			return s.First, s.readable() && s.number > number+1
		}
		return 0, false
	}
	return 0, false
}

// OldestEpoch is the first epoch that the log has.
func (l *Log) OldestEpoch() keys.Epoch {
	r := &l.completed
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.segments {
		if r.segments[i].info.readable() {
			return r.segments[i].info.First
		}
	}
	if len(r.open) > 0 {
		return r.open[0].header.first
	}
	return l.Durable() + 1
}

// SegmentAfter is the first epoch of the segment after the one that has e; false if there is none yet.
func (l *Log) SegmentAfter(e keys.Epoch) (first keys.Epoch, ok bool) {
	r := &l.completed
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := len(r.open) - 1; i >= 0 && r.open[i].header.first > e; i-- {
		first = r.open[i].header.first
	}
	for i := len(r.segments) - 1; i >= 0 && (len(r.open) == 0 || r.open[0].header.first > e); i-- {
		if s := &r.segments[i].info; s.readable() && s.First > e {
			first = s.First
		} else if s.readable() {
			break
		}
	}
	return first, first != 0
}
