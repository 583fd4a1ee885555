package main

import (
	"bytes"
	"encoding/base64"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// CSV as import and export understand it: a header names the columns, in any order: "key" or "key_base64", "value" or "value_base64",
// and, where keys have them, "expires_at_ms" and "lease_id", which are empty for other keys. Text columns hold UTF-8 without
// carriage returns, which CSV readers are free to change.

var (
	csvHeaderText     = []string{"key", "value"}
	csvHeaderBase64   = []string{"key_base64", "value_base64"}
	csvHeaderMetadata = []string{"expires_at_ms", "lease_id"}
)

// csvSource reads records of a CSV file.
type csvSource struct {
	r                    *csv.Reader
	limit                *recordLimit
	key, value           int // columns
	expires, lease       int // columns, or -1
	keyBase64, valBase64 bool
	started              bool

	last     []string // the record before
	lastLine int      // on which it began
}

func newCSVSource(r io.Reader, recordMax int) *csvSource {
	limit := &recordLimit{r: r, max: recordMax}
	reader := csv.NewReader(limit) // each row has as many columns as the header
	return &csvSource{r: reader, limit: limit}
}

// errRecordTooLong ends the reading of a record that no server takes.
var errRecordTooLong = errors.New("the record is longer than a record can be; is a quote not closed?")

// recordLimit bounds what is read for one record. After a quote that is not closed, package csv would read all of the file into memory.
type recordLimit struct {
	r         io.Reader
	max, left int
}

func (l *recordLimit) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errRecordTooLong
	}
	n, err := l.r.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

// next reads a record and says on which line it began. It ends with io.EOF.
func (s *csvSource) next() (record, int, error) {
	if !s.started {
		s.started = true
		if line, err := s.readHeader(); err != nil {
			return record{}, line, err
		}
	}
	fields, line, err := s.read()
	if err != nil {
		return record{}, line, err
	}
	r, err := s.decode(fields)
	return r, line, err
}

// read reads a row. An error of the csv package carries its line itself, which the caller is going to say.
func (s *csvSource) read() ([]string, int, error) {
	s.limit.left = s.limit.max
	fields, err := s.r.Read()
	var parse *csv.ParseError
	switch {
	case errors.As(err, &parse) && errors.Is(err, csv.ErrFieldCount):
		return nil, parse.Line, fmt.Errorf("%d columns, not %d", len(fields), s.r.FieldsPerRecord)
	case errors.As(err, &parse):
		return nil, parse.Line, parse.Err
	case err != nil:
		return nil, s.lineAfter(), err
	}
	line, _ := s.r.FieldPos(0)
	s.last, s.lastLine = fields, line
	return fields, line, nil
}

// lineAfter is the first line after the last record.
func (s *csvSource) lineAfter() int {
	line := s.lastLine + 1
	for _, field := range s.last {
		line += strings.Count(field, "\n")
	}
	return line
}

func (s *csvSource) readHeader() (int, error) {
	header, line, err := s.read()
	if errors.Is(err, io.EOF) {
		return 1, errors.New("no header: the first line must be key,value or key_base64,value_base64")
	}
	if err != nil {
		return line, err
	}
	s.key, s.value, s.expires, s.lease = -1, -1, -1, -1
	for i, name := range header {
		column := &s.key
		switch name {
		case "key", "key_base64":
			s.keyBase64 = name != "key"
		case "value", "value_base64":
			column, s.valBase64 = &s.value, name != "value"
		case "expires_at_ms":
			column = &s.expires
		case "lease_id":
			column = &s.lease
		default:
			return line, fmt.Errorf("column %q: the header must name key or key_base64, and value or value_base64", name)
		}
		if *column >= 0 {
			return line, fmt.Errorf("column %q: the header names it twice, or in two encodings", name)
		}
		*column = i
	}
	if s.key < 0 || s.value < 0 {
		return line, errors.New("the header must name one column for keys and one for values")
	}
	return line, nil
}

func (s *csvSource) decode(fields []string) (record, error) {
	key, err := decodeCSVField(fields[s.key], s.keyBase64)
	if err != nil {
		return record{}, fmt.Errorf("key: %w", err)
	}
	value, err := decodeCSVField(fields[s.value], s.valBase64)
	if err != nil {
		return record{}, fmt.Errorf("value: %w", err)
	}
	if len(key) == 0 {
		return record{}, errors.New("the key is empty")
	}
	r := record{key: key, value: value}
	if r.expiresAt, err = csvNumber(fields, s.expires, "expires_at_ms"); err == nil {
		r.lease, err = csvNumber(fields, s.lease, "lease_id")
	}
	return r, err
}

// csvNumber is a number in a column that may be missing, or empty.
func csvNumber(fields []string, column int, name string) (uint64, error) {
	if column < 0 || fields[column] == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(fields[column], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: expected a number, found %.20q", name, fields[column])
	}
	return n, nil
}

func decodeCSVField(field string, inBase64 bool) ([]byte, error) {
	if inBase64 {
		return base64.StdEncoding.Strict().DecodeString(field)
	}
	if !utf8.ValidString(field) {
		return nil, errors.New("not UTF-8; use the columns key_base64 and value_base64")
	}
	return []byte(field), nil
}

// csvSink writes records as CSV.
type csvSink struct {
	w        *csv.Writer
	inBase64 bool
	metadata bool // the columns for what an entry has beside its value
	started  bool
	fields   []string
}

func newCSVSink(w io.Writer, inBase64, metadata bool) *csvSink {
	return &csvSink{w: csv.NewWriter(w), inBase64: inBase64, metadata: metadata}
}

func (s *csvSink) write(r *record) error {
	if err := s.start(); err != nil {
		return err
	}
	if !s.metadata && r.expiresAt|r.lease != 0 {
		return fmt.Errorf("key %q has a deadline or a lease: use --metadata, which adds columns for them, or JSON lines", r.key)
	}
	s.fields = s.fields[:0]
	for _, b := range [2][]byte{r.key, r.value} {
		switch {
		case s.inBase64:
			s.fields = append(s.fields, base64.StdEncoding.EncodeToString(b))
		case !utf8.Valid(b) || bytes.IndexByte(b, '\r') >= 0:
			return fmt.Errorf("key %q: CSV as text cannot hold it; use --base64, or JSON lines", r.key)
		default:
			s.fields = append(s.fields, string(b))
		}
	}
	if s.metadata {
		s.fields = append(s.fields, unlessZero(r.expiresAt), unlessZero(r.lease))
	}
	return s.w.Write(s.fields)
}

func unlessZero(n uint64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(n, 10)
}

// start writes the header once.
func (s *csvSink) start() error {
	if s.started {
		return nil
	}
	s.started = true
	header := csvHeaderText
	if s.inBase64 {
		header = csvHeaderBase64
	}
	if s.metadata {
		header = slices.Concat(header, csvHeaderMetadata)
	}
	return s.w.Write(header)
}

func (s *csvSink) close() error {
	if err := s.start(); err != nil {
		return err
	}
	s.w.Flush()
	return s.w.Error()
}
