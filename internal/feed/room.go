package feed

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// Large commits are read when there is room for them: the ring, the queues, and the records that are being read have
// Options.MemoryBytes together, but for one commit that is larger than that. To make room, commits leave the ring, and watches
// lose their queues. A read does not wait for a client: a commit that was offered a moment ago is left to the streams for roomWait,
// in which each of them can take something of it, and a stream keeps nothing of a large commit but what it sends. Reads get room
// in the order in which they ask for it, so that the tailer is served however much is read for lagging watches. A reader for
// watches that all have a queue takes none of these, or they would be offered the same again and again: it leaves.
//
// A stream may need longer than roomWait until it has memory for a large operation, and its watch has lost its queue then. The stream
// keeps that memory, and the watch keeps the next queue that it gets until the stream has taken the operation from it
// (Consumer.Take). A read that needs room waits for that, as it waits for copies: the stream waits for no client meanwhile. So each
// stream that has memory for its large operation delivers it, however slow the machine is. An awaited watch has a turn of its own:
// the log is read from its position on, and it keeps its place in the line until then. Otherwise others of the same client that are
// before it in the log, and lose their queues again and again, would have the same part of the log read each time, and the reader would not
// come to what the stream waits for.
const (
	roomWait  = 50 * time.Millisecond
	roomEvery = 5 * time.Millisecond
)

// logReader reads the log, and has room for the record at hand.
type logReader struct {
	*wal.TailReader
	feed     *Feed
	group    *group // for which it reads; nil: the tailer
	reserved int64
}

// errQueued says that there is no room for a record before the watches for which it is read have delivered what they have.
var errQueued = errors.New("feed: no room beside what is queued")

// readLog begins to read the log. A read that waits for room ends with the context.
func (f *Feed) readLog(ctx context.Context, g *group, next keys.Epoch, mark wal.TailMark) *logReader {
	l := &logReader{TailReader: f.source.ReadLog(next, mark), feed: f, group: g}
	l.Admit(func(bytes int) error { return l.reserve(ctx, int64(bytes)) })
	return l
}

// next returns the next record. What the one before has become was offered to the watches, and is counted there. After an error,
// the reader has no room: what follows an error may take long.
func (l *logReader) next(through keys.Epoch) (wal.TailRecord, bool, error) {
	l.release()
	rec, ok, err := l.Next(through)
	if !ok {
		l.release()
	}
	return rec, ok, err
}

func (l *logReader) close() {
	l.release()
	_ = l.Close() // it was only read
}

// reserve waits until there is room for a record.
func (l *logReader) reserve(ctx context.Context, bytes int64) error {
	f := l.feed
	for {
		f.lock()
		ok, err := f.reserveLocked(l, bytes)
		if err = cmp.Or(err, ctx.Err()); !ok && err != nil {
			f.memory.line = slices.DeleteFunc(f.memory.line, func(one *logReader) bool { return one == l })
		}
		f.unlock()
		switch {
		case ok:
			return nil
		case err != nil:
			return err
		}
		f.options.wait(ctx)
	}
}

func (l *logReader) release() {
	if l.reserved == 0 {
		return
	}
	f := l.feed
	f.lock()
	defer f.unlock()
	f.memory.reading -= l.reserved
	f.memory.offered = time.Now()
	l.reserved = 0
}

// reserveLocked makes room for a record, or reports false if that has to wait.
func (f *Feed) reserveLocked(l *logReader, bytes int64) (ok bool, err error) {
	m := &f.memory
	if !slices.Contains(m.line, l) {
		m.line = append(m.line, l)
	}
	if m.line[0] != l {
		return false, nil
	}
	if ok, err = f.makeRoomForLocked(l.group, bytes); !ok {
		return false, err
	}
	m.line = slices.Delete(m.line, 0, 1)
	m.reading += bytes
	l.reserved = bytes
	return true, nil
}

// makeRoomForLocked makes room for a record, or reports false if that has to wait. Queues go before it waits for copies: otherwise
// streams that copy one part after the other would keep it waiting.
func (f *Feed) makeRoomForLocked(g *group, bytes int64) (ok bool, err error) {
	m := &f.memory
	hasRoom := func() bool { return f.ring.bytes+m.queues+m.reading+bytes <= f.options.MemoryBytes }
	for !hasRoom() && f.ring.len() > 0 {
		f.dropFromRingLocked()
	}
	if hasRoom() {
		return true, nil
	}
	if g != nil && !g.hungryLocked() {
		return false, errQueued
	}
	full, awaited := f.byWaitLocked()
	if m.reading > 0 || len(full) > 0 && time.Since(m.offered) < f.options.roomWait {
		return false, nil
	}
	for _, w := range full {
		if hasRoom() {
			break
		}
		f.evictLocked(w)
	}
	return m.copied == 0 && awaited == 0 || hasRoom(), nil
}

// isAwaitedLocked reports whether the stream of a watch has memory for its next operation, and waits until it can take that.
func (w *Watch) isAwaitedLocked() bool { return w.consumer.awaited == w }

// hungryLocked reports whether some watch of the group has nothing to deliver. If none has, they are read for again when their
// consumers have taken something.
func (g *group) hungryLocked() bool {
	for _, w := range g.watches {
		if w.group == g && w.queue.len() == 0 {
			return true
		}
	}
	for _, w := range g.watches {
		if w.group == g {
			w.full = true
		}
	}
	return false
}
