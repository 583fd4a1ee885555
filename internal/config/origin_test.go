package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
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

// TestAPipeIsReadAtTheStartOnly: a shell's --config <(decrypt FILE), or a named pipe, has its content once. Another look would find the defaults, or
// wait for ever.
func TestAPipeIsReadAtTheStartOnly(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "epochkv.yaml")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	written := make(chan error, 1)
	go func() { written <- os.WriteFile(pipe, []byte("slow-request-threshold: 70ms\n"), 0o600) }()
	in, err := Load([]string{"--config", pipe}, nil)
	if err := errors.Join(err, <-written); err != nil || in.Config.Value("slow-request-threshold") != "70ms" {
		t.Fatalf("%v, %v", in.Config.SlowRequests, err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := in.Config.Reread()
		ended <- err
	}()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "no regular file") {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits for the pipe")
		go func() { _ = os.WriteFile(pipe, nil, 0o600) }()
		t.Log(<-ended)
	}
}
