package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/epochkv/epochkv/client"
)

const (
	formatTable = "table"
	formatJSON  = "json"
	formatJSONL = "jsonl"
	formatRaw   = "raw"
)

// tableCellRunesMax keeps a row of a table on one line. The other formats show everything.
const tableCellRunesMax = 60

// formatOr is the output format: the one asked for, else a table for people and inPipe for programs.
func (a *app) formatOr(inPipe string) string {
	switch {
	case a.format != "":
		return a.format
	case a.outTerminal:
		return formatTable
	}
	return inPipe
}

// printsJSON reports whether a format is JSON, whole or one document a line.
func printsJSON(format string) bool { return format == formatJSON || format == formatJSONL }

// bytesArg reads a key or value from the command line.
func (a *app) bytesArg(arg string) ([]byte, error) {
	if !a.hex {
		return []byte(arg), nil
	}
	b, err := hex.DecodeString(arg)
	if err != nil {
		return nil, usageError{fmt.Errorf("%q is not hexadecimal: %w", arg, err)}
	}
	return b, nil
}

// bytesArgs reads several.
func (a *app) bytesArgs(args []string) ([][]byte, error) {
	all := make([][]byte, len(args))
	for i, arg := range args {
		b, err := a.bytesArg(arg)
		if err != nil {
			return nil, err
		}
		all[i] = b
	}
	return all, nil
}

// rawBytes is how raw output shows bytes.
func (a *app) rawBytes(b []byte) []byte {
	if a.hex {
		return hex.AppendEncode(nil, b)
	}
	return b
}

// wholeCell is how a table shows bytes: printable, and on one line.
func (a *app) wholeCell(b []byte) string {
	text := string(b)
	if a.hex {
		text = hex.EncodeToString(b)
	} else if !isPlain(b) {
		text = strconv.Quote(text)
	}
	return text
}

// cell is wholeCell, cut if it is long.
func (a *app) cell(b []byte) string {
	return cut(a.wholeCell(b), tableCellRunesMax)
}

// isPlain reports whether a table can show b as it is.
func isPlain(b []byte) bool {
	if !utf8.Valid(b) {
		return false
	}
	for _, r := range string(b) {
		if !strconv.IsPrint(r) {
			return false
		}
	}
	return true
}

// printable is text with everything escaped that a terminal does not show as it is: messages have names of files and texts of servers.
func printable(text string) string {
	plain := func(r rune) bool { return r == '\n' || r == '\t' || strconv.IsPrint(r) }
	if utf8.ValidString(text) && strings.IndexFunc(text, func(r rune) bool { return !plain(r) }) < 0 {
		return text
	}
	var out strings.Builder
	for text != "" {
		r, size := utf8.DecodeRuneInString(text)
		if !plain(r) || r == utf8.RuneError && size == 1 {
			quoted := strconv.Quote(text[:size])
			out.WriteString(quoted[1 : len(quoted)-1])
		} else {
			out.WriteString(text[:size])
		}
		text = text[size:]
	}
	return out.String()
}

// oneLine is text for a cell: names and labels are of any client, and change neither the terminal nor the rows of a table.
func oneLine(text string) string { return strings.ReplaceAll(printable(text), "\n", " ") }

// written prints the epoch of a write.
func (a *app) written(epoch client.Epoch) error {
	switch a.formatOr(formatJSONL) {
	case formatTable:
		return a.print("ok, epoch %d\n", epoch)
	case formatRaw:
		return a.print("%d\n", epoch)
	}
	return a.print("{\"epoch\":%d}\n", epoch)
}

func (a *app) print(format string, args ...any) error {
	_, err := fmt.Fprintf(a.out, format, args...)
	return err
}

// printJSON prints v on one line, or indented for format json.
func (a *app) printJSON(format string, v any) error {
	encoder := json.NewEncoder(a.out)
	encoder.SetEscapeHTML(false)
	if format == formatJSON {
		encoder.SetIndent("", "  ")
	}
	return encoder.Encode(v)
}

