package wal

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Options configure a log.
type Options struct {
	FS vfs.FS
	// Dir is the data directory; the log is in Dir(Options.Dir).
	Dir string
	// SegmentBytes is the size of a segment's file and buffer, from SegmentBytesMin to 256 MiB, in whole
	// pages.
	SegmentBytes int
	// Buffers is the largest number of standard segment buffers, which bounds how far writers run ahead of the
	// device; at least BuffersMin.
	Buffers int
	// Reserve is how many files of a segment's size are kept for the time when the device is full; see
	// Log.Reserve.
	Reserve int
	// Lineage is that of the store. Without one, segments are of version 1; see Log.SetLineage.
	Lineage keys.Lineage
	// Identity returns a random identity for a segment. Nil means crypto/rand; tests pass a seeded source.
	Identity func() uint64
}

// Log is an open log. Any number of goroutines may call its methods.
//
// Locks: rotation.mu before preallocator.mu; holders.mu before completed.mu; buffers.mu, waits.mu and completed.mu are leaves. The flush role
// (see waits) is not a lock but excludes like one; its holder takes completed.mu and buffers.mu.
type Log struct {
	opts         Options
	dir          string
	buffers      *bufferPool
	preallocator *preallocator
	durable      *paddedEpoch
	counts       counters

	window keys.Epoch // EpochWindow; smaller in tests

	failure atomic.Pointer[error] // set once, then final

	earlier       earlier // constant after Open
	rotation      rotation
	head          atomic.Pointer[Segment] // first segment of this run, where the flusher starts
	durableHeader atomic.Uint64           // number of the newest segment whose header is durable; its one writer has the flush role

	flusher   flusher // owned by the holder of the flush role
	waits     waits
	completed completed
	preparer  preparer

	closed     atomic.Bool
	stop       chan struct{}
	refill     chan struct{} // capacity 1: a preallocated segment was taken, or a buffer came back
	background sync.WaitGroup
}

// earlier is the log before this run.
type earlier struct {
	last keys.Epoch // this run begins after it, or skips some epochs
	tail tail       // where it ends
}

// rotation is what a change of segments uses. mu guards it.
type rotation struct {
	mu      sync.Mutex
	last    *Segment     // the newest
	next    keys.Epoch   // first epoch of the first segment
	skipped keys.Epoch   // see Skip
	lineage keys.Lineage // of new segments; zero for segments of version 1
	terms   terms
}

// Open continues the log that Recover has read. It truncates a torn tail, and starts two goroutines: one
// flushes, the other preallocates segments. Close ends both. The caller makes the first segment, at
// rec.Next().
func Open(opts Options, rec Recovery) (*Log, error) {
	if opts.SegmentBytes < SegmentBytesMin || opts.SegmentBytes > SegmentBytesMax || opts.SegmentBytes%pageSize != 0 {
		return nil, fmt.Errorf("wal: segment size %d is not a multiple of %d from %d to %d",
			opts.SegmentBytes, pageSize, SegmentBytesMin, SegmentBytesMax)
	}
	if opts.Identity == nil {
		opts.Identity = randomIdentity
	}
	dir := Dir(opts.Dir)
	if err := completeRecovery(opts.FS, opts.Dir, rec); err != nil {
		return nil, err
	}
	l := &Log{
		opts:    opts,
		dir:     dir,
		buffers: &bufferPool{size: opts.SegmentBytes, max: max(opts.Buffers, BuffersMin)},
		durable: new(paddedEpoch),
		window:  EpochWindow,
		earlier: earlier{last: rec.Last, tail: rec.tail},
		stop:    make(chan struct{}),
		refill:  make(chan struct{}, 1),
	}
	l.rotation.next, l.rotation.lineage, l.rotation.terms = rec.Next(), opts.Lineage, rec.terms
	l.preallocator = &preallocator{fs: opts.FS, dir: dir, buffers: l.buffers, names: &names{fs: opts.FS, dir: dir}, number: rec.lastNumber}
	l.durable.epoch.Store(uint64(l.rotation.next - 1))
	l.waits.wake, l.waits.groupReached = make(chan struct{}, 1), make(chan struct{}, 1)
	if err := l.preallocator.adoptReserve(opts.Reserve); err != nil {
		return nil, err
	}
	l.adopt(rec)
	l.background.Add(2)
	go l.runFlusher()
	go l.runPreallocator()
	return l, nil
}

