package epochkvv1

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// The table of errors is what clients in other languages are written against: it has each reason
// once, and no other.
func TestTheTableOfErrorsHasEveryReasonOnce(t *testing.T) {
	files, err := filepath.Glob("../../../../docs/errors*.md")
	if err != nil || len(files) != 1 {
		t.Fatalf("the table of errors is in %v, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]int{}
	for _, match := range regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\|").FindAllSubmatch(text, -1) {
		rows[string(match[1])]++
	}
	for number := range ErrorReason_name {
		if r := ErrorReason(number); r != ErrorReason_ERROR_REASON_UNSPECIFIED && rows[r.Reason()] != 1 {
			t.Errorf("%s has %d rows in %s", r.Reason(), rows[r.Reason()], files[0])
		}
		delete(rows, ErrorReason(number).Reason())
	}
	if len(rows) > 0 {
		t.Errorf("%s has rows of no reason: %v", files[0], rows)
	}
}
