package config

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const sample = "../../deploy/systemd/kvserver.yaml"

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
	in.Config.origins, in.Config.sources = nil, nil // the values are compared
	if in.Config != Default() {
		t.Errorf("the defaults in the sample are\n%+v\nand those of the code\n%+v", in.Config, Default())
	}
}

// TestUnitStartsTheServerUntilItServes: with the limit that systemd has by default, five starts that fail within ten seconds leave the server down.
func TestUnitStartsTheServerUntilItServes(t *testing.T) {
	text, err := os.ReadFile("../../deploy/systemd/kvserver.service")
	if err != nil {
		t.Fatal(err)
	}
	unit, service, ok := strings.Cut(string(text), "\n[Service]\n")
	if !ok || !strings.Contains(service, "\nRestart=on-failure\n") || strings.Contains(service, "\nStartLimit") {
		t.Errorf("the service is not started again, or has a limit in the wrong section:\n%s", service)
	}
	for _, line := range []string{"StartLimitIntervalSec=0", "Wants=network-online.target", "After=network-online.target"} {
		if !strings.Contains(unit, "\n"+line+"\n") {
			t.Errorf("the unit has no line %s", line)
		}
	}
}

// TestManifestsNameOptionsThatExist reads what the manifests of containers pass to the server.
func TestManifestsNameOptionsThatExist(t *testing.T) {
	tls := writeFiles(t)
	for name, want := range map[string]int{"compose.yaml": 2, "kubernetes/epochkv.yaml": 8} {
		text, err := os.ReadFile(filepath.Join("../../deploy", name))
		if err != nil {
			t.Fatal(err)
		}
		var args []string
		for _, match := range regexp.MustCompile(`(?m)(?:command: \[|^ +- |", )"?(--[a-z.-]+(?:=[^"\s,\]]+)?)`).FindAllStringSubmatch(string(text), -1) {
			if !strings.HasPrefix(match[1], "--config.file") { // of Prometheus
				args = append(args, strings.ReplaceAll(match[1], "/tls/", tls+"/"))
			}
		}
		if _, err := Load(args, nil); err != nil || len(args) != want {
			t.Errorf("%s: %q: %v", name, args, err)
		}
	}
}

// writeFiles makes a directory with the files that the manifests name.
func writeFiles(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, name := range []string{"server.crt", "server.key", "ca.crt"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
