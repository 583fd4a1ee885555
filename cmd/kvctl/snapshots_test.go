package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// TestSnapshotsAreListedAndEnded: an operator finds what keeps versions, and its client is told that it was ended.
func TestSnapshotsAreListedAndEnded(t *testing.T) {
	endpoint := startReal(t)
	c, err := client.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	tx, err := c.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	kvctl := func(args ...string) string {
		t.Helper()
		var out, errs bytes.Buffer
		a := &app{in: strings.NewReader(""), out: &out, err: &errs, getenv: func(string) string { return "" }}
		if code := a.run(t.Context(), append(args, "--endpoint", endpoint)); code != 0 {
			t.Fatalf("kvctl %v: exit %d: %s", args, code, errs.String())
		}
		return out.String()
	}
	var row struct {
		ID        uint64
		Kind      string
		Age, Peer string
	}
	list := kvctl("snapshots", "list")
	if err := json.Unmarshal([]byte(list), &row); err != nil {
		t.Fatalf("%v in %s", err, list)
	}
	if row.ID != tx.ID() || row.Kind != "transaction" || row.Age == "" || !strings.Contains(row.Peer, ":") {
		t.Errorf("listed %s", list)
	}
	if table := kvctl("snapshots", "list", "-o", "table"); !strings.Contains(table, "transaction") || !strings.Contains(table, row.Peer) {
		t.Errorf("as a table:\n%s", table)
	}
	if printed := kvctl("snapshots", "end", fmt.Sprint(row.ID)); printed != "" {
		t.Errorf("printed %q", printed)
	}
	var e *client.Error
	if _, err := tx.Get([]byte("k")); !errors.As(err, &e) || e.Reason != kvpb.ErrorReason_ERROR_REASON_TXN_ENDED {
		t.Errorf("the client is told %v", err)
	}
	if list := kvctl("snapshots", "list"); list != "" {
		t.Errorf("still listed: %s", list)
	}
}
