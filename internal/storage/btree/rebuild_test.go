package btree

import (
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestStoredValuesOfDeadInputAreDropped: an input that brings references, as the repair tree does when it gives its versions
// back, may bring dead versions. The merge drops their values.
func TestStoredValuesOfDeadInputAreDropped(t *testing.T) {
	s := newStore(512)
	var entries []Entry
	for epoch := keys.Epoch(9); epoch > 5; epoch-- {
		ref, err := s.Store([]byte(strings.Repeat("v", 1000)))
		if err != nil {
			t.Fatal(err)
		}
		e := set("\x01key", epoch, "")
		e.Value, e.Large = ref[:], true
		entries = append(entries, e)
	}
	res := s.apply(t, s.mergeInput(Root{}, entries, Policy{MinVisible: 20, Snapshots: []keys.Epoch{20}}))
	s.check(t, res.Root)
	if len(s.values) != 1 || res.Stats.Dropped != 3 {
		t.Errorf("%d values in the store, %d dropped", len(s.values), res.Stats.Dropped)
	}
}

// TestTreeInputHasEveryVersionFromAnyKey compares with the entries that the tree was made of.
func TestTreeInputHasEveryVersionFromAnyKey(t *testing.T) {
	s := newStore(512)
	var entries []Entry
	for i := range 60 {
		for epoch := keys.Epoch(1 + i%17); epoch > 0; epoch-- {
			entries = append(entries, set("\x01key-"+string(rune('A'+i)), epoch, strings.Repeat("v", i)))
		}
	}
	res := s.apply(t, s.mergeInput(Root{}, entries, Policy{}))
	if res.Root.Level < 2 {
		t.Fatal("the tree is too small")
	}
	in := NewTreeInput(s, res.Root)
	for from := 0; from < len(entries); from += 7 {
		for from > 0 && string(entries[from].Key) == string(entries[from-1].Key) {
			from--
		}
		in.SeekGE(entries[from].Key)
		var e Entry
		for _, want := range entries[from:] {
			if !in.Next(&e) || string(e.Key) != string(want.Key) || e.Trailer != want.Trailer || string(e.Value) != string(want.Value) {
				t.Fatalf("from %q: %q@%d, want %q@%d, %v", entries[from].Key, e.Key, e.Trailer.Epoch(), want.Key, want.Trailer.Epoch(), in.Err())
			}
		}
		if in.Next(&e) || in.Err() != nil {
			t.Fatalf("from %q: %q after the end, %v", entries[from].Key, e.Key, in.Err())
		}
		for from+1 < len(entries) && string(entries[from].Key) == string(entries[from+1].Key) {
			from++
		}
	}
}
