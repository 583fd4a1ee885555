package enginetest

import (
	"bytes"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestSalvageMissesNothingBesideLeavesOfARepairTreeThatWasGivenBack: the repair tree has the first and the last keys of a skipped
// range. It is given back, its records are overwritten later, and one of its leaves stays in a free page, from the first of these
// keys to the last. Then all superblocks are lost, or what leads to the leaves of the tree. That leaf is newer than those
// between, and hides none of them.
func TestSalvageMissesNothingBesideLeavesOfARepairTreeThatWasGivenBack(t *testing.T) {
	files, _ := skippingStoreOf(t, []int{0, 1, 2, 3, 195, 196, 197, 198}, 12)
	o := modelOptions(files.files(t))
	pageSize := o.Storage.PageSize
	trees := repairTreePages(t, o.Storage.FS)
	file := files[dataFile]
	if !endRepairTree(t, o, map[string]string{}) {
		t.Fatal("the repair tree did not end")
	}
	s := mustReopen(t, o)
	all := dump(t, s)
	mustClose(t, s)
	if len(all) < 200 {
		t.Fatalf("%d keys", len(all))
	}
	after := mustRead(t, o.Storage.FS)
	spans := 0
	for _, id := range trees {
		old, now := file[int(id)*pageSize:int(id+1)*pageSize], after[dataFile][int(id)*pageSize:int(id+1)*pageSize]
		if !page.IsTree(old, 0) {
			continue
		}
		v := page.Leaf(old).Layout()
		first := append(bytes.Clone(v.Prefix()), v.Suffix(0)...)
		last := append(bytes.Clone(v.Prefix()), v.Suffix(v.Count()-1)...)
		if keys.SpaceOf(first) == keys.SpaceRepairTree {
			clear(now)
			continue
		}
		copy(now, old)
		if string(first) < string(keys.SpaceUser)+"k100" && string(last) > string(keys.SpaceUser)+"k100" {
			spans++
		}
	}
	if spans == 0 {
		t.Fatal("no leaf of the repair tree spans keys of the tree: this tests nothing")
	}
	for _, kind := range []string{"superblocks", "map and inner pages"} {
		fs := after.files(t)
		damageKind(t, nil, fs, pageSize, kind)
		got, report := mustSalvage(t, fs)
		missing := 0
		for key, value := range all {
			if got[key] != value {
				missing++
			}
		}
		if missing > 0 {
			t.Errorf("%s: %d of %d keys are missing or wrong; report %+v", kind, missing, len(all), report)
		}
	}
}
