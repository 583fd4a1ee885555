package main

import (
	"bytes"
	"strings"
	"testing"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestIncompleteSpaceIsPrintedAndEndsWithCodeOfDamage: sums that lack the keys of a damaged page are printed, with those keys, and no script
// takes them for all there is.
func TestIncompleteSpaceIsPrintedAndEndsWithCodeOfDamage(t *testing.T) {
	space := &kvpb.SpaceResponse{
		Pages: &kvpb.PageKinds{}, Prefixes: []*kvpb.PrefixSpace{{Prefix: []byte("user/"), Keys: 7}}, UnreadableTotal: 1,
		Unreadable: []*kvpb.Damage{{Kind: "page", File: "data.ekv", Offset: 8192, Page: 1, KeyLower: []byte("user/3"), Reason: "checksum mismatch"}},
	}
	for format, want := range map[string]string{
		formatTable: `INCOMPLETE    page in data.ekv at 8192, keys from "user/3" up to the end: checksum mismatch`,
		formatJSONL: `"unreadable_total":1`,
	} {
		var out, errs bytes.Buffer
		a := &app{out: &out, err: &errs, format: format}
		if code := a.report(a.tellSpace(space, true)); code != exitCorruption || !strings.Contains(errs.String(), "incomplete") {
			t.Errorf("%s: exit %d, %q", format, code, errs.String())
		}
		if !strings.Contains(out.String(), want) || !strings.Contains(out.String(), "user/") && format == formatTable {
			t.Errorf("%s: no %q in\n%s", format, want, out.String())
		}
	}
	space.Unreadable, space.UnreadableTotal = nil, 0
	a := &app{out: &bytes.Buffer{}, err: &bytes.Buffer{}, format: formatTable}
	if code := a.report(a.tellSpace(space, true)); code != exitOK {
		t.Errorf("whole sums: exit %d", code)
	}
}
