package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestEveryOptionIsDocumented reads the operators' pages: whoever adds an option adds its row.
func TestEveryOptionIsDocumented(t *testing.T) {
	pages, err := filepath.Glob("../../docs/operations*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no docs/operations.md: %v", err)
	}
	var text strings.Builder
	for _, name := range pages {
		page, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(page)
	}
	for _, name := range newOptions().names() {
		if !strings.Contains(text.String(), "`--"+name+"`") {
			t.Errorf("docs/operations.md does not mention --%s", name)
		}
	}
}
