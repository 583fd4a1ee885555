package audit

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// output is the file that is written. The writer goroutine owns it.
type output struct {
	file  file
	size  int64
	first uint64 // number of the first line of the file
	torn  bool   // part of a line follows size, and could not be removed
	lost  bool   // lines could not be written before the end
	line  []byte
}

// retryEvery is how often a write that failed is repeated.
const retryEvery = time.Second

// run writes what is queued, until the log is closed.
func (l *Log) run() {
	defer close(l.ended)
	var batch []byte
	for range l.work {
		for {
			batch = l.take(batch)
			if len(batch) == 0 {
				break
			}
			l.write(batch)
		}
	}
	if batch = l.take(batch); len(batch) > 0 {
		l.write(batch)
	}
	l.end()
}

// take takes the queue, and puts a line before it if lines were dropped.
func (l *Log) take(batch []byte) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	batch = batch[:0]
	if l.dropped > 0 {
		batch = appendMark(batch, "dropped", "lines", l.dropped)
		l.bytes += len(batch)
		l.dropped = 0
	}
	batch = append(batch, l.queue...)
	l.queue = l.queue[:0]
	return batch
}

// appendMark appends a line about the log itself.
func appendMark(b []byte, event, name string, n uint64) []byte {
	b = append(b, `"time":"`...)
	b = time.Now().UTC().AppendFormat(b, time.RFC3339Nano)
	b = appendText(append(b, '"'), "event", event)
	if name != "" {
		b = appendNumber(b, name, n)
	}
	return append(b, "}\n"...)
}

// write writes lines, and repeats those that fail until they are written or the log is closed.
func (l *Log) write(batch []byte) {
	for len(batch) > 0 {
		end := bytes.IndexByte(batch, '\n') + 1
		for err := l.tryLine(batch[:end]); err != nil; err = l.tryLine(batch[:end]) {
			if !l.failed(err) {
				l.lose(batch)
				return
			}
			time.Sleep(l.options.retry)
		}
		batch = batch[end:]
		l.wrote(end)
	}
}

// tryLine is writeLine, of which Err knows how long it takes.
func (l *Log) tryLine(line []byte) error {
	l.setWriting(time.Now())
	defer l.setWriting(time.Time{})
	return l.writeLine(line)
}

func (l *Log) setWriting(since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.writing = since
}

// lose counts lines that the end of the log leaves unwritten. The file then has no line that says that it ended as it should.
func (l *Log) lose(batch []byte) {
	lines := uint64(bytes.Count(batch, []byte("\n")))
	l.out.lost = true
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bytes -= len(batch)
	l.total.Dropped += lines
	l.options.Log.Error("lines of the audit log are lost", "file", l.options.Path, "lines", lines)
}

// failed notes an error, and reports whether the write should be repeated.
func (l *Log) failed(err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total.Errors++
	if l.err == nil {
		l.total.Since = time.Now()
		l.options.Log.Error("the audit log cannot be written", "file", l.options.Path, "cause", err, "full", string(l.options.Full))
	}
	l.err = err
	l.wakeLocked() // requests that wait for room are refused
	return !l.closed
}

// wrote frees the bytes of a line.
func (l *Log) wrote(bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		l.options.Log.Info("the audit log can be written again", "file", l.options.Path, "dropped", l.total.Dropped)
		l.err, l.total.Since = nil, time.Time{}
	}
	l.bytes -= bytes
	l.total.Written++
	l.wakeLocked()
}

// writeLine numbers a line, chains it, and appends it to the file. A line that is written in part is removed again.
func (l *Log) writeLine(rest []byte) error {
	if err := l.prepare(); err != nil {
		return err
	}
	o := &l.out
	o.line = l.chain.line(o.line[:0], rest, l.options.Chain)
	if n, err := o.file.Write(o.line); err != nil {
		if n > 0 {
			cut := o.file.Truncate(o.size)
			o.torn = cut != nil
			err = errors.Join(err, cut)
		}
		return err
	}
	o.size += int64(len(o.line))
	l.chain.add(o.line[:len(o.line)-1])
	return nil
}

