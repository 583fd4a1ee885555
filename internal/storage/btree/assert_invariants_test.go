//go:build invariants

package btree

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestExpensiveChecksReportBrokenInvariants is about the checks that release builds do not have.
func TestExpensiveChecksReportBrokenInvariants(t *testing.T) {
	entries := make([]page.Entry, 2)
	region := leafRegion{bound: page.Separator{Trailer: page.NoTrailer}}
	for i, key := range []string{"a", "b"} {
		entries[i] = page.Entry{Key: []byte(key), Value: []byte("v"), Trailer: keys.MakeTrailer(3, keys.KindSet)}
		region.draft.Add(&entries[i], page.SizeMin)
	}
	p := make([]byte, page.SizeMin)
	region.draft.Build(p, 1)
	if err := checkLeaf(p, &region); err != nil {
		t.Fatal(err)
	}
	fires(t, "keys that do not ascend", func() error { return checkNext(&entries[1], &entries[0]) })
	var other page.Draft
	entries[1].Value = []byte("w")
	for i := range entries {
		other.Add(&entries[i], page.SizeMin)
	}
	other.Build(p, 1)
	fires(t, "a leaf that decodes differently", func() error { return checkLeaf(p, &region) })
	region.draft.Reset()
	for i := range entries {
		region.draft.Add(&entries[1-i], page.SizeMin)
	}
	region.draft.Build(p, 1)
	fires(t, "a leaf that does not verify", func() error { return checkLeaf(p, &region) })

	children := []page.Child{{Separator: region.bound, ID: 3}, {Separator: page.Separator{Key: []byte("m"), Trailer: page.NoTrailer}, ID: 4}}
	page.BuildInner(p, 1, 1, children)
	if err := checkNode(p, children); err != nil {
		t.Fatal(err)
	}
	children[1].ID = 5
	fires(t, "a node that decodes differently", func() error { return checkNode(p, children) })

	fires(t, "a page that is freed twice", func() error { return checkFreed(&Result{Freed: []page.ID{4, 9, 4}}) })
	fires(t, "a root that is freed", func() error { return checkFreed(&Result{Root: Root{ID: 9}, Freed: []page.ID{4, 9}}) })
}