// completeRecovery brings the directory to the state that rec describes.
func completeRecovery(fs vfs.FS, dataDir string, rec Recovery) error {
	if err := fs.MkdirAll(Dir(dataDir)); err != nil {
		return fmt.Errorf("wal: %w", err)
	}
	if err := fs.SyncDir(dataDir); err != nil {
		return fmt.Errorf("wal: %w", err)
	}
	if !rec.resynced {
		if err := resync(fs, dataDir); err != nil {
			return err
		}
	}
	if rec.tail.successor != 0 { // the file of the successor becomes another segment
		if err := replaceCloseRecord(fs, rec.tail.file, rec.tail.offset, make([]byte, closeRecordSpace)); err != nil {
			return fmt.Errorf("wal: remove a close record that names a segment without records: %w", err)
		}
	}
	for i := range rec.uncut {
		if err := truncate(fs, &rec.uncut[i]); err != nil {
			return fmt.Errorf("wal: truncate what an interrupted repair has left: %w", err)
		}
	}
	if rec.Torn == nil {
		return nil
	}
	if err := truncate(fs, rec.Torn); err != nil {
		return fmt.Errorf("wal: truncate the torn tail: %w", err)
	}
	return nil
}

// truncate removes the end of a file.
func truncate(fs vfs.FS, t *TornTail) error {
	f, err := fs.Open(t.File, vfs.ReadWrite)
	if err != nil {
		return err
	}
	if err = f.Truncate(t.Offset); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// replaceCloseRecord replaces the close record of a segment of an earlier run.
func replaceCloseRecord(fs vfs.FS, file string, offset int64, closeRecord []byte) error {
	f, err := fs.Open(file, vfs.ReadWrite)
	if err != nil {
		return err
	}
	if _, err = f.WriteAt(closeRecord, offset); err == nil {
		err = f.SyncData()
	}
	return errors.Join(err, f.Close())
}

// link adds the number of the first segment of this run to the close record of the log before it. If that
// fails, the log is as it was: it only does not prove that there was a next segment. The segment's name is
// durable. Its header is not durable yet: with a durable header, the log would meanwhile seem to be
// complete without the segment.
//
// After a bulk load, only the close record tells later readers of the log that nothing is missing between its last record and the
// next segment. Then an error is returned, but for that of a full disk, which must not keep a store from starting.
func (l *Log) link(s *Segment) error {
	t := &l.earlier.tail
	if t.file == "" {
		return nil
	}
	closeRecord := make([]byte, closeRecordSpace)
	putCloseRecord(closeRecord, t.seed, t.next, t.next-1, s.number)
	err := replaceCloseRecord(l.opts.FS, t.file, t.offset, closeRecord)
	if gap := l.earlier.last >= t.next; gap && err != nil && !errors.Is(err, vfs.ErrNoSpace) {
		return fmt.Errorf("write the close record before a bulk load: %w", err)
	}
	l.recordFailure(err)
	return nil
}

// adopt takes over the files that Replay found: segments to be truncated later, and files without records
// to be used.
func (l *Log) adopt(rec Recovery) {
	old, now := make([]completedSegment, len(rec.Segments)), time.Now()
	end := rec.Last
	for i := len(old) - 1; i >= 0; i-- {
		s := &rec.Segments[i]
		size := rec.sizeOf(s)
		if s.File == rec.tail.file { // a bulk load may have taken epochs after its last record
			end = min(end, max(rec.tail.next, 1)-1)
		}
		old[i] = completedSegment{info: *s, end: end, size: size, completed: now, earlier: true}
		if s.Damage == nil { // else the segment before it ends where the next segment with a known first epoch begins
			end = min(end, s.First-1)
		}
		l.counts.segmentBytes.Add(size)
	}
	l.completed.segments, l.completed.needed = old, rec.after+1
	l.counts.segments.Store(int64(len(rec.Segments)))
	for _, b := range rec.preallocated {
		if !l.preallocator.usable(b.path, b.size) {
			l.preallocator.scheduleRemoval(b.path)
		} else if !l.preallocator.addToReserve(b.path, b.size) {
			l.preallocator.recycle(b.path, b.size)
		}
	}
	l.recordFailure(l.preallocator.removeScheduled())
}

// sizeOf is the size of a segment's file after Open, which may have truncated it: then most of its blocks are gone.
func (rec *Recovery) sizeOf(s *SegmentInfo) int64 {
	if rec.Torn != nil && rec.Torn.File == s.File {
		return rec.Torn.Offset
	}
	for i := range rec.uncut {
		if rec.uncut[i].File == s.File {
			return rec.uncut[i].Offset
		}
	}
	return s.Bytes
}

func randomIdentity() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	return binary.LittleEndian.Uint64(b[:])
}

// Durable is the durable epoch.
func (l *Log) Durable() keys.Epoch { return keys.Epoch(l.durable.epoch.Load()) }

// Err is the failure that stopped the log, or nil. It matches ErrFailed.
func (l *Log) Err() error {
	if p := l.failure.Load(); p != nil {
		return *p
	}
	return nil
}

