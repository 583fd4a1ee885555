package doctable

import (
	"os"
	"path/filepath"
	"testing"
)

func document(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "a.md")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestUpdateReplacesTheSectionAndNothingElse(t *testing.T) {
	name := document(t, "One.\n<!-- begin generated: x (make generate) -->\nold\n<!-- end generated: x -->\nTwo.\n")
	*update = true
	Check(t, name, "x", Head("a", "b")+Row("1|2", ""))
	*update = false
	Check(t, name, "x", Head("a", "b")+Row("1|2", ""))
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	const want = "One.\n<!-- begin generated: x (make generate) -->\n\n| a | b |\n| --- | --- |\n| 1\\|2 | |\n<!-- end generated: x -->\nTwo.\n"
	if string(text) != want {
		t.Errorf("the document is\n%s", text)
	}
}

func TestDifferenceNamesTheFirstLine(t *testing.T) {
	if got := firstDifference("a\nb\n", "a\nc\n"); got != "document: b\ncode:     c" {
		t.Error(got)
	}
	if got := firstDifference("a\n", "a\nc\n"); got != "document: \ncode:     c" {
		t.Error(got)
	}
}
