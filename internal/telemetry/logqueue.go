package telemetry

import (
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/config"
)

const (
	// logQueueBytes bounds the lines that wait to be written: some 5,000, of which no incident has more in the time of a slow disk.
	logQueueBytes = 1 << 20
	// logEndMax is how long the end of a process waits for its last lines.
	logEndMax = time.Second
)

// logQueue is a writer that never waits. What reads the log may be slow, or may have stopped without closing its end: a pager, a collector
// of logs, a full device of the logs of a container. The server logs while it holds locks, in requests and while it stops, so that a
// line that waits for its reader would hold up all of these. A goroutine writes the lines in order, each with one call. A line for which there
// is no room is dropped and counted; when the reader takes lines again, one says how many are missing.
type logQueue struct {
	// Constant.
	to    io.Writer
	lost  func(lines uint64) // writes a line to to
	wake  chan struct{}      // has a value if there is something to write
	ended chan struct{}      // closed when everything has been written after end

	mu      sync.Mutex // a leaf; guards what follows
	lines   [][]byte
	bytes   int    // of lines
	dropped uint64 // since the last line that was written
	closed  bool   // nothing is taken any more
}

// StartLog makes the log of a process, which writes lines of the configured level and format to w. The end waits for the last
// lines, but not longer than a second; lines after it are dropped.
func StartLog(w io.Writer, level slog.Leveler, format config.LogFormat) (log *slog.Logger, end func()) {
	direct := NewLogger(w, slog.LevelInfo, format)
	q := &logQueue{to: w, wake: make(chan struct{}, 1), ended: make(chan struct{}), lost: func(lines uint64) {
		direct.Warn("lines of the log were dropped here, because what reads the log did not take them", "lines", lines)
	}}
	go q.run()
	return NewLogger(q, level, format), q.end
}

// Write implements io.Writer for one line. It keeps nothing of p, and never fails.
func (q *logQueue) Write(p []byte) (int, error) {
	q.mu.Lock()
	if q.closed || q.bytes+len(p) > logQueueBytes {
		q.dropped++
	} else {
		q.lines, q.bytes = append(q.lines, append([]byte(nil), p...)), q.bytes+len(p)
	}
	q.mu.Unlock()
	q.signal()
	return len(p), nil
}

func (q *logQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// run writes lines until all have been written after end. A line that cannot be written is lost, as its reader is.
func (q *logQueue) run() {
	defer close(q.ended)
	for range q.wake {
		for {
			line, dropped, closed := q.next()
			if dropped > 0 {
				q.lost(dropped)
			}
			if line == nil {
				if closed {
					return
				}
				break
			}
			_, _ = q.to.Write(line)
		}
	}
}

// next takes the first line. After the last one it takes the number of those that were dropped after it.
func (q *logQueue) next() (line []byte, dropped uint64, closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.lines) == 0 {
		dropped, q.dropped, q.lines = q.dropped, 0, nil
		return nil, dropped, q.closed
	}
	line, q.lines = q.lines[0], q.lines[1:]
	q.bytes -= len(line)
	return line, 0, false
}

// end takes no more lines, and waits until the others have been written, or until they have not for a second.
func (q *logQueue) end() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.signal()
	select {
	case <-q.ended:
	case <-time.After(logEndMax):
	}
}
