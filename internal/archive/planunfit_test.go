package archive

import (
	"bytes"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// TestAFileThatDoesNotFollowOneMayFollowTheNext: an archiver that could not read the newest file began a chain anew, after the one before it. When all can be
// read, what it has is later than that file.
func TestAFileThatDoesNotFollowOneMayFollowTheNext(t *testing.T) {
	store, err := objectstore.Open(t.TempDir(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	lineage := keys.Lineage{1}
	p := place{store, lineage}
	write := func(h Header, last keys.Epoch) Link {
		w := NewWriter()
		h.Lineage, h.Level = lineage, 2
		w.Reset(h)
		for e := h.First; e <= last; e++ {
			if err := w.Append(&Record{Epoch: e, Term: 1}); err != nil {
				t.Fatal(err)
			}
		}
		info, data := w.Finish()
		if err := store.Create(t.Context(), p.name(logDir, FileName(h.First, last)), objectstore.Bytes(bytes.Clone(data))); err != nil {
			t.Fatal(err)
		}
		return info.Last
	}
	a := write(Header{First: 1, Begin: BeginsFirst}, 10)
	write(Header{First: 11, Begin: BeginsGap}, 30)       // the log did not have epoch 10 any more
	write(Header{First: 11, Begin: Linked, Link: a}, 20) // arrives late
	plan, err := NewPlan(t.Context(), store, lineage, Point{}, Target{}, "")
	if err != nil {
		t.Fatal(err)
	}
	if plan.Last.Epoch != 30 {
		t.Errorf("the latest state is taken to be that of epoch %d, and the archive has epoch 30", plan.Last.Epoch)
	}
}
