package telemetry

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestEveryMetricIsDocumented reads the operators' pages: whoever adds a metric adds its row.
func TestEveryMetricIsDocumented(t *testing.T) {
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
	families, err := NewRegistry(testSources()).Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if name := f.GetName(); strings.HasPrefix(name, "kvserver_") && !strings.Contains(text.String(), "`"+name) {
			t.Errorf("docs/operations.md does not mention %s", name)
		}
	}
}
