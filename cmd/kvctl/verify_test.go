package main

import (
	"strings"
	"testing"
)

// TestDamageSaysWhichKeysItMayHide: also without bounds.
func TestDamageSaysWhichKeysItMayHide(t *testing.T) {
	for want, d := range map[string]damageLine{
		`keys from the beginning up to "b"`:         {KeyUpper: "b"},
		`keys from "a" up to the end`:               {KeyLower: "a"},
		`keys from the beginning up to the end`:     {Kind: "page"},
		`keys from "a" up to "b": checksum`:         {KeyLower: "a", KeyUpper: "b", Reason: "checksum"},
		`page in data at 4096, keys from "a" up`:    {Kind: "page", File: "data", Offset: 4096, KeyLower: "a"},
		`log record in 1.log at 7: is not in order`: {Kind: "log record", File: "1.log", Offset: 7, Reason: "is not in order"},
	} {
		if got := d.text(); !strings.Contains(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
