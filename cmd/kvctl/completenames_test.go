package main

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

func TestCompletionOffersNamesAndIDs(t *testing.T) {
	endpoint := startReal(t)
	c, err := client.Dial(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	id, err := c.GrantLeaseOnce(t.Context(), time.Hour, "test")
	if err != nil {
		t.Fatal(err)
	}
	hold, err := c.TakeHold(t.Context(), "test", client.Moment{}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	lease, held := strconv.FormatUint(id, 10), strconv.FormatUint(hold.ID, 10)
	for _, test := range []struct{ line, want string }{
		{"lease show ", lease},
		{"lease revoke " + lease[:1], lease},
		{"lease revoke " + lease + " ", ""},
		{"lease keep-alive x", ""},
		{"holds end ", held},
		{"txn end ", ""},
		{"user delete ", ""}, // there are none
	} {
		if got := completedInTime(t, endpoint, "", strings.Split(test.line, " ")...); got != test.want {
			t.Errorf("kvctl %s<Tab> offers %q, want %q", test.line, got, test.want)
		}
	}
}

// TestNamesAreOfferedToVerbsThatExist: the table names verbs by their path.
func TestNamesAreOfferedToVerbsThatExist(t *testing.T) {
	a := &app{getenv: func(string) string { return "" }}
	paths := map[string]bool{}
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		paths[cmd.CommandPath()] = true
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(a.rootCommand())
	for path := range nameArguments {
		if !paths[path] {
			t.Errorf("there is no %q", path)
		}
	}
}
