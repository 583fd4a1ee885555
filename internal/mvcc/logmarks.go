package mvcc

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// logMark is where a record begins in the log, such that no commit before it in the log is later than a time. From marks, the log
// is read around a time or an epoch without what is before it in its segment.
type logMark struct {
	wal.TailMark
	at uint64 // microseconds since 1970
}

// logMarks are the marks of a store. The timeline adds one after each so many bytes, as far as it gets to it, and so does a reader
// that looks for a time in what earlier runs have logged. They are in memory alone.
type logMarks struct {
	mu    sync.Mutex // guards what follows
	every int64      // bytes from one to the next, at least
	list  []logMark  // ascending by epoch
}

const (
	// markEveryBytes is what a reader of the log reads at once: marks that are closer save nothing.
	markEveryBytes = 256 << 10
	// marksMax bounds the memory of marks to 128 KiB. It is enough for a log of 1 GiB; when it is reached, every second mark is
	// dropped, and later ones are twice as far from each other.
	marksMax = 4096
	// logReadMax bounds what is read to find the state at a time: without a mark, the rest of a segment and what is logged
	// between two samples.
	logReadMax = 128 << 20
	// commitsReadMax bounds what is read to describe the commits of one part of a history.
	commitsReadMax = 16 << 20
)

// markLog adds a mark if much was logged since the last one.
func (s *Store) markLog(ctx context.Context, x *Session) {
	marks := &s.timeline.marks
	if mark := s.engine.LogMark(); marks.wants(mark) && s.watermark.wait(ctx, mark.Epoch()-1, x.parker) == nil {
		marks.add(logMark{at: s.clock.Now(), TailMark: mark}, s.engine.OldestLogEpoch())
	}
}

// wants reports whether a mark is far enough from the others.
func (l *logMarks) wants(mark wal.TailMark) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, wanted := l.placeLocked(mark)
	return wanted
}

func (l *logMarks) placeLocked(mark wal.TailMark) (i int, wanted bool) {
	i, known := slices.BinarySearchFunc(l.list, mark.Epoch(), func(m logMark, e keys.Epoch) int { return cmp.Compare(m.Epoch(), e) })
	if mark.Epoch() == 0 || known {
		return i, false
	}
	far := func(from, to wal.TailMark) bool {
		bytes, same := from.BytesTo(to)
		return !same || bytes >= l.every
	}
	return i, (i == 0 || far(l.list[i-1].TailMark, mark)) && (i == len(l.list) || far(mark, l.list[i].TailMark))
}

// add adds a mark if it is far enough from the others. oldest is the first epoch of the log.
func (l *logMarks) add(m logMark, oldest keys.Epoch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, wanted := l.placeLocked(m.TailMark)
	if !wanted {
		return
	}
	if l.list = slices.Insert(l.list, i, m); len(l.list) <= marksMax {
		return
	}
	l.list = slices.DeleteFunc(l.list, func(m logMark) bool { return m.Epoch() < oldest })
	if len(l.list) > marksMax/2 {
		second := false
		l.list = slices.DeleteFunc(l.list, func(logMark) bool { second = !second; return second })
		l.every *= 2
	}
}

// newest is the newest mark up to an epoch before which no commit is later than a time. Zero if there is none.
func (l *logMarks) newest(e keys.Epoch, at uint64) logMark {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range slices.Backward(l.list) {
		if m.Epoch() <= e && m.at <= at {
			return m
		}
	}
	return logMark{}
}

// readCommits reads what the log says of the commits in (after, through], which must be durable, from a mark on. turns bounds the
// goroutines that read at once: a part of the log may be long, so clients have turns. It reports false if not all of the commits could be read. A record is as large as its commit: x, unless it is nil, counts
// a large one before it is read, and may refuse it, which is the error.
func (s *Store) readCommits(ctx context.Context, x *Session, turns *turnLine, after, through keys.Epoch, mark logMark, bytesMax int64, visit func(keys.Epoch, wal.TailMark, batch.Header) bool) (read int64, complete bool, refused error) {
	if turns.enter(ctx) != nil {
		return 0, false, nil // the context has ended
	}
	defer turns.leave()
	counted := 0 // of the largest record: one is in memory at a time
	admit := func(bytes int) error {
		if x == nil || bytes-counted < largeValueMin {
			return nil
		}
		refused = x.admitted(bytes - counted)
		counted = bytes
		return refused
	}
	read, complete = s.engine.ReadCommits(after, through, mark.TailMark, bytesMax, admit, func(e keys.Epoch, next wal.TailMark, h batch.Header) bool {
		return ctx.Err() == nil && visit(e, next, h)
	})
	s.timeline.logRead.Add(uint64(read))
	return read, complete && ctx.Err() == nil, refused
}
