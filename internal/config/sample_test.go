package config

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const sample = "../../packaging/kvserver.yaml"

func TestSampleConfigurationLoads(t *testing.T) {
	in, err := Load([]string{"--config", sample}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if in.Config.DataDir != "/var/lib/epochkv" {
		t.Errorf("the data directory is %q", in.Config.DataDir)
	}
}

// TestSampleConfigurationShowsDefaults loads the lines that are commented out: they name options,
// and change nothing.
func TestSampleConfigurationShowsDefaults(t *testing.T) {
	text, err := os.ReadFile(sample)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, match := range regexp.MustCompile(`(?m)^# ([a-z-]+: [^ ]+)$`).FindAllStringSubmatch(string(text), -1) {
		lines = append(lines, match[1])
	}
	if len(lines) == 0 {
		t.Fatal("the sample shows no default")
	}
	name := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(name, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	in, err := Load([]string{"--config", name}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if in.Config != Default() {
		t.Errorf("the defaults in the sample are\n%+v\nand those of the code\n%+v", in.Config, Default())
	}
}
