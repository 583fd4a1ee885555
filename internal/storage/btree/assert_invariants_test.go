//go:build invariants

package btree

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestExpensiveChecksReportBrokenInvariants is about the checks that release builds do not have.
func TestExpensiveChecksReportBrokenInvariants(t *testing.T) {
	region := leafRegion{bound: page.Separator{Trailer: page.NoTrailer}}
	for _, key := range []string{"a", "b"} {
		region.add(&page.Entry{Key: []byte(key), Value: []byte("v"), Trailer: keys.MakeTrailer(3, keys.KindSet)})
	}
	p := make([]byte, page.SizeMin)
	page.BuildLeaf(p, 1, region.entries)
	if err := checkLeaf(p, &region); err != nil {
		t.Fatal(err)
	}
	fires(t, "keys that do not ascend", func() error { return checkNext(&region.entries[1], &region.entries[0]) })
	region.entries[1].Value = []byte("w")
	fires(t, "a leaf that decodes differently", func() error { return checkLeaf(p, &region) })
	region.entries[1], region.entries[0] = region.entries[0], region.entries[1]
	page.BuildLeaf(p, 1, region.entries)
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
