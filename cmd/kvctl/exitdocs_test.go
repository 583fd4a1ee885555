package main

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

var errorRow = regexp.MustCompile("(?m)^\\| `([A-Z_]+)` \\| ([A-Z_]+) \\|.*\\| ([0-9]+) \\|$")

// TestDocumentedExitCodesAreThoseOfTheCode compares the last column of docs/errors.md.
func TestDocumentedExitCodesAreThoseOfTheCode(t *testing.T) {
	text, err := os.ReadFile("../../docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := errorRow.FindAllStringSubmatch(string(text), -1)
	if len(rows) != len(kvpb.ErrorReason_name)-1 {
		t.Fatalf("the table has %d rows with an exit code, the contract %d reasons", len(rows), len(kvpb.ErrorReason_name)-1)
	}
	for _, row := range rows {
		reason, known := kvpb.ErrorReason_value["ERROR_REASON_"+row[1]]
		var code codes.Code
		if err := code.UnmarshalJSON([]byte(strconv.Quote(row[2]))); err != nil || !known {
			t.Errorf("%s %s: %v", row[1], row[2], err)
			continue
		}
		if got := strconv.Itoa(exitCodeOf(&client.Error{Code: code, Reason: kvpb.ErrorReason(reason)})); got != strings.TrimSpace(row[3]) {
			t.Errorf("docs/errors.md: %s ends kvctl with %s, the code with %s", row[1], row[3], got)
		}
	}
}