// entryPrinter prints entries as they come, in any format. Close ends the output.
type entryPrinter struct {
	*linePrinter
	app      *app
	keysOnly bool
	whole    bool // a table shows values as they are, however long
	line     []byte
}

func (a *app) newEntryPrinter(keysOnly bool) *entryPrinter {
	header := []string{"KEY", "VALUE", "EPOCH"}
	if keysOnly {
		header = []string{"KEY", "EPOCH"}
	}
	return &entryPrinter{linePrinter: a.newLinePrinter(header...), app: a, keysOnly: keysOnly}
}

func (p *entryPrinter) print(e client.Entry) error {
	p.count++
	switch p.format {
	case formatTable:
		return p.addEntry(e)
	case formatRaw:
		return p.printRaw(e)
	}
	return p.printJSON(e)
}

func (p *entryPrinter) printRaw(e client.Entry) error {
	line := append(p.line[:0], p.app.rawBytes(e.Key)...)
	if !p.keysOnly {
		line = append(line, '\t')
		line = append(line, p.app.rawBytes(e.Value)...)
	}
	p.line = append(line, '\n')
	_, err := p.w.Write(p.line)
	return err
}

func (p *entryPrinter) printJSON(e client.Entry) error {
	r := record{key: e.Key, value: e.Value, epoch: e.Epoch, expiresAt: milliseconds(e.ExpiresAt), lease: e.Lease, keyOnly: p.keysOnly}
	p.line = r.appendJSON(append(p.line[:0], p.separator()...), p.app.hex)
	if p.format == formatJSONL {
		p.line = append(p.line, '\n')
	}
	_, err := p.w.Write(p.line)
	return err
}

func (p *entryPrinter) addEntry(e client.Entry) error {
	cell := p.app.cell
	if p.whole {
		cell = p.app.wholeCell
	}
	row := []string{cell(e.Key), cell(e.Value), strconv.FormatUint(uint64(e.Epoch), 10)}
	if p.keysOnly {
		row = []string{row[0], row[2]}
	}
	return p.addRow(row)
}

// writeTable prints a list with its header. On a terminal its rows are as wide as the terminal at most.
func (a *app) writeTable(rows [][]string) error {
	columns, _ := a.screenSize()
	return writeFitted(a.out, rows, make([]int, len(rows[0])), columns)
}

// writeRows writes rows in columns at least as wide as widths, which it widens.
func writeRows(w io.Writer, rows [][]string, widths []int) error {
	return writeFitted(w, rows, widths, 0)
}

// writeFitted is writeRows with a bound for the width of rows, which the widest cells are cut for; zero is no bound.
func writeFitted(w io.Writer, rows [][]string, widths []int, columns int) error {
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(oneLine(cell)))
		}
	}
	widths = fitted(widths, columns)
	var line strings.Builder
	for _, row := range rows {
		line.Reset()
		for i, cell := range row {
			cell = cut(oneLine(cell), widths[i])
			line.WriteString(cell)
			if i < len(row)-1 {
				line.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+2))
			}
		}
		line.WriteByte('\n')
		if _, err := io.WriteString(w, line.String()); err != nil {
			return err
		}
	}
	return nil
}

// printRows prints a list as JSON, one document or a line a row, or reports false if the format is a table, which the caller prints.
func printRows[Row any](a *app, rows []Row) (printed bool, err error) {
	return printRowsOr(a, rows, formatJSONL)
}

// printReport is printRows for what people read: it is a table in a pipe, too.
func printReport[Row any](a *app, rows []Row) (printed bool, err error) {
	return printRowsOr(a, rows, formatTable)
}

func printRowsOr[Row any](a *app, rows []Row, inPipe string) (printed bool, err error) {
	switch format := a.formatOr(inPipe); format {
	case formatJSON:
		return true, a.printJSON(format, rows)
	case formatJSONL:
		for _, r := range rows {
			if err := a.printJSON(format, r); err != nil {
				return true, err
			}
		}
		return true, nil
	}
	return false, nil
}
