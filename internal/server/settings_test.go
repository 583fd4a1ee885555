package server

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// startWithFile runs a server with a configuration file, and returns a function that replaces the file.
func startWithFile(t *testing.T, text string) (h *harness, replace func(string)) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "kvserver.yaml")
	replace = func(text string) {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	replace(text)
	test := testConfig()
	in, err := config.Load([]string{
		"--config", name, "--data-dir", test.DataDir, "--listen", test.Listen, "--http", test.HTTP, "--memory", test.Memory.String(),
		"--memtable-size", test.MemtableSize.String(), "--segment-size", test.SegmentSize.String(), "--probe-interval", "0s", "--transport", string(test.Transport),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return mustStart(t, func(c *config.Config) { *c = in.Config }), replace
}

// optionOf is what GetConfig says of an option: its value and origin.
func optionOf(t *testing.T, h *harness, name string) string {
	t.Helper()
	got, err := h.admin.GetConfig(testContext(t), &pb.GetConfigRequest{})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(got.GetOptions(), func(o *pb.ConfigOption) bool { return o.GetName() == name })
	o := got.GetOptions()[i]
	return o.GetValue() + " " + o.GetOrigin()
}

// TestOptionsAreChangedWhileTheServerRuns: each of them takes effect, and is shown.
func TestOptionsAreChangedWhileTheServerRuns(t *testing.T) {
	h := mustStart(t)
	for name, value := range map[string]string{"slow-request-threshold": "20ms", "log-level": "debug", "cache-size": "16MiB", "trace-ratio": "0.5"} {
		before := optionOf(t, h, name)
		done, err := h.admin.SetConfig(testContext(t), &pb.SetConfigRequest{Name: name, Value: value})
		if err != nil {
			t.Fatal(err)
		}
		if c := done.GetChange(); c.GetName() != name || c.GetValue() != value || !strings.HasPrefix(before, c.GetPrevious()+" ") {
			t.Errorf("%v, it was %s", c, before)
		}
		if got, want := optionOf(t, h, name), value+" "+config.OriginRequest; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if got := time.Duration(h.observer.from.Load()); got != 20*time.Millisecond {
		t.Errorf("requests are slow from %v on", got)
	}
	if got := h.store.Stats().Storage.Cache.Frames * uint64(h.config.PageSize); got != 16<<20 {
		t.Errorf("the cache has %d bytes", got)
	}
	if _, err := h.admin.ResizeCache(testContext(t), &pb.ResizeCacheRequest{CacheBytes: 8 << 20}); err != nil {
		t.Fatal(err)
	}
	if got := optionOf(t, h, "cache-size"); got != "8MiB "+config.OriginRequest {
		t.Errorf("after ResizeCache the cache is shown as %s", got)
	}
	if _, err := h.admin.SetConfig(testContext(t), &pb.SetConfigRequest{Name: "slow-request-threshold", Value: "0s"}); err != nil {
		t.Fatal(err)
	}
	if got := time.Duration(h.observer.from.Load()); got < 100*365*24*time.Hour {
		t.Errorf("with a threshold of 0 requests are slow from %v on", got)
	}
}

// TestOptionsThatCannotBeChangedSayWhy, and nothing changes.
func TestOptionsThatCannotBeChangedSayWhy(t *testing.T) {
	h := mustStart(t)
	for _, c := range []struct {
		name, value string
		code        codes.Code
		reason      pb.ErrorReason
		says        string
	}{
		{"memory", "2GiB", codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_RESTART_NEEDED, "log-level"},
		{"memory", "much", codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_RESTART_NEEDED, "log-level"},
		{"memroy", "2GiB", codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "memory"},
		{"", "", codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "memory"},
		{"log-level", "loud", codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "debug"},
		{"slow-request-threshold", "1ns", codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "slow-request-threshold"},
		{"cache-size", "0", codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "choose from"},
		{"cache-size", "1TiB", codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "cache"},
		{"trace-ratio", "2", codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, "trace-ratio"},
	} {
		before, err := h.admin.GetConfig(testContext(t), &pb.GetConfigRequest{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = h.admin.SetConfig(testContext(t), &pb.SetConfigRequest{Name: c.name, Value: c.value})
		if c.reason == pb.ErrorReason_ERROR_REASON_RESTART_NEEDED {
			failureOf(t, err).want(t, c.code, c.reason, "option")
		} else {
			failureOf(t, err).want(t, c.code, c.reason)
		}
		if err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s %s: %v", c.name, c.value, err)
		}
		if after, err := h.admin.GetConfig(testContext(t), &pb.GetConfigRequest{}); err != nil || after.String() != before.String() {
			t.Errorf("%s %s: the options have changed (%v)", c.name, c.value, err)
		}
	}
}

// TestConfigurationFileIsReadAgain: what can change does, what cannot is named, and a wrong file changes nothing.
func TestConfigurationFileIsReadAgain(t *testing.T) {
	h, replace := startWithFile(t, "slow-request-threshold: 50ms\nmax-streams: 500\n")
	reload := func() (*pb.ReloadConfigResponse, error) {
		return h.admin.ReloadConfig(testContext(t), &pb.ReloadConfigRequest{})
	}
	if done, err := reload(); err != nil || len(done.GetChanged())+len(done.GetRestartNeeded()) > 0 {
		t.Fatalf("nothing has changed: %v, %v", done, err)
	}
	replace("slow-request-threshold: 70ms\ncache-size: 16MiB\nmax-streams: 600\n")
	done, err := reload()
	if err != nil || len(done.GetChanged()) != 2 || len(done.GetRestartNeeded()) != 1 || done.GetRestartNeeded()[0].GetName() != "max-streams" {
		t.Fatalf("%v, %v", done, err)
	}
	if got := optionOf(t, h, "slow-request-threshold"); !strings.HasPrefix(got, "70ms file ") {
		t.Errorf("the threshold is %s", got)
	}
	if got := optionOf(t, h, "max-streams"); !strings.HasPrefix(got, "500 ") {
		t.Errorf("the limit of streams is %s", got)
	}
	if got := time.Duration(h.observer.from.Load()); got != 70*time.Millisecond {
		t.Errorf("requests are slow from %v on", got)
	}

	for _, wrong := range []string{"slow-request-threshold: 1s\nlog-level: loud\n", "slow-request-threshold: 1s\ncache-size: 255MiB\n", "memroy: 1GiB\n", "- x\n"} {
		replace(wrong)
		_, err := reload()
		failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_CONFIG_RELOAD_FAILED)
		if got := optionOf(t, h, "slow-request-threshold"); !strings.HasPrefix(got, "70ms file ") {
			t.Errorf("after %q the threshold is %s", wrong, got)
		}
	}

	// What was set by a request gets the value of the file again, and a size that only a start derives stays.
	if _, err := h.admin.SetConfig(testContext(t), &pb.SetConfigRequest{Name: "log-level", Value: "error"}); err != nil {
		t.Fatal(err)
	}
	replace("")
	done, err = reload()
	if err != nil || len(done.GetChanged()) != 2 || len(done.GetRestartNeeded()) != 2 {
		t.Fatalf("%v, %v", done, err)
	}
	if got := optionOf(t, h, "log-level") + ", " + optionOf(t, h, "cache-size"); !strings.HasPrefix(got, "info default, 16MiB file") {
		t.Errorf("log and cache: %s", got)
	}
}
