package audit

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

// chain numbers lines, and has the hash of the last one.
type chain struct {
	number uint64
	hash   [sha256.Size]byte
}

func (c *chain) hex() string { return hex.EncodeToString(c.hash[:]) }

// line appends the next line, made of what follows its number and hash.
func (c *chain) line(dst, rest []byte, chained bool) []byte {
	dst = append(dst, `{"seq":`...)
	dst = fmt.Appendf(dst, "%d", c.number+1)
	if chained {
		dst = append(append(append(dst, `,"previous":"`...), c.hex()...), '"')
	}
	return append(append(dst, ','), rest...)
}

// add makes a line the last one.
func (c *chain) add(line []byte) { c.number, c.hash = c.number+1, sha256.Sum256(line) }

// resume continues after a line; none begins anew.
func (c *chain) resume(line []byte) error {
	if len(line) == 0 {
		return nil
	}
	h, err := parse(line)
	if err != nil {
		return err
	}
	c.number, c.hash = h.Seq, sha256.Sum256(line)
	return nil
}

// head is what the chain needs of a line.
type head struct {
	Seq      uint64 `json:"seq"`
	Previous string `json:"previous"`
	Event    string `json:"event"`
}

func parse(line []byte) (h head, err error) {
	if err := json.Unmarshal(line, &h); err != nil || h.Seq == 0 {
		return h, errors.New("a line is not one of an audit log")
	}
	return h, nil
}

func numberOf(line []byte) uint64 {
	h, _ := parse(line) // zero is no number
	return h.Seq
}

func isClosed(line []byte) bool {
	h, err := parse(line)
	return err == nil && h.Event == "closed"
}

// LineError is the first thing that is wrong with the lines of an audit log.
type LineError struct {
	File string
	Line int // from 1
	What string
}

func (f *LineError) Error() string { return fmt.Sprintf("%s:%d: %s", f.File, f.Line, f.What) }

// Report is what Verify has seen.
type Report struct {
	Files, Lines     int
	First, Last      uint64
	LastHash         string
	Chained, Unclean int // lines with a hash; ends that were not clean
	Dropped          bool
}

// Verify reads the files of a log, in the order of their first lines, and returns a *LineError for the first line that was
// changed, removed or inserted. The last line has no successor that would tell, and what precedes the first is not known.
func Verify(paths []string) (Report, error) {
	files, err := sorted(paths)
	if err != nil {
		return Report{}, err
	}
	v := verifier{report: Report{Files: len(files)}}
	for _, path := range files {
		if err := v.file(path); err != nil {
			return v.report, err
		}
	}
	if v.pending != nil {
		return v.report, v.pending
	}
	v.report.LastHash = hex.EncodeToString(v.hash[:])
	return v.report, nil
}

// sorted orders files by the numbers of their first lines.
func sorted(paths []string) ([]string, error) {
	first := map[string]uint64{}
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		line, err := bufio.NewReader(f).ReadBytes('\n')
		_ = f.Close() // was only read
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		first[path] = numberOf(bytes.TrimSuffix(line, []byte("\n")))
	}
	paths = slices.Clone(paths)
	slices.SortStableFunc(paths, func(a, b string) int { return cmp.Compare(first[a], first[b]) })
	return paths, nil
}

// verifier compares each line with the one before it.
type verifier struct {
	report  Report
	number  uint64
	hash    [sha256.Size]byte
	at      LineError // where the line before is
	chained bool      // that line has a hash
	pending *LineError
}

func (v *verifier) file(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // was only read
	r := bufio.NewReader(f)
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		switch {
		case errors.Is(err, io.EOF) && len(line) == 0:
			return nil
		case errors.Is(err, io.EOF):
			return &LineError{path, n, "the line has no end: the log was not closed, or its end was removed"}
		case err != nil:
			return err
		}
		if err := v.line(LineError{File: path, Line: n}, line[:len(line)-1]); err != nil {
			return err
		}
	}
}

// line looks at the next line. A line whose hash does not fit is decided by the line after it: if that fits, the line before
// was changed, otherwise the line itself.
func (v *verifier) line(at LineError, line []byte) error {
	h, err := parse(line)
	fits := h.Previous == "" || h.Previous == hex.EncodeToString(v.hash[:])
	switch {
	case v.pending != nil && (err != nil || !fits):
		return &v.at // the line before fits neither its predecessor nor its successor
	case v.pending != nil:
		return v.pending
	case err != nil:
		at.What = "was changed or inserted: it is not a line of an audit log"
		return &at
	case v.number == 0:
	case h.Seq > v.number+1:
		at.What = fmt.Sprintf("lines %d to %d before it were removed", v.number+1, h.Seq-1)
		return &at
	case h.Seq <= v.number:
		v.at.What = "was changed or inserted: its number does not fit the line after it"
		return &v.at
	case v.chained && h.Previous == "" && h.Event != "opened" && h.Event != "opened_after_unclean_end":
		at.What = "was changed: it has no hash"
		return &at
	case !fits:
		fault := v.at
		fault.What = "was changed: the hash in the line after it is another"
		v.pending = &fault
		at.What = "was changed: its hash fits neither the line before nor the line after"
	}
	v.note(at, h, line)
	return nil
}

func (v *verifier) note(at LineError, h head, line []byte) {
	r := &v.report
	if r.First == 0 {
		r.First = h.Seq
	}
	r.Lines, r.Last = r.Lines+1, h.Seq
	if h.Previous != "" {
		r.Chained++
	}
	if h.Event == "opened_after_unclean_end" {
		r.Unclean++
	}
	r.Dropped = r.Dropped || h.Event == "dropped"
	v.at, v.number, v.hash, v.chained = at, h.Seq, sha256.Sum256(line), h.Previous != ""
}
