package mvcc

import (
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// logMark is where a record begins in the log, such that no commit before it is later than a time. From marks, the log is read
// around a time or an epoch without what is before it in its segment. There is one for each sample, and one after each
// markBytes, as far as the timeline gets to it. They are in memory alone: after a restart, segments of earlier runs are read
// from their beginning.
type logMark struct {
	wal.TailMark
	at uint64 // microseconds since 1970
}

const (
	marksPerSample = 8
	markBytes      = 4 << 20
	// marksMax bounds the memory of marks to 160 KiB. It is enough for 16 GiB of log, or for an hour of samples.
	marksMax = 4096
	// logReadMax bounds what is read to find one time in the log: without a mark, the rest of a segment and what is logged
	// between two samples.
	logReadMax = 128 << 20
	// commitsReadMax bounds what is read to describe the commits of one part of a history.
	commitsReadMax = 16 << 20
)

// markLog adds a mark if much was logged since the last one.
func (s *Store) markLog(ctx context.Context, x *Session) {
	t := &s.timeline
	if t.keep == 0 {
		return
	}
	if mark := s.engine.LogMark(); t.wantsMark(mark, t.markBytes) && s.watermark.wait(ctx, mark.Epoch()-1, x.parker) == nil {
		t.mark(logMark{at: s.clock.Now(), TailMark: mark}, t.markBytes)
	}
}

// wantsMark reports whether a mark is so far after the last one.
func (t *timeline) wantsMark(mark wal.TailMark, bytesMin int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.wantsMarkLocked(mark, bytesMin)
}

func (t *timeline) wantsMarkLocked(mark wal.TailMark, bytesMin int64) bool {
	if mark.Epoch() == 0 || len(t.marks) == 0 {
		return mark.Epoch() > 0
	}
	last := t.marks[len(t.marks)-1]
	bytes, same := last.BytesTo(mark)
	return mark.Epoch() > last.Epoch() && (!same || bytes >= bytesMin)
}

func (t *timeline) mark(m logMark, bytesMin int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.wantsMarkLocked(m.TailMark, bytesMin) {
		t.marks = append(t.marks, m)
		t.marks = slices.Delete(t.marks, 0, max(0, len(t.marks)-marksMax))
	}
}

// markBefore is the newest mark up to an epoch, and markAt the newest one that is not after a time. Zero if there is none.
func (t *timeline) markBefore(e keys.Epoch) logMark {
	return t.newestMark(func(m *logMark) bool { return m.Epoch() <= e })
}

func (t *timeline) markAt(at uint64) logMark {
	return t.newestMark(func(m *logMark) bool { return m.at <= at })
}

func (t *timeline) newestMark(is func(*logMark) bool) logMark {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, _ := slices.BinarySearchFunc(t.marks, 0, func(m logMark, _ int) int {
		if is(&m) {
			return -1
		}
		return 1
	})
	if i == 0 {
		return logMark{}
	}
	return t.marks[i-1]
}

// readCommits reads what the log says of the commits in (after, through], which must be durable, from a mark on. At most
// logReadsMax read at once. It reports false if not all of them could be read.
func (s *Store) readCommits(ctx context.Context, after, through keys.Epoch, mark logMark, bytesMax int64, visit func(keys.Epoch, batch.Header) bool) (read int64, complete bool) {
	select {
	case s.timeline.logReads <- struct{}{}:
		defer func() { <-s.timeline.logReads }()
	case <-ctx.Done():
		return 0, false
	}
	read, complete = s.engine.ReadCommits(after, through, mark.TailMark, bytesMax, func(e keys.Epoch, h batch.Header) bool {
		return ctx.Err() == nil && visit(e, h)
	})
	s.timeline.logRead.Add(uint64(read))
	return read, complete && ctx.Err() == nil
}
