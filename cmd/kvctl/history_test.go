package main

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client/clienttest"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// retaining keeps the past for so long that the server takes a sample, which takes an epoch, every five minutes.
func retaining(c *config.Config) { c.Retention = 365 * 24 * time.Hour }

// TestScriptsOfThePast runs the scripts in testdata/past as TestScripts does, against the real server with a retention.
func TestScriptsOfThePast(t *testing.T) {
	testseed.SkipUnderRace(t)
	scripts, err := filepath.Glob("testdata/past/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, path := range scripts {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			runScript(t, path, &clienttest.Server{Endpoint: startReal(t, retaining)})
		})
	}
}

// TestHoldsAreRenewedAndEndedByTheIdThatTakePrints.
func TestHoldsAreRenewedAndEndedByTheIdThatTakePrints(t *testing.T) {
	endpoint := startReal(t, retaining)
	run := func(args ...string) string {
		t.Helper()
		var out, errs bytes.Buffer
		a := &app{in: strings.NewReader(""), out: &out, err: &errs, getenv: func(name string) string {
			if name == endpointEnv {
				return endpoint
			}
			return ""
		}}
		if code := a.run(t.Context(), args); code != 0 {
			t.Fatalf("%v: exit %d, %s", args, code, errs.String())
		}
		return strings.TrimSpace(out.String())
	}
	run("put", "k", "v")
	id := run("holds", "take", "1h", "--owner", "o", "--at", "1")
	run("holds", "renew", id, "2h")
	if list := run("holds", "list"); !strings.Contains(list, id) {
		t.Fatalf("%s is not in %s", id, list)
	}
	run("holds", "end", id)
	if list := run("holds", "list"); list != "" {
		t.Fatal(list)
	}
}

// TestTheShellReadsTheStateOfATime until "at now", and writes nothing meanwhile.
func TestTheShellReadsTheStateOfATime(t *testing.T) {
	endpoint := startReal(t, retaining)
	shell := func(lines string) (string, int) {
		var out bytes.Buffer
		a := &app{in: strings.NewReader(lines), out: &out, err: &out, getenv: func(string) string { return "" }}
		code := a.run(t.Context(), []string{"shell", "-o", "raw", "--endpoint", endpoint})
		return out.String(), code
	}
	const apart = 20 * time.Millisecond
	shell("put k one")
	time.Sleep(apart)
	between := time.Now().UTC().Format(time.RFC3339Nano)
	time.Sleep(apart)
	shell("put k two")
	if out, code := shell("at " + between + "\nget k\nscan k\nat now\nget k\n"); code != exitOK || out != "one\nk\tone\ntwo\n" {
		t.Errorf("exit %d, %q", code, out)
	}
	if out, code := shell("at " + between + "\nput k three\n"); code != exitUsage || !strings.Contains(out, "at now") {
		t.Errorf("a write in the past: exit %d, %q", code, out)
	}
	for _, wrong := range []string{"0", "yesterday"} {
		if out, code := shell("at " + wrong); code != exitUsage || !strings.Contains(out, "expected an epoch or a time") {
			t.Errorf("at %s: exit %d, %q", wrong, code, out)
		}
	}
	if out, code := shell("conditions"); code != exitOK || !strings.Contains(out, "erving") {
		t.Errorf("conditions: exit %d, %q", code, out)
	}
	if out, code := shell("status"); code != exitOK || !strings.Contains(out, `"visible"`) {
		t.Errorf("status: exit %d, %q", code, out)
	}
}
