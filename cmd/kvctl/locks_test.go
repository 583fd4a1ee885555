package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

// TestLocksAreListedWithWhatHoldsThem: an operator sees which lease holds a lock, and which ones wait for it.
func TestLocksAreListedWithWhatHoldsThem(t *testing.T) {
	endpoint := startReal(t)
	c, err := client.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	var leases [2]*client.Lease
	for i := range leases {
		if leases[i], err = c.GrantLease(t.Context(), time.Hour, "a test"); err != nil {
			t.Fatal(err)
		}
	}
	locks := map[string]*client.Lock{}
	for _, name := range []string{"jobs/a", "jobs/\xff", "other"} {
		if locks[name], err = c.Lock(t.Context(), []byte(name), leases[0], []byte("host-1")); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error, 1)
	go func() {
		_, err := c.Lock(ctx, []byte("jobs/a"), leases[1], nil)
		waited <- err
	}()
	kvctl := func(args ...string) string {
		t.Helper()
		var out, errs bytes.Buffer
		a := &app{in: strings.NewReader(""), out: &out, err: &errs, getenv: func(string) string { return "" }}
		if code := a.run(t.Context(), append(args, "--endpoint", endpoint)); code != 0 {
			t.Fatalf("kvctl %v: exit %d: %s", args, code, errs.String())
		}
		return out.String()
	}
	var rows []lockRow
	for end := time.Now().Add(30 * time.Second); len(rows) == 0 || rows[0].Waiters == 0; time.Sleep(time.Millisecond) {
		rows = rows[:0]
		for line := range strings.Lines(kvctl("locks", "jobs/")) {
			var r lockRow
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatalf("%v in %s", err, line)
			}
			rows = append(rows, r)
		}
		if time.Now().After(end) {
			t.Fatalf("nothing waits: %+v", rows)
		}
	}
	if a := rows[0]; len(rows) != 2 || a.Name != "jobs/a" || a.Lease != leases[0].ID() || a.Value != "host-1" || a.Waiters != 1 || len(a.Waiting) != 1 || a.Waiting[0] != leases[1].ID() {
		t.Errorf("%+v", rows)
	}
	if b := rows[1]; b.Name != "" || string(b.NameBinary) != "jobs/\xff" || b.Waiters != 0 {
		t.Errorf("%+v", b)
	}
	table := kvctl("locks", "-o", "table")
	for _, want := range []string{"NAME", `"jobs/\xff"`, "other", fmt.Sprint(leases[1].ID())} {
		if !strings.Contains(table, want) {
			t.Errorf("no %s in\n%s", want, table)
		}
	}
	cancel()
	if err := <-waited; err == nil {
		t.Error("a cancelled request has the lock")
	}
	for _, l := range locks {
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if list := kvctl("locks"); list != "" {
		t.Errorf("still listed: %s", list)
	}
}
