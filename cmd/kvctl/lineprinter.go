package main

import (
	"bufio"
	"errors"
	"iter"
)

// linePrinter prints a list as it comes, in any format.
type linePrinter struct {
	w      *bufio.Writer
	format string
	header []string
	count  uint64     // of lines
	rows   [][]string // a table's rows that wait for their widths
	widths []int      // of a table's columns; they only grow

	columns int // of the terminal; 0: a table may be as wide as it likes
}

// rowsPerChunk is how many rows a table looks at to find its widths: enough for a screen, and bounded.
const rowsPerChunk = 200

func (a *app) newLinePrinter(header ...string) *linePrinter {
	columns, _ := a.screenSize()
	return &linePrinter{columns: columns, w: bufio.NewWriterSize(a.out, 64<<10), format: a.formatOr(formatJSONL), header: header, widths: make([]int, len(header))}
}

// printLines prints lines, of which describe returns all forms, until there are no more or limit is reached; zero is no limit.
func printLines[Line any](p *linePrinter, lines iter.Seq2[Line, error], limit uint64, describe func(*Line) (row []string, raw, json []byte)) error {
	for l, err := range lines {
		if err != nil {
			return errors.Join(err, p.close())
		}
		if err := p.put(describe(&l)); err != nil {
			return err
		}
		if limit > 0 && p.count == limit {
			break
		}
	}
	return p.close()
}

// put prints a line of which the caller knows all forms.
func (p *linePrinter) put(row []string, raw, json []byte) error {
	p.count++
	switch p.format {
	case formatTable:
		return p.addRow(row)
	case formatRaw:
		json = raw
	case formatJSON:
		_, err := p.w.WriteString(p.separator() + string(json))
		return err
	}
	_, err := p.w.Write(append(json, '\n'))
	return err
}

// separator is what precedes the newest line in a JSON document; nothing in other formats.
func (p *linePrinter) separator() string {
	switch {
	case p.format != formatJSON:
		return ""
	case p.count == 1:
		return "[\n"
	}
	return ",\n"
}

// addRow adds the newest line to a table.
func (p *linePrinter) addRow(row []string) error {
	if p.count == 1 {
		p.rows = append(p.rows, p.header)
	}
	if p.rows = append(p.rows, row); len(p.rows) < rowsPerChunk {
		return nil
	}
	return p.flushRows()
}

func (p *linePrinter) flushRows() error {
	err := writeFitted(p.w, p.rows, p.widths, p.columns)
	p.rows = p.rows[:0]
	return err
}

// close ends the output. A table with no rows prints nothing.
func (p *linePrinter) close() error {
	switch {
	case p.format == formatTable:
		if err := p.flushRows(); err != nil {
			return err
		}
	case p.format == formatJSON && p.count == 0:
		_, _ = p.w.WriteString("[]\n") // Flush has the error
	case p.format == formatJSON:
		_, _ = p.w.WriteString("\n]\n")
	}
	return p.w.Flush()
}
