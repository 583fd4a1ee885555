// Package doctable keeps tables in documents equal to what the code says.
//
// A document has a section between two comments,
//
//	<!-- begin generated: options (make generate) -->
//	<!-- end generated: options -->
//
// and a test that knows the facts calls Check with the text that belongs there. The test fails if the section differs, and writes it with
// the flag -doctable.update, which `make generate` sets. Only tests import this package.
package doctable

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("doctable.update", false, "write the generated sections of documents instead of checking them")

// Check compares the section of a document with want, or writes it.
func Check(t *testing.T, document, section, want string) {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	before, old, after, ok := split(string(text), section)
	if !ok {
		t.Fatalf("%s has no section %q between the comments that package doctable describes", document, section)
	}
	want = "\n" + want
	if old == want {
		return
	}
	if !*update {
		t.Errorf("the section %q of %s differs from the code; run `make generate`. First difference:\n%s", section, document, firstDifference(old, want))
		return
	}
	//nolint:gosec // a document of the repository, readable by everyone
	if err := os.WriteFile(document, []byte(before+want+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// split cuts text at the section: before ends with the line of the begin comment, after starts with the end comment.
func split(text, section string) (before, inside, after string, ok bool) {
	begin, end := "<!-- begin generated: "+section+" (make generate) -->\n", "<!-- end generated: "+section+" -->"
	before, rest, ok := strings.Cut(text, begin)
	if !ok {
		return "", "", "", false
	}
	inside, after, ok = strings.Cut(rest, end)
	return before + begin, inside, end + after, ok
}

func firstDifference(is, want string) string {
	a, b := strings.Split(is, "\n"), strings.Split(want, "\n")
	for i := range max(len(a), len(b)) {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			return "document: " + at(a, i) + "\ncode:     " + at(b, i)
		}
	}
	return ""
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(end)"
}

// Row is one line of a Markdown table. A bar inside a cell is escaped.
func Row(cells ...string) string {
	var b strings.Builder
	b.WriteString("|")
	for _, c := range cells {
		if c != "" {
			b.WriteString(" " + strings.ReplaceAll(c, "|", `\|`))
		}
		b.WriteString(" |")
	}
	return b.String() + "\n"
}

// Head is the first two lines of a Markdown table.
func Head(cells ...string) string {
	return Row(cells...) + "|" + strings.Repeat(" --- |", len(cells)) + "\n"
}
