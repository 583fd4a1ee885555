package config

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func writeFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "epochkv.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func mustLoad(t *testing.T, args, environ []string) Config {
	t.Helper()
	in, err := Load(args, environ)
	if err != nil {
		t.Fatalf("Load(%q, %q): %v", args, environ, err)
	}
	in.Config.origins, in.Config.sources = nil, nil // configurations are compared by their values
	return in.Config
}

func TestNoOptionsGiveTheDocumentedDefaults(t *testing.T) {
	c := mustLoad(t, nil, nil)
	if c != Default() {
		t.Fatalf("got %+v, want the defaults", c)
	}
	if c.DataDir != "./data" || c.Listen != "127.0.0.1:7400" || c.HTTP != "127.0.0.1:7401" || c.Durability != DurabilitySync || c.PageSize != 8*KiB {
		t.Fatalf("defaults moved: %+v", c)
	}
}

func TestLaterSourceWins(t *testing.T) {
	file := writeFile(t, "memory: 128MiB\nsync-interval: 10ms\nlog-level: debug\ndurability: async\nmax-streams: 7\n")
	c := mustLoad(t,
		[]string{"--config", file, "--memory", "512MiB"},
		[]string{"PATH=/bin", "KVSERVER_MEMORY=256MiB", "KVSERVER_SYNC_INTERVAL=20ms"})
	if c.Memory != 512*MiB {
		t.Errorf("memory %v: the flag must win over environment and file", c.Memory)
	}
	if c.SyncInterval != 20*time.Millisecond {
		t.Errorf("sync-interval %v: the environment must win over the file", c.SyncInterval)
	}
	if c.LogLevel != slog.LevelDebug || c.Durability != DurabilityAsync || c.Limits.Streams != 7 {
		t.Errorf("%+v: the file must win over the defaults", c)
	}
}

func TestEnvironmentNamesTheFile(t *testing.T) {
	file := writeFile(t, "page-size: 16KiB\n")
	if c := mustLoad(t, nil, []string{"KVSERVER_CONFIG=" + file}); c.PageSize != 16*KiB {
		t.Fatalf("page-size %v", c.PageSize)
	}
}

func TestUnknownNamesAreErrorsInEverySource(t *testing.T) {
	for name, load := range map[string]func() error{
		"flag":        func() error { _, err := Load([]string{"--memroy", "1GiB"}, nil); return err },
		"argument":    func() error { _, err := Load([]string{"serve"}, nil); return err },
		"environment": func() error { _, err := Load(nil, []string{"KVSERVER_MEMROY=1GiB"}); return err },
		"file":        func() error { _, err := Load([]string{"--config", writeFile(t, "memroy: 1GiB\n")}, nil); return err },
		"file help":   func() error { _, err := Load([]string{"--config", writeFile(t, "help: true\n")}, nil); return err },
		"nested":      func() error { _, err := Load([]string{"--config", writeFile(t, "memory: {a: 1}\n")}, nil); return err },
		"twice": func() error {
			_, err := Load([]string{"--config", writeFile(t, "memory: 1GiB\nmemory: 2GiB\n")}, nil)
			return err
		},
		"list":    func() error { _, err := Load([]string{"--config", writeFile(t, "- memory\n")}, nil); return err },
		"no file": func() error { _, err := Load([]string{"--config", "/does/not/exist"}, nil); return err },
		"chain":   func() error { _, err := Load([]string{"--config", writeFile(t, "config: x.yaml\n")}, nil); return err },
	} {
		if err := load(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	_, err := Load(nil, []string{"KVSERVER_MEMROY=1GiB"})
	if !errors.Is(err, errUnknownOption) || !strings.Contains(err.Error(), "KVSERVER_MEMROY") || !strings.Contains(err.Error(), "data-dir") {
		t.Errorf("%v: must name the variable and list the options", err)
	}
}

// TestFileHasABound: a device that never ends, and a file of data, are refused without being read into memory.
func TestFileHasABound(t *testing.T) {
	for name, file := range map[string]string{
		"device": "/dev/zero",
		"data":   writeFile(t, strings.Repeat("# data\n", fileBytesMax/7+1)),
	} {
		if _, err := Load([]string{"--config", file}, nil); err == nil || !strings.Contains(err.Error(), "longer than 1MiB") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if c := mustLoad(t, []string{"--config", writeFile(t, strings.Repeat("#", fileBytesMax-1)+"\n")}, nil); c != Default() {
		t.Errorf("a file of the longest size: %+v", c)
	}
}

func TestEmptyFileChangesNothing(t *testing.T) {
	if c := mustLoad(t, []string{"--config", writeFile(t, "# nothing yet\n")}, nil); c != Default() {
		t.Fatalf("%+v", c)
	}
}

func TestHelpHasExamplesAndEveryOption(t *testing.T) {
	in, err := Load([]string{"--help"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range append(newOptions().names(), "Examples:", "KVSERVER_", "--config", "--version") {
		if !strings.Contains(in.Help, want) {
			t.Errorf("help does not mention %s", want)
		}
	}
}

func TestVersionIsAskedFor(t *testing.T) {
	if in, err := Load([]string{"--version"}, nil); err != nil || !in.Version {
		t.Fatalf("%+v, %v", in, err)
	}
}

func TestEffectiveConfigurationReadsBack(t *testing.T) {
	want := mustLoad(t, []string{"--memory=300MiB", "--http=", "--log-level=warn", "--durability=ASYNC", "--max-connections=3"}, nil)
	var text strings.Builder
	for _, a := range want.LogValue().Group() {
		text.WriteString(a.Key + ": \"" + a.Value.String() + "\"\n")
	}
	if got := mustLoad(t, []string{"--config", writeFile(t, text.String())}, nil); got != want {
		t.Fatalf("printed\n%s\nwhich reads back as %+v, want %+v", text.String(), got, want)
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "17": 17, "17b": 17, "64KiB": 64 * KiB, "256 MiB": 256 * MiB, " 1gib ": GiB, "8TiB": 8 * TiB, "9223372036854775807": 1<<63 - 1,
	} {
		got, err := ParseSize(text)
		if err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", text, got, err, want)
		}
		if again, err := ParseSize(got.String()); err != nil || again != got {
			t.Errorf("%v reads back as %v, %v", got, again, err)
		}
	}
	for _, text := range []string{"", "MiB", "-1", "1.5GiB", "64MB", "64M", "1 000", "9223372036854775808", "8388608TiB", "0x10"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %v, want an error", text, got)
		}
	}
}
