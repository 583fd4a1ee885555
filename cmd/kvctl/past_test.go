package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

func TestPastIsAnEpochOrATime(t *testing.T) {
	now := time.Now()
	for text, want := range map[string]time.Time{
		"2026-01-31T10:32:05Z": time.Date(2026, 1, 31, 10, 32, 5, 0, time.UTC),
		"2026-01-31 10:32:05":  time.Date(2026, 1, 31, 10, 32, 5, 0, time.Local),
		"10:32":                time.Date(now.Year(), now.Month(), now.Day(), 10, 32, 0, 0, time.Local),
		"10:32:07":             time.Date(now.Year(), now.Month(), now.Day(), 10, 32, 7, 0, time.Local),
		"-5m":                  now.Add(-5 * time.Minute),
	} {
		var p past
		if err := p.Set(text); err != nil || p.epoch != 0 || p.time.Sub(want).Abs() > time.Minute {
			t.Errorf("%s: %v, %v", text, p.time, err)
		}
	}
	var p past
	if err := p.Set("41"); err != nil || p.epoch != 41 || !p.time.IsZero() {
		t.Errorf("%+v, %v", p, err)
	}
	var b beginning
	if err := b.Set("0"); err != nil || b.epoch != 0 || !b.time.IsZero() {
		t.Errorf("%+v, %v", b, err)
	}
	if err := b.Set("41"); err != nil || b.epoch != 41 {
		t.Errorf("%+v, %v", b, err)
	}
	for _, text := range []string{"", "yesterday", "--5m", "25:00", "-x", "0", "00", "0001-01-01T00:00:00Z"} {
		if err := p.Set(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}

// TestTransactionsTakeATime: a transaction at a time reads what was there then, and the answer to a time that cannot be read names
// the time.
func TestTransactionsTakeATime(t *testing.T) {
	endpoint := startReal(t, retaining)
	run := func(stdin, args string) (int, string) {
		var out bytes.Buffer
		a := &app{in: strings.NewReader(stdin), out: &out, err: &out, getenv: func(string) string { return "" }}
		code := a.run(t.Context(), append(strings.Fields(args), "--endpoint", endpoint))
		return code, out.String()
	}
	put := func(key, value string) (at time.Time) {
		if code, out := run("", "put "+key+" "+value); code != exitOK {
			t.Fatal(out)
		}
		_, history := run("", "history "+key)
		var newest struct{ Time time.Time }
		if err := json.NewDecoder(strings.NewReader(history)).Decode(&newest); err != nil {
			t.Fatalf("%v: %s", err, history)
		}
		return newest.Time
	}
	// The past can be read from a few milliseconds after the first commit on, and the clock of the store moves once a millisecond.
	later := func(than time.Time) {
		for !put("other", "x").After(than.Add(5 * time.Millisecond)) {
			time.Sleep(time.Millisecond)
		}
	}
	later(put("other", "x"))
	old := put("k", "old")
	later(old)
	put("k", "new")
	for _, test := range []struct {
		at, want string
		code     int
	}{
		{old.Format(time.RFC3339Nano), "old", exitOK},
		{"2001-02-03T04:05:06Z", "2001-02-03T04:05:06Z can", exitError},
		{"noon", "noon", exitUsage},
	} {
		for _, way := range []struct{ stdin, args string }{{"begin at " + test.at + "\nget k\n", "shell"}, {"get k\n", "txn --at " + test.at}} {
			if code, out := run(way.stdin, way.args); code != test.code || !strings.Contains(out, test.want) {
				t.Errorf("%s at %s: exit code %d, want %d, and %q: %s", way.args, test.at, code, test.code, test.want, out)
			}
		}
	}
}

// TestTheZeroTimeIsNoTime: programs print it for a time that they do not have, and it would stand for the newest state, for never, or for the
// latest backup.
func TestTheZeroTimeIsNoTime(t *testing.T) {
	const zero = "0001-01-01T00:00:00Z"
	for _, args := range [][]string{
		{"get", "k", "--at", zero},
		{"txn", "-", "--at", zero},
		{"history", "k", "--from", zero},
		{"watch", "--after", zero},
		{"put", "k", "v", "--expires-at", zero},
		{"touch", "k", "--expires-at", zero},
		{"restore", "--from", "/nowhere", "--to-time", zero, "--data-dir", "/nowhere/new"},
	} {
		if out, errs, code := runWith(t, nil, args...); code != exitUsage || out != "" || !strings.Contains(errs, "year 1") {
			t.Errorf("%v: exit code %d, %s%s", args, code, out, errs)
		}
	}
}
