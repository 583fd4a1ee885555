package archive

import (
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestBaseAtTheTargetIsComparedWithTheArchive: a base that is the target already needs no file, and is refused all the same if the archive shows
// that it is of another history: by its own record or, without one, by what is directly before and after it.
func TestBaseAtTheTargetIsComparedWithTheArchive(t *testing.T) {
	a := newArchived(t)
	at := func(e keys.Epoch) uint64 { return 1_700_000_000_000_000 + uint64(e) }
	add := func(h Header, last keys.Epoch, term keys.Term) string {
		var list []Record
		for e := h.First; e <= last; e++ {
			list = append(list, Record{Epoch: e, Term: term, Body: body(t, at(e), "key", []byte{byte(term)})})
		}
		i := a.put(h, list)
		return FileName(i.First, i.Last.Epoch)
	}
	add(Header{Lineage: testLineage, First: 1, Begin: BeginsFirst, Level: 2}, 10, 1)
	second := add(Header{Lineage: testLineage, First: 11, Begin: Linked, Link: a.last, Level: 2}, 20, 2)
	third := add(Header{Lineage: testLineage, First: 31, Begin: Linked, Link: Link{Epoch: 30, Term: 3}, Level: 2}, 35, 3) // the file before is missing
	for _, c := range []struct {
		what     string
		epoch    keys.Epoch
		term     keys.Term
		time     keys.Epoch // of the commit of this epoch
		history  string
		accepted bool
	}{
		{"the archive's state", 15, 2, 15, "", true},
		{"another time", 15, 2, 16, "", false},
		{"another term", 15, 1, 15, "", false},
		{"the history's state", 15, 2, 15, second, true},
		{"another time than the history", 15, 2, 16, second, false},
		{"the history does not lead to it", 15, 2, 15, third, false},
		{"after a file", 25, 2, 25, "", true},
		{"a later term than the file before it", 25, 3, 25, "", true},
		{"an earlier term than the file before it", 25, 1, 25, "", false},
		{"an earlier time than the file before it", 25, 2, 19, "", false},
		{"the history begins later", 25, 2, 25, third, false},
		{"between files", 30, 3, 30, "", true},
		{"another term than the file after it follows", 30, 2, 30, "", false},
		{"the history follows it", 30, 3, 30, third, true},
		{"the history follows another term", 30, 2, 30, third, false},
		{"after the archive", 40, 3, 40, "", true},
		{"after the archive, of an earlier time", 40, 3, 34, "", false},
		{"after the history", 40, 3, 40, third, false},
	} {
		base, wrong := Point{c.epoch, c.term, time.UnixMicro(int64(at(c.time)))}, new(BaseError)
		plan, err := NewPlan(t.Context(), a.target, testLineage, base, Target{Epoch: c.epoch}, c.history)
		if c.accepted && (err != nil || len(plan.Files) != 0 || plan.Last != base) || !c.accepted && !errors.As(err, &wrong) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}
