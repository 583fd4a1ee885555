// Package audit writes a line for each request that an operator wants to be able to prove, and for each refusal.
//
//	request ends ─► Write: format, room in the queue ─► writer goroutine: number, chain, append ─► file, rotated by size
//
// Terms. A line is one JSON object with a sequence number. The chain is that each line has the SHA-256 of the line before
// it, so that a changed, removed or inserted line is found by Verify. It continues over rotations and restarts.
//
// Invariants: no line has a value, a password or a token; the queue is bounded in bytes; what was dropped is counted, and a
// line says how much; lines are numbered without gaps.
//
// The package does not know requests or users: its caller says what a line is about.
package audit

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/epochkv/epochkv/internal/fairqueue"
)

// Full says what happens when the queue is full, or the file cannot be written.
type Full string

// The ways.
const (
	FullDrop  Full = "drop"  // lines are dropped and counted
	FullBlock Full = "block" // requests wait for room, and are refused while nothing can be written
)

// Options of a log.
type Options struct {
	Path       string // of the file that is written
	FileBytes  int64  // from which it is rotated
	Files      int    // that are kept, with the one that is written
	QueueBytes int    // of lines that wait to be written
	Full       Full
	Keys       Keys
	Chain      bool
	Log        *slog.Logger

	openFile  func(path string) (file, error) // of tests
	retry     time.Duration                   // of tests; 0: retryEvery
	patience  time.Duration                   // of tests; 0: patience
	closeWait time.Duration                   // of tests; 0: closeWait
}

// file is what a log is written to.
type file interface {
	Write(b []byte) (int, error)
	Sync() error
	Close() error
	Truncate(size int64) error
}

// ErrUnavailable refuses a request that must be audited and cannot be.
var ErrUnavailable = errors.New("audit: the file cannot be written, so no request is executed that must be audited")

const (
	// patience is how long a write may take before it counts as failed, although it may still succeed.
	patience = 10 * time.Second
	// unknownMax is how many lines a second are written about clients that are not known. Such a line costs a client nothing, and enough of
	// them would push those of others out of the queue, and out of the files.
	unknownMax = 100
	// closeWait is how long Close waits for a device that does not answer: longer than retryEvery.
	closeWait = 1500 * time.Millisecond
)

// stuckError says that the device does not answer.
type stuckError struct{ since time.Time }

func (e *stuckError) Error() string {
	return "audit: a write to the file has not returned since " + e.since.UTC().Format(time.RFC3339)
}

// Log is an open audit log.
type Log struct {
	options Options

	mu      sync.Mutex // a leaf; guards what follows
	queue   []byte     // lines without number and hash, each followed by a newline
	bytes   int        // of queue, of what is being written, and reserved
	dropped uint64     // lines, since the last line that says so
	total   Stats
	second  int64                              // in which the newest line about an unknown client came
	within  int                                // such lines in it
	err     error                              // why the last write failed; nil: it did not
	writing time.Time                          // since when a line is being written; zero: none is
	waiting fairqueue.Queue[any, *waitingLine] // by client
	closed  bool

	work  chan struct{} // a token when there is something to write
	ended chan struct{}
	chain chain
	out   output
}

// Stats counts lines.
type Stats struct {
	Written, Dropped, Errors uint64
	QueueBytes               int
	Since                    time.Time // of the error at hand; zero: none
}

// Open opens the log, and continues what is in its files.
func Open(o Options) (*Log, error) {
	if o.openFile == nil {
		o.openFile = openFile
	}
	o.retry, o.patience, o.closeWait = cmp.Or(o.retry, retryEvery), cmp.Or(o.patience, patience), cmp.Or(o.closeWait, closeWait)
	l := &Log{options: o, work: make(chan struct{}, 1), ended: make(chan struct{})}
	if err := l.recover(); err != nil {
		if l.out.file != nil {
			_ = l.out.file.Close() // nothing was written
		}
		return nil, fmt.Errorf("audit: %w", err)
	}
	go l.run()
	return l, nil
}

// openFile opens a file that no other process writes: its lines would have numbers and hashes of their own.
func openFile(path string) (file, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err // and no file, which a nil *os.File would be
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) { // others: there are no locks here
		return nil, errors.Join(fmt.Errorf("%s is written by another process; give each server a file of its own", path), f.Close())
	}
	return f, nil
}

// Release gives back what Admit has made room for, for a request that has no line after all.
func (l *Log) Release(admitted int) {
	if admitted == 0 || l.options.Full != FullBlock {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bytes -= admitted
	l.wakeLocked()
}

// Write queues a line. admitted is what Admit has made room for; 0 if it was not called.
func (l *Log) Write(e *Event, admitted int) { l.enqueue(e, admitted, admitted > 0) }

// WriteLate is Write for a request that Admit has admitted, and that has given its room back because it lasts. Its line finds room whatever the queue
// has: as many requests last at once as there are streams.
func (l *Log) WriteLate(e *Event) { l.enqueue(e, 0, true) }

// enqueue queues a line, which is never dropped if it has room.
func (l *Log) enqueue(e *Event, admitted int, room bool) {
	if l.options.Full != FullBlock {
		admitted, room = 0, false // Admit has made no room
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bytes -= admitted
	if e.UnknownClient && l.tooManyLocked(e.Time) { // the next line says how many there were
		l.dropped++
		l.total.Dropped++
		l.wakeLocked()
		return
	}
	before := len(l.queue)
	l.queue = e.append(l.queue, l.options.Keys)
	size := len(l.queue) - before
	full := !room && (l.waiting.Len() > 0 || !l.fitsLocked(size)) // those that wait come first
	if l.closed || full {
		l.queue = l.queue[:before]
		l.dropped++
		l.total.Dropped++
		size = 0
	}
	if l.bytes += size; l.closed {
		return
	}
	l.wakeLocked() // it may need less room than it had
	select {
	case l.work <- struct{}{}:
	default:
	}
}

// tooManyLocked counts a line about an unknown client, and reports whether its second has had enough of them.
func (l *Log) tooManyLocked(at time.Time) bool {
	if second := at.Unix(); second != l.second {
		l.second, l.within = second, 0
	}
	l.within++
	return l.within > unknownMax
}

// Stats returns the counts.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.total
	s.QueueBytes = l.bytes
	return s
}

// Err is why lines cannot be written at the moment, or nil.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.errLocked()
}

func (l *Log) errLocked() error {
	if l.err == nil && !l.writing.IsZero() && time.Since(l.writing) > l.options.patience {
		return &stuckError{l.writing}
	}
	return l.err
}

// Close writes what is queued, and a line that says that the log ended as it should. If the device does not answer, Close gives up:
// the lines that are left are lost.
func (l *Log) Close() error {
	l.mu.Lock()
	was := l.closed
	l.closed = true
	l.wakeLocked()
	l.mu.Unlock()
	if was {
		return nil
	}
	close(l.work)
	select {
	case <-l.ended:
		return l.Err()
	case <-time.After(l.options.closeWait):
		return l.abandoned()
	}
}

// abandoned is the error of a Close that has waited in vain.
func (l *Log) abandoned() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := &stuckError{l.writing}
	l.options.Log.Error("the audit log ends without its last lines", "file", l.options.Path, "bytes", l.bytes, "cause", err)
	return err
}
