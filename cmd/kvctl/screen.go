package main

import (
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// screenSize is the size of the terminal that standard output is; zeros if it is none, or its size is not known.
func (a *app) screenSize() (columns, rows int) {
	if !a.outTerminal || a.screen == nil {
		return 0, 0
	}
	return a.screen()
}

// cut shortens a line to columns, and marks the cut; zero columns are no bound.
func cut(text string, columns int) string {
	if columns <= 0 || utf8.RuneCountInString(text) <= columns {
		return text
	}
	runes := []rune(text)
	return string(runes[:columns-1]) + "…"
}

// columnWidthMin is what a column of a table keeps, however narrow the terminal is.
const columnWidthMin = 6

// fitted are the widths with which a row, two spaces between its columns, has at most so many columns: the widest ones become
// narrower first. Zero columns are no bound.
func fitted(widths []int, columns int) []int {
	if columns <= 0 {
		return widths
	}
	fit, total := slices.Clone(widths), 2*(len(widths)-1)
	for _, w := range fit {
		total += w
	}
	for ; total > columns; total-- {
		widest := 0
		for i, w := range fit {
			if w > fit[widest] {
				widest = i
			}
		}
		if fit[widest] <= columnWidthMin {
			break
		}
		fit[widest]--
	}
	return fit
}

// severities at the beginning of a line, and their colours.
var (
	severities      = regexp.MustCompile(`(?m)^ *(unavailable|degraded|warning)\b`)
	severityColours = map[string]string{"unavailable": "\x1b[1;31m", "degraded": "\x1b[31m", "warning": "\x1b[33m"}
)

// painted is a text with the severities at the beginnings of its lines in colour, if a person is looking and wants colours:
// https://no-color.org.
func (a *app) painted(text string) string {
	if !a.outTerminal || a.getenv == nil || a.getenv("NO_COLOR") != "" || a.getenv("TERM") == "dumb" {
		return text
	}
	return severities.ReplaceAllStringFunc(text, func(found string) string {
		word := strings.TrimLeft(found, " ")
		return found[:len(found)-len(word)] + severityColours[word] + word + "\x1b[0m"
	})
}

// writeReport prints lines of names and texts, with the severities in colour. Texts are not cut.
func (a *app) writeReport(rows [][]string) error {
	var out strings.Builder
	if err := writeRows(&out, rows, make([]int, 2)); err != nil {
		return err
	}
	return a.print("%s", a.painted(out.String()))
}