// prepare opens the file that the next line belongs to. A part of a line is removed before that, also from a file that is full.
func (l *Log) prepare() error {
	o := &l.out
	if o.torn {
		if err := l.openCurrent(); err != nil {
			return err
		}
		if err := o.file.Truncate(o.size); err != nil {
			return err
		}
		o.torn = false
	}
	if o.size >= l.options.FileBytes {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	return l.openCurrent()
}

// openCurrent opens the file, if it is not open.
func (l *Log) openCurrent() error {
	if l.out.file != nil {
		return nil
	}
	f, err := l.options.openFile(l.options.Path)
	if err == nil {
		l.out.file = f
	}
	return err
}

// rotate renames the file, and removes the oldest files. A file that was moved or deleted meanwhile has ended, too.
func (l *Log) rotate() error {
	o := &l.out
	if f := o.file; f != nil {
		o.file = nil // a file that was closed can be neither synced nor closed again
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	switch err := os.Rename(l.options.Path, fmt.Sprintf("%s.%020d", l.options.Path, o.first)); {
	case errors.Is(err, fs.ErrNotExist):
		l.options.Log.Warn("the file of the audit log is not there any more: another program has moved or deleted it", "file", l.options.Path, "first_line", o.first)
	case err != nil:
		return err
	}
	o.size, o.first = 0, l.chain.number+1
	l.options.Log.Info("the audit log continues in a new file", "lines", l.chain.number, "hash", l.chain.hex())
	if err := l.removeOldest(); err != nil { // an operator may protect them; the log goes on
		l.options.Log.Warn("old files of the audit log cannot be removed", "file", l.options.Path, "cause", err)
	}
	return nil
}

func (l *Log) removeOldest() error {
	rotated, err := l.rotated()
	for ; len(rotated) > max(0, l.options.Files-1); rotated = rotated[1:] {
		err = errors.Join(err, os.Remove(rotated[0]))
	}
	return err
}

// rotated are the files that are not written any more, oldest first.
func (l *Log) rotated() ([]string, error) {
	dir, base := filepath.Split(l.options.Path)
	entries, err := os.ReadDir(filepath.Clean(dir + "."))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), base+".")
		if first, err := strconv.ParseUint(number, 10, 64); ok && err == nil && number == fmt.Sprintf("%020d", first) {
			names = append(names, filepath.Join(dir, e.Name()))
		}
	}
	slices.Sort(names)
	return names, nil
}

// recover continues the files: it removes a line that was written in part, and says whether the log had ended as it should.
func (l *Log) recover() error {
	o := &l.options
	if err := checkRegular(o.Path); err != nil {
		return err
	}
	if err := l.openCurrent(); err != nil && !isFull(err) { // before it is read: another process may write it
		return err
	}
	rotated, err := l.rotated()
	if err != nil {
		return err
	}
	var last lastLine
	for _, path := range append(rotated[max(0, len(rotated)-1):], o.Path) {
		if err := last.read(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := l.chain.resume(last.text); err != nil {
		return fmt.Errorf("%s: %w; move the file away", o.Path, err)
	}
	l.out.first = l.chain.number + 1
	if last.path == o.Path {
		l.out.size, l.out.torn = last.size, last.torn > 0
		l.out.first = cmp.Or(last.first, l.out.first)
	}
	mark := appendMark(nil, "opened", "", 0)
	if len(last.text) > 0 && !isClosed(last.text) {
		mark = appendMark(nil, "opened_after_unclean_end", "removed_bytes", uint64(last.torn))
	}
	return l.begin(mark)
}

// begin writes the first line. While the disk is full it waits as others do, and keeps no server from its start.
func (l *Log) begin(mark []byte) error {
	err := l.writeLine(mark)
	if !isFull(err) {
		return err
	}
	l.queue, l.bytes = mark, len(mark)
	l.work <- struct{}{}
	l.failed(err)
	return nil
}

func isFull(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

// end writes the last line.
func (l *Log) end() {
	var err error
	if !l.out.lost {
		err = l.tryLine(appendMark(nil, "closed", "", 0))
	}
	if f := l.out.file; f != nil {
		l.setWriting(time.Now()) // until the log has ended
		err = errors.Join(err, f.Sync(), f.Close())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.writing = (time.Time{}); err != nil {
		l.err = err
	}
	l.wakeLocked()
	l.options.Log.Info("the audit log is closed", "lines", l.chain.number, "hash", l.chain.hex())
}

// lastLine is the last complete line of a row of files.
type lastLine struct {
	path  string
	text  []byte
	size  int64  // of the complete lines of the file
	torn  int64  // bytes after them, of lines that were written in part
	first uint64 // number of the first line of the file
}

// checkRegular refuses what is no file: opening a pipe would wait, and a device may have no end.
func checkRegular(path string) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file; name a file, which the server makes if there is none", path)
	}
	return nil
}

func (l *lastLine) read(path string) error {
	if err := checkRegular(path); err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // was only read
	l.path, l.size, l.torn, l.first = path, 0, 0, 0
	r := bufio.NewReader(f)
	for {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			l.torn += int64(len(line))
			return nil
		}
		if err != nil {
			return err
		}
		if bytes.IndexByte(line, 0) >= 0 { // no line has one: its beginning has not come to the disk
			l.torn += int64(len(line))
			continue
		}
		l.size += l.torn + int64(len(line)) // what is torn between lines stays: Verify names it
		l.torn, l.text = 0, line[:len(line)-1]
		if l.first == 0 {
			l.first = numberOf(l.text)
		}
	}
}
