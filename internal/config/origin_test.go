package config

import (
	"os"
	"path/filepath"
	"testing"
)

func TestOptionsNameTheSourceThatWon(t *testing.T) {
	file := filepath.Join(t.TempDir(), "epochkv.yaml")
	if err := os.WriteFile(file, []byte("memory: 2GiB\nsync-interval: 20ms\nio: pread\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	in, err := Load([]string{"--config", file, "--io", "uring"}, []string{"KVSERVER_SYNC_INTERVAL=30ms", "KVSERVER_LOG_FORMAT=json"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][2]string{
		"memory": {"2GiB", "file " + file + ":1"}, "sync-interval": {"30ms", OriginEnvironment}, "log-format": {"json", OriginEnvironment},
		"io": {"uring", OriginFlag}, "gc-interval": {"100ms", OriginDefault},
	}
	found := 0
	for _, o := range in.Config.Options() {
		w, ok := want[o.Name]
		switch {
		case ok && (o.Value != w[0] || o.Origin != w[1]):
			t.Errorf("%s = %s from %s, want %s from %s", o.Name, o.Value, o.Origin, w[0], w[1])
		case !ok && o.Origin != OriginDefault:
			t.Errorf("%s is from %s", o.Name, o.Origin)
		case ok:
			found++
		}
	}
	if found != len(want) {
		t.Errorf("%d of %d options were found", found, len(want))
	}
	for _, o := range Default().Options() {
		if o.Origin != OriginDefault {
			t.Errorf("%s is from %s", o.Name, o.Origin)
		}
	}
}