// fail makes err final, unless another failure came first, wakes every waiter, and returns the final
// error. No wait begins afterwards, so that no goroutine waits for a flusher that has stopped.
func (l *Log) fail(err error) error {
	err = fmt.Errorf("%w: %w", ErrFailed, err)
	l.failure.CompareAndSwap(nil, &err)
	l.wakeAll()
	return l.Err()
}

// Fail stops the log for a reason of its owner, as a failed write does, and returns the final error.
func (l *Log) Fail(cause error) error { return l.fail(cause) }

func (l *Log) usable() error {
	if l.closed.Load() {
		return ErrClosed
	}
	return l.Err()
}

// Skip says that there are no commits between the end of the last segment, which is sealed and durable, and
// the epoch next. Everything before next counts as durable. The next segment starts at next.
func (l *Log) Skip(next keys.Epoch) {
	l.rotation.mu.Lock()
	defer l.rotation.mu.Unlock()
	l.rotation.skipped = next
	l.completed.skipTo(next)
	l.durable.epoch.Store(uint64(next - 1))
	l.wakeAll()
}

// nextFirst is the epoch at which the next segment has to start; false while the last one is open.
func (l *Log) nextFirst() (keys.Epoch, bool) {
	if l.rotation.last == nil {
		return l.rotation.next, true
	}
	_, next, sealed := l.rotation.last.sealedAt()
	return max(next, l.rotation.skipped), sealed
}

// skipSpace is the space of the skip record at the beginning of a segment whose first reservation has the
// given epoch.
func (l *Log) skipSpace(first keys.Epoch) int {
	if l.rotation.last == nil && first > l.earlier.last+1 {
		return skipSpace
	}
	return 0
}

// windowStart is the epoch that must be durable so that no epoch of the next segment, of at least size
// bytes, can be past the window; zero if no epoch must be. The caller holds rotation.mu.
func (l *Log) windowStart(size int) keys.Epoch {
	first, _ := l.nextFirst()
	most := keys.Epoch(max(size+pageSize, l.opts.SegmentBytes) / recordHeaderSize)
	return max(first+most, l.window) - l.window
}

// SetLineage lets the next segments be of version 2, with a lineage that is durable in the data file.
func (l *Log) SetLineage(lineage keys.Lineage) {
	l.rotation.mu.Lock()
	defer l.rotation.mu.Unlock()
	l.rotation.lineage = lineage
}

// TermOf is the term of an epoch that the log has, or of the one before them.
func (l *Log) TermOf(e keys.Epoch) keys.Term {
	l.rotation.mu.Lock()
	defer l.rotation.mu.Unlock()
	return l.rotation.terms.of(e)
}

// historyAt is the history that the header of a segment has whose first record has an epoch.
func (l *Log) historyAt(first keys.Epoch) (version uint32, h history) {
	r := &l.rotation
	if r.lineage == (keys.Lineage{}) {
		return version1, history{}
	}
	return version2, history{term: r.terms.last(), previousTerm: r.terms.of(first - 1), lineage: prefixOf(r.lineage)}
}

func (l *Log) newSegment(b *preallocated, first keys.Epoch) *Segment {
	identity := l.opts.Identity()
	h := header{identity: identity, number: b.number, first: first}
	begin := headerPage + l.skipSpace(first)
	if begin > headerPage {
		h.first = l.earlier.last + 1
		putSkip(b.buffer[headerPage:begin], seedOf(identity), h.first, first)
	}
	h.version, h.history = l.historyAt(h.first)
	putHeader(b.buffer, h)
	s := &Segment{
		header:  h,
		first:   first,
		begin:   uint32(begin),
		limit:   uint64(len(b.buffer)-headerPage-closeRecordSpace) / recordAlign,
		seed:    seedOf(identity),
		buffer:  b.buffer,
		durable: l.durable,
		path:    b.path,
		file:    b.file,
		pooled:  b.pooled,
	}
	s.tail.Store(uint64(begin-headerPage) / recordAlign)
	return s
}

// Close flushes what is published, waits for the goroutines, and frees everything. No goroutine may
// reserve any more, and everything that was reserved must have been published. A goroutine that still
// waits gets ErrClosed unless its epoch became durable.
func (l *Log) Close() error {
	if l.closed.Swap(true) {
		return ErrClosed
	}
	close(l.stop)
	l.background.Wait()
	err := l.finish()
	l.rotation.mu.Lock() // a running NewSegment has returned
	defer l.rotation.mu.Unlock()
	s := l.flusher.segment
	if s == nil {
		s = l.head.Load()
	}
	for ; s != nil; s = s.next.Load() {
		err = errors.Join(err, s.file.Close(), l.buffers.unmap(s.buffer))
	}
	return errors.Join(err, l.preallocator.close(), l.buffers.free())
}
