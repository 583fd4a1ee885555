package main

import (
	"bytes"
	"strings"
	"testing"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestHealthPrintsActiveConditions: a server on a full disk serves reads and deletions, and its health says what it refuses.
func TestHealthPrintsActiveConditions(t *testing.T) {
	full := []*kvpb.Condition{{
		Name: "disk-full", Severity: kvpb.Condition_SEVERITY_DEGRADED, Message: "writes other than deletions are refused", Cause: "no space left",
	}}
	for _, c := range []struct {
		format     string
		serving    bool
		conditions []*kvpb.Condition
		want       string
	}{
		{formatTable, true, nil, "serving\n"},
		{formatTable, true, full, "serving\ndegraded since 1970-01-01T00:00:00Z: disk-full: writes other than deletions are refused: no space left\n"},
		{formatTable, false, full, "degraded since"},
		{formatJSONL, true, nil, "{\"serving\":true}\n"},
		{formatJSONL, true, full, `{"serving":true,"conditions":[{"name":"disk-full","severity":"degraded","message":"writes other than deletions are refused","cause":"no space left","since":"1970-01-01T00:00:00Z"}]}`},
		{formatJSONL, false, full, `{"serving":false,"conditions":[{"name":"disk-full"`},
	} {
		var out bytes.Buffer
		a := &app{out: &out, err: &out, format: c.format}
		if err := a.printHealth(c.serving, c.conditions); err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(out.String(), c.want) {
			t.Errorf("%s, serving %v: %q, want %q", c.format, c.serving, out.String(), c.want)
		}
	}
}
