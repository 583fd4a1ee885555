package main

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client/clienttest"
)

func TestVerdictsFollowTheirBars(t *testing.T) {
	latency, rate := bars{warn: 10, fail: 100}, bars{warn: 100, fail: 20, low: true}
	for _, c := range []struct {
		bars bars
		x    float64
		want verdict
	}{
		{latency, 9.9, verdictPass},
		{latency, 10, verdictWarn},
		{latency, 99, verdictWarn},
		{latency, 100, verdictFail},
		{rate, 101, verdictPass},
		{rate, 100, verdictWarn},
		{rate, 21, verdictWarn},
		{rate, 20, verdictFail},
	} {
		if got := c.bars.judge(c.x); got != c.want {
			t.Errorf("%v at %+v: %s, want %s", c.x, c.bars, got, c.want)
		}
	}
}

func TestCheckDiskMeasuresAndRemovesItsFile(t *testing.T) {
	dir := t.TempDir()
	findings, err := checkDisk(t.Context(), dir, 4<<20, 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if len(findings) != 3 {
		t.Fatalf("%d findings: %+v", len(findings), findings)
	}
	for _, f := range findings {
		if f.Check == "" || f.Verdict == "" || f.Measured == "" || f.Meaning == "" {
			t.Errorf("%+v says too little", f)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if _, err := checkDisk(t.Context(), dir+"/missing", 4<<20, time.Millisecond); err == nil {
		t.Error("a directory that does not exist was measured")
	}
}

func TestCheckLatencyMeasuresAndRemovesItsKey(t *testing.T) {
	server, c := serverWithNeighbour(t)
	findings, err := checkLatency(t.Context(), c, 20*time.Millisecond)
	if err != nil || len(findings) != 2 {
		t.Fatalf("%+v, %v", findings, err)
	}
	mustHoldOnly(t, c, neighbour)
	if calls := server.Calls("Put"); calls < 2 {
		t.Errorf("%d puts: too few to tell a percentile", calls)
	}
}

func TestAFailedCheckIsExitCode1AndAWarningIsNot(t *testing.T) {
	for want, findings := range map[int][]finding{
		exitOK:    {{Check: "a", Verdict: verdictPass}, {Check: "b", Verdict: verdictWarn}},
		exitError: {{Check: "a", Verdict: verdictFail, Measured: "9 s", Meaning: "too slow"}, {Check: "b", Verdict: verdictPass}},
	} {
		for _, format := range []string{formatTable, formatJSON, formatJSONL, formatRaw} {
			var out bytes.Buffer
			a := &app{out: &out, format: format}
			err := a.printFindings(findings)
			if exitCode(err) != want || want == exitError && !errors.Is(err, errCheckFailed) {
				t.Errorf("%s: %v", format, err)
			}
			for _, f := range findings {
				if !strings.Contains(out.String(), string(f.Verdict)) {
					t.Errorf("%s does not show %s:\n%s", format, f.Verdict, out.String())
				}
			}
		}
	}
}

func TestCheckNeedsItsArguments(t *testing.T) {
	server := clienttest.Start(t)
	if code, _, _ := kvctl(t.Context(), server, "check", "disk"); code != exitUsage {
		t.Errorf("exit %d, want %d", code, exitUsage)
	}
}
