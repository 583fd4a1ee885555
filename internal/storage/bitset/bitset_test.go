package bitset

import (
	"testing"

	"pgregory.net/rapid"
)

// TestSetFindsWhatAMapFinds drives a set and a map with the same operations and compares every question.
func TestSetFindsWhatAMapFinds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s Set
		model := map[int]bool{}
		const size = 300
		for range rapid.IntRange(0, 400).Draw(t, "steps") {
			i := rapid.IntRange(0, size-1).Draw(t, "i")
			switch rapid.IntRange(0, 5).Draw(t, "op") {
			case 0, 1, 2:
				if s.Add(i) == model[i] {
					t.Fatalf("Add(%d) disagrees", i)
				}
				model[i] = true
			case 3:
				if s.Remove(i) != model[i] {
					t.Fatalf("Remove(%d) disagrees", i)
				}
				delete(model, i)
			case 4:
				s.Trim()
			case 5:
				s.SetWord(i/64, s.Word(i/64))
			}
		}
		if s.Count() != len(model) {
			t.Fatalf("Count %d, want %d", s.Count(), len(model))
		}
		if rapid.Bool().Draw(t, "dense") { // so that runs are short and rare
			for i := rapid.IntRange(0, 9).Draw(t, "first"); i < size; i += rapid.IntRange(1, 11).Draw(t, "step") {
				s.Add(i)
				model[i] = true
			}
		}
		from, n := rapid.IntRange(0, size).Draw(t, "from"), rapid.IntRange(1, 40).Draw(t, "n")
		checkSearches(t, &s, model, from, n)
	})
}

func checkSearches(t *rapid.T, s *Set, model map[int]bool, from, n int) {
	absent, present := from, from
	for model[absent] {
		absent++
	}
	for present < s.Len() && !model[present] {
		present++
	}
	if present >= s.Len() {
		present = None
	}
	if got := s.NextAbsent(from); got != absent {
		t.Fatalf("NextAbsent(%d) = %d, want %d", from, got, absent)
	}
	if got := s.Next(from); got != present {
		t.Fatalf("Next(%d) = %d, want %d", from, got, present)
	}
	last := from - 1
	for last >= 0 && !model[last] {
		last--
	}
	if got := s.Last(from); got != last {
		t.Fatalf("Last(%d) = %d, want %d", from, got, last)
	}
	run := from
	for i := from; i < run+n; i++ {
		if model[i] {
			run = i + 1
		}
	}
	if got, ok := s.Run(from, n, -1); !ok || got != run {
		t.Fatalf("Run(%d, %d) = %d, want %d", from, n, got, run)
	}
}
