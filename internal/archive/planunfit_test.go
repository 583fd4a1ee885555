package archive

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestAFileThatDoesNotFollowOneMayFollowTheNext: an archiver that could not read the newest file began a chain anew, after the one before it. When all can be
// read, what it has is later than that file.
func TestAFileThatDoesNotFollowOneMayFollowTheNext(t *testing.T) {
	a := newArchived(t)
	add := func(begin Begin, link Link, first, last keys.Epoch) {
		var list []Record
		for e := first; e <= last; e++ {
			list = append(list, Record{Epoch: e, Term: 1})
		}
		a.put(Header{Lineage: testLineage, First: first, Begin: begin, Link: link, Level: 2}, list)
	}
	add(BeginsFirst, Link{}, 1, 10)
	first := a.last
	add(BeginsGap, Link{}, 11, 30) // the log did not have epoch 10 any more
	add(Linked, first, 11, 20)     // could not be read then
	plan, err := NewPlan(t.Context(), a.target, testLineage, Point{}, Target{}, "")
	if err != nil {
		t.Fatal(err)
	}
	if plan.Last.Epoch != 30 {
		t.Errorf("the latest state is taken to be that of epoch %d, and the archive has epoch 30", plan.Last.Epoch)
	}
}
