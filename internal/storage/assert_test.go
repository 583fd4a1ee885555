package storage

import (
	"errors"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// sealedGeneration holds the epochs [first, end).
func sealedGeneration(first, end keys.Epoch) *generation {
	g := &generation{first: first}
	g.end.Store(uint64(end))
	return g
}

func TestAssertionsNameWhatIsBroken(t *testing.T) {
	active := &generation{first: 30}
	view := func(inTree keys.Epoch, immutables ...*generation) *view {
		return &view{active: active, immutables: immutables, inTree: inTree}
	}
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"ascending generations": {view(9, sealedGeneration(20, 30), sealedGeneration(10, 20)).check(), ""},
		"gaps of epochs":        {view(5, sealedGeneration(20, 25), sealedGeneration(10, 12)).check(), ""},
		"overlap with active":   {view(9, sealedGeneration(20, 31)).check(), "overlaps"},
		"overlap":               {view(9, sealedGeneration(20, 30), sealedGeneration(10, 21)).check(), "overlaps"},
		"oldest first":          {view(9, sealedGeneration(10, 20), sealedGeneration(20, 30)).check(), "overlaps"},
		"not sealed":            {view(9, &generation{first: 20}).check(), "not sealed"},
		"ends before it begins": {view(9, sealedGeneration(20, 19)).check(), "ends before"},
		"merged, still in view": {view(29, sealedGeneration(20, 30)).check(), "the tree has all up to 29"},
		"tree ahead of active":  {view(30).check(), "the tree has all up to 30"},
		"same epoch":            {checkCut(7, 7), ""},
		"later epoch":           {checkCut(7, 8), ""},
		"earlier epoch":         {checkCut(7, 6), "takes the tree back"},
		"pool inside budget":    {checkPool(2, 10, 20), ""},
		"pool outside budget":   {checkPool(3, 10, 20), "exceed the budget"},
		"nothing retired":       {checkRetired(0), ""},
		"freed twice":           {checkRetired(-1), "-1 bytes"},
	} {
		if got := c.err; (got == nil) != (c.want == "") || got != nil && !strings.Contains(got.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, got, c.want)
		}
	}
	g := sealedGeneration(10, 20)
	for epoch, want := range map[keys.Epoch]bool{9: false, 10: true, 19: true, 20: false} {
		if g.contains(epoch) != want {
			t.Errorf("epoch %d in [10, 20): %v", epoch, !want)
		}
	}
}

// TestBrokenInvariantStopsTheStore: no write is accepted after the engine has found a contradiction in its own state.
func TestBrokenInvariantStopsTheStore(t *testing.T) {
	b := newBench(t)
	b.put(0, 10, 10)
	if invariants.Enabled {
		defer func() {
			if recover() == nil {
				t.Error("no panic with the tag invariants")
			}
			_ = b.engine.Close()
		}()
	}
	b.engine.mu.Lock()
	defer b.engine.mu.Unlock()
	b.engine.setViewLocked(&view{active: b.engine.view.Load().active, immutables: []*generation{sealedGeneration(1, 100)}})
	if err := b.engine.Err(); !errors.Is(err, errInvariant) || !errors.Is(err, ErrFailed) {
		t.Fatalf("the store goes on: %v", err)
	}
}
