package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// reading is a status of a server that started at time zero.
func reading(second int, a *kvpb.Activity) *topReading {
	return &topReading{time.Unix(int64(second), 0), &kvpb.StatusResponse{
		StartTime: timestamppb.New(time.Unix(0, 0)), Uptime: durationpb.New(time.Duration(second) * time.Second), Activity: a,
		Health: &kvpb.Health{State: kvpb.Health_STATE_SERVING, Conditions: []*kvpb.Condition{{Name: "disk-low", Message: "\x1b[2J little is free"}}},
	}}
}

func TestTopShowsTheDifferenceOfTwoReadings(t *testing.T) {
	before := reading(100, &kvpb.Activity{
		Commits: 1000, Syncs: 10, CacheHits: 100, CacheMisses: 100,
		Methods: []*kvpb.MethodTotals{{Method: "Get", Count: 500, Latency: []uint64{0, 0, 0, 500}}, {Method: "Clock", Count: 3, Latency: []uint64{3, 0, 0, 0}}},
	})
	after := reading(102, &kvpb.Activity{
		Commits: 1300, Syncs: 20, CacheHits: 190, CacheMisses: 110,
		Methods: []*kvpb.MethodTotals{
			{Method: "Get", Count: 700, Failed: 4, Latency: []uint64{120, 70, 10, 500}},
			{Method: "Clock", Count: 3, Latency: []uint64{3, 0, 0, 0}},
			{Method: "Put", Count: 400, Latency: []uint64{0, 400, 0, 0}},
		},
	})
	v := newActivity(before, after)
	want := []methodActivity{{"Put", 200, 0, 8.192, 8.192}, {"Get", 100, 2, 4.096, 16.384}}
	if len(v.Methods) != 2 || v.Methods[0] != want[0] || v.Methods[1] != want[1] {
		t.Errorf("methods: %+v, want %+v", v.Methods, want)
	}
	if v.Requests != 300 || v.Failed != 2 || v.Commits != 150 || v.Syncs != 5 || *v.HitRatio != 0.9 {
		t.Errorf("%+v, hits %v", v, *v.HitRatio)
	}

	// After a restart all counters have begun anew: rates are those since then.
	restarted := reading(104, &kvpb.Activity{Commits: 40, Methods: []*kvpb.MethodTotals{{Method: "Get", Count: 8, Latency: []uint64{0, 0, 0, 8}}}})
	restarted.status.StartTime, restarted.status.Uptime = timestamppb.New(time.Unix(100, 0)), durationpb.New(4*time.Second)
	v = newActivity(after, restarted)
	if v.Commits != 10 || len(v.Methods) != 1 || v.Methods[0].Rate != 2 || v.Methods[0].P50 != 32.768 || v.HitRatio != nil {
		t.Errorf("after a restart: %+v", v)
	}
}

func TestTopFitsTheScreen(t *testing.T) {
	v := newActivity(reading(1, &kvpb.Activity{}), reading(2, &kvpb.Activity{Methods: []*kvpb.MethodTotals{
		{Method: "Get", Count: 1, Latency: []uint64{1}}, {Method: "Put", Count: 1, Latency: []uint64{1}},
	}}))
	for _, screen := range [][2]int{{200, 60}, {40, 10}, {12, 3}, {1, 2}, {0, 0}} {
		var out bytes.Buffer
		a := &app{out: &out, outTerminal: true, screen: func() (int, int) { return screen[0], screen[1] }}
		if err := a.showLive(v.lines("db1.example:7400")); err != nil {
			t.Fatal(err)
		}
		text, home := strings.CutPrefix(out.String(), "\x1b[H")
		text, erased := strings.CutSuffix(text, "\x1b[J")
		if !home || !erased {
			t.Errorf("%v: the screen is not replaced: %q", screen, out.String())
		}
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		if screen[1] > 0 && len(lines) >= screen[1] {
			t.Errorf("%v: %d lines", screen, len(lines))
		}
		for _, line := range lines {
			if line = strings.TrimSuffix(line, "\x1b[K"); screen[0] > 0 && utf8.RuneCountInString(line) > screen[0] {
				t.Errorf("%v: %q is too long", screen, line)
			}
			if strings.Contains(line, "\x1b") {
				t.Errorf("%v: %q controls the terminal", screen, line)
			}
		}
	}
}

// TestTopRefreshesUntilItIsInterrupted against a server with a load.
func TestTopRefreshesUntilItIsInterrupted(t *testing.T) {
	endpoint := startReal(t)
	c, err := client.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	load := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := c.Put(t.Context(), []byte("k"), []byte("v")); err != nil {
				load <- err
				return
			}
			time.Sleep(time.Millisecond)
		}
		load <- nil
	}()
	r, w := io.Pipe()
	a := &app{out: w, err: io.Discard, getenv: func(string) string { return "" }}
	ended := make(chan int, 1)
	go func() {
		ended <- a.run(ctx, []string{"top", "--interval", "100ms", "-o", "jsonl", "--endpoint", endpoint})
		_ = w.Close()
	}()
	seen := false
	for lines := bufio.NewScanner(r); lines.Scan(); {
		var v activity
		if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
			t.Fatal(err)
		}
		for _, m := range v.Methods {
			if m.Method == telemetry.MethodPut.String() && m.Rate > 0 && m.P99 >= m.P50 && m.P50 > 0 && v.Commits > 0 && v.MemoryBudget == 64<<20 && v.Connections >= 2 {
				seen = true
				cancel()
			}
		}
	}
	if code := <-ended; code != exitInterrupted || !seen {
		t.Errorf("exit %d, requests were shown: %v", code, seen)
	}
	if err := <-load; err != nil {
		t.Error(err)
	}
}

func TestTopEndsAfterItsCountWithOneLineARefresh(t *testing.T) {
	var out, errs bytes.Buffer
	a := &app{out: &out, err: &errs, getenv: func(string) string { return "" }}
	code := a.run(t.Context(), []string{"top", "--interval", "100ms", "--count", "2", "--endpoint", startReal(t)})
	if code != exitOK || strings.Count(out.String(), "\n") != 2 || strings.Count(out.String(), "conditions: ") != 2 || strings.Contains(out.String(), "\x1b") {
		t.Errorf("exit %d, %q, %s", code, out.String(), errs.String())
	}
}
